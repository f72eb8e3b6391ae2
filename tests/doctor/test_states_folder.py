"""Folders of captured states: every fault that typed facts show is found on disk, and whole captures stay quiet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3lab.doctor.findings import Report
from eagle3lab.doctor.readers import states_target
from eagle3lab.doctor.run import Inputs, visit

from .states_files import H, in_8_bits, sample, shard, whole, write, write_target

Shards = list[dict[str, np.ndarray]]


def serious(report: Report) -> list[str]:
    assert not [f.message for f in report.findings if f.code == "check-broken"]
    return [f"{f.severity} {f.code}: {f.message}" for f in report.findings if f.severity != "info"]


def unchecked(report: Report) -> str:
    return " | ".join(f.message for f in report.findings if f.code == "not-checked" and "rule" not in f.subject)


def visited(tmp_path: Path, shards: Shards, target: dict[str, Any] | None = None, **manifest: Any) -> Report:
    folder = write(tmp_path / "s", shards, **manifest)
    if target is None:
        return visit(Inputs(states=str(folder)))
    return visit(Inputs(states=str(folder), target=str(write_target(tmp_path / "t", **target))))


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("target", [None, {}])
def test_whole_captures_are_quiet(tmp_path: Path, small: bool, target: dict[str, Any] | None) -> None:
    shards = [in_8_bits(one) for one in whole()] if small else whole()
    report = visited(tmp_path, shards, target, **({"storage": "int8"} if small else {}))
    assert serious(report) == []
    assert unchecked(report) == ""
    measured = [f.message for f in report.findings if f.code == "states-contents"]
    assert len(measured) == 1 and "largest value" in measured[0]
    if target is not None:
        said = {f.code: f.message for f in report.findings}
        assert "after the final norm, as declared" in said["states-norm"]
        assert "agreement" in said["states-agreement"] and "agreement" in said["states-swapped"]


def of_8_bits(name: str, **change: Any) -> Callable[[Shards], None]:
    def broken(shards: Shards) -> None:
        shards[:] = [in_8_bits(one) for one in shards]
        if "value" in change:
            shards[1][name][4] = change["value"]
        else:
            del shards[1][name]

    return broken


def copied(tensor: str) -> Callable[[Shards], None]:
    def broken(shards: Shards) -> None:
        shards[2][tensor][:30] = shards[0][tensor][:30]

    return broken


def inside(shards: Shards) -> None:
    """Two samples of one shard with one set of states."""
    one, other = sample(1, 20), sample(2, 20)
    shards[1] = shard([one, {**other, "aux": one["aux"], "last": one["last"]}])


def setting(name: str, place: Any, value: Any) -> Callable[[Shards], None]:
    def broken(shards: Shards) -> None:
        shards[1][name][place] = value

    return broken


def unmasked(shards: Shards) -> None:
    for one in shards:
        one["loss_mask"][:] = False


def one_point_twice(shards: Shards) -> None:
    shards[1]["aux"][:, 2 * H :] = shards[1]["aux"][:, :H]


def short_mask(shards: Shards) -> None:
    shards[1]["loss_mask"] = shards[1]["loss_mask"][:-3]


def half_precision(shards: Shards) -> None:
    shards[1]["aux"] = shards[1]["aux"].astype(np.float16)


@pytest.mark.parametrize(
    ("broken", "manifest", "told"),
    [
        (copied("aux"), {}, "states-00000.safetensors hold the same states for different tokens: aux"),
        (copied("last"), {}, "states-00000.safetensors hold the same states for different tokens: last"),
        (inside, {}, "states-00001.safetensors and states-00001.safetensors hold the same states"),
        (unmasked, {}, "0 of 150 tokens are supervised: loss_mask is 0 in all 3 shards"),
        (one_point_twice, {}, "the columns of points 1 and 6 are bit-equal in every row"),
        (setting("offsets", 2, 49), {}, "offsets end at 49, there are 50 tokens"),
        (setting("offsets", 1, 55), {}, "offsets fall from 55 to 50"),
        (setting("offsets", 0, 2), {}, "offsets begin at 2, not at 0"),
        (short_mask, {}, "loss_mask is [47], input_ids [50]"),
        (setting("input_ids", 7, -100), {}, "input_ids holds -100 at place 7"),
        (half_precision, {}, "aux is F16, the manifest says float32"),
        (of_8_bits("aux_scale"), {"storage": "int8"}, "aux_scale is missing"),
        (of_8_bits("aux_scale", value=np.nan), {"storage": "int8"}, "NaN in row 4"),
        (of_8_bits("last_scale", value=0.0), {"storage": "int8"}, "row 4 is zero"),
        (of_8_bits("aux_scale", value=1.0), {}, "aux is I8, the manifest says float32"),
        (lambda shards: None, {"points": [4, 1, 6]}, "capture points [4, 1, 6]: not ascending"),
        (lambda shards: None, {"points": [1, 4, 4]}, "capture points [1, 4, 4]: duplicate"),
        (lambda shards: None, {"points": [1, 4, 9]}, "capture points [1, 4, 9]: [9] out of range; the target has 8"),
        (lambda shards: None, {"dtype": "bfloat16"}, "aux is F32, the manifest says bfloat16"),
    ],
)
def test_faults_of_a_folder(tmp_path: Path, broken: Callable[[Shards], None], manifest: Any, told: str) -> None:
    shards = whole()
    broken(shards)
    found = serious(visited(tmp_path, shards, **manifest))
    assert any(told in one for one in found), found
    assert len(found) <= 6, found


@pytest.mark.parametrize(
    "healthy",
    [
        # the same conversation twice
        lambda shards: shards.__setitem__(2, {**shards[0], "sample_id": shards[2]["sample_id"]}),
        lambda shards: shards[1]["loss_mask"].__setitem__(slice(None), False),  # a shard of prompts alone
        lambda shards: shards[2]["aux"].__setitem__(slice(0, 10), shards[0]["aux"][:10]),  # rows of a shared prefix
    ],
)
def test_what_may_be_equal(tmp_path: Path, healthy: Callable[[Shards], None]) -> None:
    shards = whole()
    healthy(shards)
    assert serious(visited(tmp_path, shards)) == []


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ({"hidden_size": 64}, "the manifest says hidden_size 32, the target has 64"),
        ({"num_hidden_layers": 9}, "the manifest says blocks 8, the target has 9"),
    ],
)
def test_a_target_of_another_size(tmp_path: Path, target: dict[str, Any], told: str) -> None:
    assert any(told in one for one in serious(visited(tmp_path, whole(), target)))


@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen3_next", "gemma2"])
@pytest.mark.parametrize("small", [False, True])
def test_norms_that_add_one(tmp_path: Path, model_type: str, small: bool) -> None:
    shards = [in_8_bits(one) for one in whole()] if small else whole()
    manifest = {"storage": "int8"} if small else {}
    report = visited(tmp_path, shards, {"model_type": model_type, "less": 1.0}, **manifest)
    assert serious(report) == []
    assert "after the final norm, as declared" in str([f.message for f in report.findings if f.code == "states-norm"])


def test_a_norm_on_the_wrong_side_where_one_is_added(tmp_path: Path) -> None:
    shards = whole()
    for one in shards:
        one["last"] *= np.linspace(3, 5, len(one["last"]), dtype=np.float32)[:, None]
    found = serious(visited(tmp_path, shards, {"model_type": "qwen3_next", "less": 1.0}))
    assert [one for one in found if one.startswith("error states-norm: last is declared post_norm and stands before")]


@pytest.mark.parametrize("less", [0.0, 1.0])
def test_an_unknown_kind_of_norm(tmp_path: Path, less: float) -> None:
    """Either form that fits is believed; where none does, it is said."""
    assert serious(visited(tmp_path, whole(), {"model_type": "someone's", "less": less})) == []
    report = visit(Inputs(states=str(tmp_path / "s"), target=str(write_target(tmp_path / "u", "someone's", less=-4.0))))
    assert "the form of this model type's final norm is not known" in unchecked(report)
    assert not [one for one in serious(report) if "states-norm" in one]


def test_states_before_the_norm_are_compared_through_it(tmp_path: Path) -> None:
    shards = whole()
    for one in shards:
        one["last"] = one["last"] / np.linspace(0.8, 1.3, H, dtype=np.float32) * 7
    report = visited(tmp_path, shards, {"model_type": "qwen3_next", "less": 1.0}, last="pre_norm")
    assert serious(report) == []
    rates = next(f.evidence["rates"] for f in report.findings if f.code == "states-agreement")
    assert min(rates) > 0.6


@pytest.mark.parametrize("place", [1, 2])
def test_rows_of_a_later_shard_that_are_not_its_own(tmp_path: Path, place: int) -> None:
    shards = whole()
    shards[place]["last"] = shards[place]["last"][::-1].copy()
    found = serious(visited(tmp_path, shards, {}))
    assert len(found) == 1 and f"shard states-0000{place}.safetensors does not belong to its tokens" in found[0]


def test_shards_beyond_the_budget_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states_target, "MOST_ROWS", 100)
    report = visited(tmp_path, whole(6), {})
    assert serious(report) == []
    assert "could not check 3 of 6 shards against the target" in unchecked(report)


def test_an_accident_of_few_rows_is_no_outlier(tmp_path: Path) -> None:
    shards = whole()
    shards[1]["input_ids"][5:20] = 0  # fewer of the rows agree, far from none
    assert serious(visited(tmp_path, shards, {})) == []


def test_prompts_are_no_replies(tmp_path: Path) -> None:
    """Agreement is taken where the target spoke: a shard of prompts alone is said to be left out."""
    shards = whole(4)
    draw = np.random.default_rng(5)
    shards[2]["loss_mask"][:] = False
    shards[2]["input_ids"][:] = draw.integers(0, 61, 50)
    shards[3]["loss_mask"][:20] = False  # a sample of 30 tokens whose reply begins late
    shards[3]["input_ids"][1:20] = draw.integers(0, 61, 19)
    report = visited(tmp_path, shards, {})
    assert serious(report) == []
    assert "states-00002.safetensors against the target" in unchecked(report)
