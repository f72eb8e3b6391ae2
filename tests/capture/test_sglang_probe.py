"""The probe hook on a stand-in with SGLang's shape: what it prints, and what the doctor makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from eagle3lab.capture import sglang_probe
from eagle3lab.capture.sglang_probe import PREFIX, compare, create
from eagle3lab.doctor.checks import probe as checks
from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding
from eagle3lab.doctor.registry import find_check

H, POINTS, VOCAB, DRAFT_VOCAB = 8, 3, 40, 20


class Processor(nn.Module):
    """Called with SGLang's five positional arguments."""

    def forward(self, ids: Tensor, states: Tensor, head: nn.Module, batch: Any, aux: Any = None) -> Tensor:
        return states @ head.weight.T


class Trunk(nn.Module):
    def __init__(self, points: list[int] | None) -> None:
        super().__init__()
        if points is None:
            self.fc = nn.Linear(POINTS * H, H, bias=False)
        else:
            self.layers_to_capture = points


class Model(nn.Module):
    """A target (`points` given) or a drafter. `forward` is called directly, as SGLang does."""

    def __init__(self, vocab: int, points: list[int] | None = None) -> None:
        super().__init__()
        self.model, self.lm_head = Trunk(points), nn.Linear(H, vocab, bias=False)
        self.logits_processor = Processor()
        self.hot_token_id: Tensor | None = None

    def forward(self, states: Tensor, aux: Any = None) -> Tensor:
        batch = SimpleNamespace(spec_info=SimpleNamespace(hidden_states=states))
        if states.shape[-1] != H:
            states = self.model.fc(states)
        return self.logits_processor(None, states, self.lm_head, batch, aux)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draw = torch.Generator().manual_seed(1)
    tensors = {
        "fc.weight": torch.randn(H, POINTS * H, generator=draw).to(torch.bfloat16),
        "lm_head.weight": torch.randn(DRAFT_VOCAB, H, generator=draw).to(torch.bfloat16),
        "d2t": torch.arange(DRAFT_VOCAB, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def load(model: Model, folder: Path) -> None:
    """As SGLang loads: known names are copied, all others vanish."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        for known in (name, name.removeprefix("model.")):
            if known in tensors:
                parameter.data = tensors[known].float()
    if "d2t" in tensors:
        model.hot_token_id = tensors["d2t"] + torch.arange(DRAFT_VOCAB)


def watch(model: Model, folder: Path | None) -> None:
    hook = create({"draft": str(folder)} if folder else {})
    for name, module in model.named_modules():
        if name.split(".")[-1] in ("fc", "logits_processor"):
            module.register_forward_hook(hook)


def findings(log: str) -> list[Finding]:
    facts = Facts()
    facts.put("log", log, "log")
    return [one for code in ("probe-fc", "probe-weights") for one in find_check(code).findings(facts)]


def serve(folder: Path, capsys: pytest.CaptureFixture[str], *, width: int) -> tuple[str, Model]:
    """The log of a target and a drafter after one pass of five tokens, and three that say nothing new."""
    target, drafter = Model(VOCAB, [2, 4, 6]), Model(DRAFT_VOCAB)
    load(drafter, folder)
    for model in (target, drafter):
        watch(model, folder)
    states = [torch.randn(5, H) for _ in range(POINTS)]
    for _ in range(2):
        target(torch.randn(5, H), states if width != H else None)
        drafter(torch.randn(0, width))  # an idle rank
        drafter(torch.randn(5, width))
        drafter(torch.randn(1, H))  # later drafts of a chain are H wide, and rightly skip fc
    return capsys.readouterr().out, drafter


def test_a_right_drafter(folder: Path, capsys) -> None:
    log, _ = serve(folder, capsys, width=POINTS * H)
    assert log.count(PREFIX) == 2
    texts = [one.message for one in findings(log)]
    assert texts[0] == "fc input 24 = 3 x 8, float32, SGLang's ids [2, 4, 6] (rank 0)"
    assert texts[1] == "fc, lm_head, d2t equal the file (rank 0)"
    assert [one.severity for one in findings(log)] == ["info", "info"]


def test_fc_that_is_never_called(folder: Path, capsys) -> None:
    log, _ = serve(folder, capsys, width=H)
    first = findings(log)[0]
    assert first.severity == "error"
    assert first.message == (
        "fc never called: it got 8 numbers a token, fc reads 24; the target recorded no states: "
        "EAGLE, not EAGLE3 (rank 0)"
    )


@pytest.mark.parametrize("name", ["fc.weight", "lm_head.weight", "d2t"])
def test_renamed_keys_are_seen(folder: Path, capsys, name: str) -> None:
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    tensors[f"module.{name}"] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")
    wrong = [one for one in findings(serve(folder, capsys, width=POINTS * H)[0]) if one.severity == "error"]
    assert len(wrong) == 1 and f"loaded {name.removesuffix('.weight')} " in wrong[0].message
    assert name == "d2t" or f"does not know the name module.{name}" in wrong[0].message


@pytest.mark.parametrize("name", ["fc", "lm_head", "d2t"])
def test_one_wrong_number_is_seen(folder: Path, capsys, name: str) -> None:
    """The wrong version: weights that load, and differ in one place."""
    target = Model(DRAFT_VOCAB)
    load(target, folder)
    assert target.hot_token_id is not None
    place = {"fc": target.model.fc.weight.data, "lm_head": target.lm_head.weight.data, "d2t": target.hot_token_id}[name]
    place.view(-1)[7] += 1
    watch(target, folder)
    target(torch.randn(5, POINTS * H))
    wrong = [one for one in findings(capsys.readouterr().out) if one.severity == "error"]
    assert [one.subject for one in wrong] == [name] and wrong[0].actual == pytest.approx(1)


def test_ranks_hold_their_rows(folder: Path, monkeypatch) -> None:
    """Column-parallel fc (the MLA draft), and a head whose rows are padded: slices equal, neighbours do not."""
    drafter = Model(DRAFT_VOCAB)
    load(drafter, folder)
    fc, head = drafter.model.fc.weight.data, drafter.lm_head.weight.data
    for rank in range(4):
        monkeypatch.setattr(sglang_probe, "_rank", lambda rank=rank: rank)
        own, other = fc[2 * rank : 2 * rank + 2], fc[2 * ((rank + 1) % 4) :][:2]
        assert compare("fc", own, folder)["equal"] is True
        assert compare("fc", other, folder)["equal"] is False
    padded = torch.cat([head[8:14], torch.zeros(2, H)])
    assert compare("lm_head", padded, folder, (8, 14))["equal"] is True
    assert compare("lm_head", padded, folder, (9, 15))["equal"] is False
    assert compare("lm_head", torch.zeros(VOCAB, H), folder, (0, DRAFT_VOCAB))["equal"] is False


def test_statistics_are_those_of_all_values(folder: Path) -> None:
    drawn = torch.randn(9001, 3, generator=torch.Generator().manual_seed(2)) * 0.01 + 5
    found = sglang_probe.describe(drawn)
    assert found["mean"] == pytest.approx(drawn.double().mean().item(), rel=1e-12)
    assert found["std"] == pytest.approx(drawn.double().std(unbiased=False).item(), rel=1e-9)
    assert sglang_probe.describe(torch.tensor([[float("nan")]]))["mean"] is None


def test_nothing_it_meets_ends_the_engine(capsys, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"no such file")
    drafter = Model(DRAFT_VOCAB)
    watch(drafter, tmp_path)
    drafter(torch.randn(5, POINTS * H))
    line = json.loads(capsys.readouterr().out.partition(PREFIX)[2])
    assert line["part"] == "failed" and line["rank"] == 0
    assert "could not check rank 0" in findings(PREFIX + json.dumps(line))[0].message
    lonely = Processor()
    lonely.register_forward_hook(create({}))
    lonely(None, torch.randn(2, H), nn.Linear(H, 3), SimpleNamespace())
    assert "no caller" in capsys.readouterr().out


@pytest.mark.parametrize(
    "body", ["{", "[1]", '{"part": "draft", "rank": NaN}', '{"part": "draft", "rank": 0, "fc": 3}']
)
def test_hostile_lines_are_no_crash(body: str) -> None:
    facts = Facts()
    facts.put("log", f"{PREFIX}{body}\n" * 3, "log")
    for code in ("probe-fc", "probe-weights"):
        list(find_check(code).findings(facts))
    assert checks.probe_lines(f"{PREFIX}{body}", "target") == []
