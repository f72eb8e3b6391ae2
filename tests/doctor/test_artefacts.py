"""Real artefacts on disk: each reader's facts lead to the findings that the same facts typed by hand lead to."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.artefacts import as_bytes, write_safetensors

from eagle3lab.core.errors import UsageError
from eagle3lab.core.hashes import sha256_file
from eagle3lab.doctor.findings import Report
from eagle3lab.doctor.run import Inputs, visit

from .conftest import visit_facts
from .states_files import IDENTITY

H, POINTS, VOCAB = 8, [1, 4, 6], 11


def found(report: Report, code: str) -> list[Any]:
    return [finding for finding in report.findings if finding.code == code]


def serious(report: Report) -> list[str]:
    return [f"{f.code}: {f.message}" for f in report.findings if f.severity != "info"]


# -- captured states ---------------------------------------------------------------------------------------------------


def head() -> np.ndarray:
    return np.random.default_rng(3).normal(0, 1, (VOCAB, H)).astype(np.float32)


def norm_weight() -> np.ndarray:
    return np.linspace(0.5, 1.5, H).astype(np.float32)


def sample(seed: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, aux, last): `last` has RMSNorm's size, and its argmax under the head is the next token."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(0, 1, (length, H)).astype(np.float32)
    last = rows / np.sqrt((rows**2).mean(1, keepdims=True)) * norm_weight()
    tokens = np.concatenate([[seed % VOCAB], (last[:-1] @ head().T).argmax(1)])
    return tokens.astype(np.int64), rng.normal(0, 3, (length, len(POINTS) * H)).astype(np.float32), last


def write_states(
    folder: Path, samples: list[tuple], *, last: str = "post_norm", dtype: str = "F32", **change: Any
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokens, aux, lasts = (np.concatenate([one[part] for one in samples]) for part in range(3))
    offsets = np.cumsum([0, *(len(one[0]) for one in samples)])
    mask = np.concatenate([np.arange(len(one[0])) > 1 for one in samples])
    tensors = {
        "input_ids": ("I64", list(tokens.shape), as_bytes("I64", tokens)),
        "loss_mask": ("BOOL", list(mask.shape), as_bytes("BOOL", mask)),
        "offsets": ("I64", list(offsets.shape), as_bytes("I64", offsets)),
        "aux": (dtype, list(aux.shape), as_bytes(dtype, aux)),
        "last": (dtype, list(lasts.shape), as_bytes(dtype, lasts)),
        "sample_id": ("I64", [len(samples)], as_bytes("I64", np.arange(len(samples)))),
    }
    path = folder / "states-00000.safetensors"
    write_safetensors(path, tensors)
    shard = {"name": path.name, "sha256": sha256_file(path), "samples": len(samples), "tokens": len(tokens)}
    said = {"points": POINTS, "blocks": 8, "hidden_size": H, "last": last, "planned_shards": 1, "shards": [shard]}
    manifest = {**IDENTITY, **said, **change}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def write_target(folder: Path) -> Path:
    folder.mkdir()
    config = {"model_type": "llama", "num_hidden_layers": 8, "hidden_size": H, "vocab_size": VOCAB}
    (folder / "config.json").write_text(json.dumps(config))
    values = {"lm_head.weight": head(), "model.norm.weight": norm_weight()}
    tensors = {name: ("F32", list(v.shape), as_bytes("F32", v)) for name, v in values.items()}
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


@pytest.fixture
def samples() -> list[tuple]:
    return [sample(seed, length) for seed, length in ((1, 9), (2, 7), (3, 8))]


def test_healthy_states_are_quiet_with_and_without_their_target(tmp_path: Path, samples: list[tuple]) -> None:
    folder, target = write_states(tmp_path / "s", samples), write_target(tmp_path / "t")
    assert serious(visit(Inputs(states=str(folder)))) == []
    report = visit(Inputs(states=str(folder), target=str(target)))
    assert serious(report) == []
    assert "agreement 1.00 to 1.00" in found(report, "states-swapped")[0].message
    assert "after the final norm, as declared" in found(report, "states-norm")[0].message
    bare = visit(Inputs(paths=(str(folder), str(target))))  # the order on the command line means nothing
    assert [f.message for f in bare.findings] == [f.message for f in report.findings]


def test_swapped_samples_are_named_like_the_typed_facts(tmp_path: Path, samples: list[tuple]) -> None:
    one, two, three = (sample(seed, 8) for seed in (1, 2, 3))
    mixed = [(one[0], two[1], two[2]), (two[0], one[1], one[2]), three]
    folder, target = write_states(tmp_path / "s", mixed), write_target(tmp_path / "t")
    errors = [f.message for f in found(visit(Inputs(states=str(folder), target=str(target))), "states-swapped")]
    facts = {"tokens": [m[0].tolist() for m in mixed]}
    facts["state_rows_argmax"] = [(m[2] @ head().T).argmax(1).tolist() for m in mixed]
    assert errors == [f.message for f in found(visit_facts(facts), "states-swapped")]
    assert errors[0].startswith("samples 0 and 1 are swapped")


def test_a_norm_declared_on_the_wrong_side(tmp_path: Path, samples: list[tuple]) -> None:
    target = write_target(tmp_path / "t")
    folder = write_states(tmp_path / "s", samples, last="pre_norm")
    messages = [f.message for f in found(visit(Inputs(states=str(folder), target=str(target))), "states-norm")]
    assert any("declared pre_norm and stands after" in message for message in messages), messages


@pytest.mark.parametrize(
    ("recipe", "dtype", "row", "column", "value"),
    [
        ("ones; row 3 all NaN", "F32", 3, slice(None), np.nan),
        ("ones; [5, 9] = inf", "F32", 5, 9, np.inf),
        ("ones; row 2 all zero", "F32", 2, slice(None), 0.0),
        ("ones; [1, 0..3] = 65504", "F16", 1, slice(0, 4), 65504.0),
    ],
)
def test_bad_rows_of_a_file_read_like_their_recipe(
    tmp_path: Path, recipe: str, dtype: str, row: int, column: Any, value: float
) -> None:
    aux = np.ones((7, len(POINTS) * H), dtype=np.float32)
    aux[row, column] = value
    last = np.random.default_rng(0).normal(0, 1, (7, H)).astype(np.float32)
    folder = write_states(tmp_path / "s", [(np.full(7, 2), aux, last)], dtype=dtype)
    of_file = found(visit(Inputs(states=str(folder))), "states-contents")
    facts = {"shape": [7, len(POINTS) * H], "recipe": recipe, "points": POINTS, "H": H, "dtype": dtype}
    of_facts = [f for f in visit_facts(facts).findings if f.code == "states-finite"]
    worst = [f for f in of_file if f.severity != "info" and "bit-equal" not in f.message]
    assert [(f.severity, f.message) for f in worst] == [
        (f.severity, f.message) for f in of_facts if f.severity != "info"
    ]
    assert worst


def test_repeated_rows_of_different_tokens(tmp_path: Path) -> None:
    tokens, aux, last = sample(4, 9)
    tokens[5:7] = [1, 2]
    aux[6] = aux[5]
    folder = write_states(tmp_path / "s", [sample(1, 5), (tokens, aux, last)])
    finding = next(f for f in found(visit(Inputs(states=str(folder))), "states-contents") if f.severity == "error")
    assert finding.evidence["rows"] == [10, 11]  # rows of the shard: the sample begins at 5
    aux[6, 0] += 1
    folder = write_states(tmp_path / "s", [sample(1, 5), (tokens, aux, last)])
    assert serious(visit(Inputs(states=str(folder)))) == []


def test_damaged_shards_are_grouped_by_what_is_wrong(tmp_path: Path, samples: list[tuple]) -> None:
    folder = write_states(tmp_path / "s", samples)
    path = folder / "states-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    assert "truncated [0]" in found(visit(Inputs(states=str(folder))), "states-resume")[0].message
    raw = bytearray(write_states(folder, samples).joinpath(path.name).read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert "hash [0]" in found(visit(Inputs(states=str(folder))), "states-resume")[0].message
    path.unlink()
    assert "missing [0]" in found(visit(Inputs(states=str(folder))), "states-resume")[0].message


def test_unfinished_capture_and_wrong_width(tmp_path: Path, samples: list[tuple]) -> None:
    folder = write_states(tmp_path / "s", samples, planned_shards=3)
    assert "1 of 3 planned shards" in found(visit(Inputs(states=str(folder))), "states-layout")[0].message
    folder = write_states(tmp_path / "s", samples, points=[1, 4])
    assert "needed [tokens, 2 x 8 = 16]" in found(visit(Inputs(states=str(folder))), "states-layout")[0].message


@pytest.mark.parametrize(
    "manifest", ["", "[]", "{", '{"points": "x", "shards": 3}', '{"shards": [{"name": "../../x"}]}']
)
def test_broken_manifests_are_findings(tmp_path: Path, manifest: str) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / "manifest.json").write_text(manifest)
    report = visit(Inputs(states=str(folder)))
    assert not found(report, "check-broken")
    with pytest.raises(UsageError):
        visit(Inputs(states=str(folder / "not there")))


# -- weight files, runs, notebooks -------------------------------------------------------------------------------------


def test_index_of_a_folder_reads_like_the_typed_index(tmp_path: Path) -> None:
    index = {"metadata": {"total_size": 99}, "weight_map": {"a.weight": "1.safetensors", "b.weight": "2.safetensors"}}
    files = {"1.safetensors": {"a.weight": ["F32", [2, 3]]}, "9.safetensors": {"c.weight": ["F32", [1]]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, tensors in files.items():
        content = {key: (dtype, shape, as_bytes(dtype, np.ones(shape))) for key, (dtype, shape) in tensors.items()}
        write_safetensors(tmp_path / name, content)
    of_folder = {f.message for f in found(visit(Inputs(draft=str(tmp_path))), "file-index")}
    assert of_folder == {f.message for f in found(visit_facts({"index": index, "files": files}), "file-index")}
    assert any("2.safetensors is missing" in message for message in of_folder)


def test_a_whole_run_folder(tmp_path: Path) -> None:
    status = {
        "notebooks": {"03_train": {"status": "timeout", "cells": 6, "failing_cell": 4, "error": "TimeoutError: 60"}}
    }
    counts = {"verify_steps": 30, "accepted": 0, "proposed": 90, "histogram": [30]}
    metrics = {"sets": {"own": {"accept_length": 1.0, "lossless": True, "counts": counts}}, "timing": {}}
    history = [{"step": i, "loss": 8.0, "gradient_norm": 0.1} for i in range(20)]
    for name, value in (("status", status), ("metrics", metrics), ("training", {"history": history, "held_out": []})):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    snapshots = tmp_path / "drafter" / "fc_snapshots"
    snapshots.mkdir(parents=True)
    fc = as_bytes("BF16", np.random.default_rng(1).normal(0, 0.02, (8, 24)))
    for step in (0, 100):
        write_safetensors(snapshots / f"step-{step:06d}.safetensors", {"fc.weight": ("BF16", [8, 24], fc)})
    messages = {f.code: f.message for f in visit(Inputs(run=str(tmp_path))).findings if f.severity == "error"}
    assert "ended timeout, cell 4 of 6" in messages["run-status"]
    assert "no draft accepted in 30 verify steps" in messages["accept-report"]
    assert "never leaves its start" in messages["run-curve"]
    assert "frozen" in messages["run-fc"]


def test_notebooks_of_a_folder_are_named(tmp_path: Path) -> None:
    cell = {"cell_type": "code", "metadata": {}, "source": ["x = 1"], "outputs": [], "execution_count": 1}
    dead = {**cell, "execution_count": None}
    for name, cells in (("good", [cell]), ("dead", [cell, dead, dead])):
        content = {"cells": cells, "metadata": {"kernelspec": {"name": "python3"}}, "nbformat": 4, "nbformat_minor": 5}
        (tmp_path / f"{name}.ipynb").write_text(json.dumps(content))
    (tmp_path / "broken.ipynb").write_text("{")
    report = visit(Inputs(notebooks=str(tmp_path)))
    assert [f.message for f in found(report, "notebook-ran")] == [
        "dead.ipynb: cell 2 of 3 never ran, 2 in all: the kernel died or was stopped"
    ]
    assert [f for f in found(report, "artefact-broken") if "broken.ipynb" in f.message]


def test_own_notebooks_pass_the_strict_visit() -> None:
    folder = Path(__file__).parents[2] / "notebooks"
    if not list(folder.glob("*.ipynb")):
        pytest.skip("this checkout has no notebooks")
    assert serious(visit(Inputs(notebooks=str(folder)))) == []


# -- acceptance files and logs -----------------------------------------------------------------------------------------

META = {"spec_verify_ct": 8, "spec_num_correct_drafts": 0, "spec_num_proposed_drafts": 24, "completion_tokens": 9}
PROMETHEUS = """vllm:spec_decode_num_drafts_total{engine="0"} 8.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 24.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 0.0
"""


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("one.json", json.dumps({"text": "", "meta_info": META}), "accept-answer"),
        ("many.json", json.dumps([{"meta_info": META}, {"meta_info": {}}]), "accept-answers"),
        ("many.jsonl", f"{json.dumps({'meta_info': META})}\n" * 2, "accept-answers"),
        ("page.txt", PROMETHEUS, "accept-report"),
        ("own.json", json.dumps({"accept_length": 1.0, "counts": {"verify_steps": 8, "accepted": 0}}), "accept-report"),
        ("typed.yaml", "drafts: 8\naccepted: 0\ndrafted: 24\n", "accept-counters"),
        ("gauge.txt", 'sglang:spec_accept_length{model_name="m"} 1.0\nsglang:spec_num_steps{} 3.0\n', "accept-ceiling"),
    ],
)
def test_zero_acceptance_in_every_form(tmp_path: Path, name: str, text: str, code: str) -> None:
    (tmp_path / name).write_text(text)
    report = visit(Inputs(acceptance=str(tmp_path / name)))
    assert [f.severity for f in found(report, code) if f.severity == "error"] == ["error"], report.findings


def test_a_file_without_acceptance_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"draft": 8}')
    with pytest.raises(UsageError, match="drafts"):
        visit(Inputs(acceptance=str(tmp_path / "x.json")))


LOG = """[2026-01-01 10:00:00] server_args=ServerArgs(model_path='/m', speculative_algorithm='EAGLE', \
speculative_draft_model_path='/d', speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4)
[2026-01-01 10:01:00] Parameter draft_model.fc.weight not found in params_dict
[2026-01-01 10:02:00 TP0] Decode batch, #running-req: 1, #token: 99, accept len: 1.00, accept rate: 0.00, graph: True
"""


def test_a_server_log_tells_algorithm_keys_and_acceptance(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text(LOG)
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1})
    )
    report = visit(Inputs(log=str(tmp_path / "server.log"), draft=str(tmp_path / "config.json")))
    errors = {f.code: f.message for f in report.findings if f.severity == "error"}
    assert "exactly 1.00" in errors["log-acceptance"]
    assert "EAGLE" in errors["log-algorithm"] and "EAGLE3" in errors["log-algorithm"]
    assert "draft_model.fc.weight" in errors["log-weights"]
    (tmp_path / "server.log").write_text(
        LOG.replace("'EAGLE'", "'EAGLE3'").replace("1.00", "2.61").replace("Parameter", "#")
    )
    report = visit(Inputs(log=str(tmp_path / "server.log"), draft=str(tmp_path / "config.json")))
    assert [f for f in report.findings if f.code.startswith("log-") and f.severity != "info"] == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("accept len: 2.00, accept rate: 1.40", "accept rate is 1.4,"),
        ("accept len: 0.00, accept rate: 0.00", "accept len is 0,"),
        ("accept len: -1", "accept len is -1,"),
        ("accept len: 4.31, accept rate: 0.90", "the most of 3 draft steps is 4"),
        ("accept len: 4.00, accept rate: 1.00", ""),
    ],
)
def test_readings_that_no_server_can_have(tmp_path: Path, line: str, told: str) -> None:
    log = LOG.replace("'EAGLE'", "'EAGLE3'").replace("accept len: 1.00, accept rate: 0.00", line)
    (tmp_path / "server.log").write_text(log)
    errors = [f.message for f in found(visit(Inputs(log=str(tmp_path / "server.log"))), "log-acceptance")
              if f.severity == "error"]  # fmt: skip
    assert len(errors) == bool(told) and all("line 3: " in one and told in one for one in errors)
    (tmp_path / "server.log").write_text(log.replace("num_steps=3", "adaptive=True, speculative_num_steps=3"))
    again = found(visit(Inputs(log=str(tmp_path / "server.log"))), "log-acceptance")
    assert [f for f in again if f.severity == "error"] == [] or "the most" not in told


@pytest.mark.parametrize("raw", [b"", b"\xff\xfe\x00" * 50, b"accept len: " * 1000, struct.pack("<Q", 7) * 100])
def test_odd_logs_are_findings(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x.log").write_bytes(raw)
    report = visit(Inputs(log=str(tmp_path / "x.log")))
    assert not found(report, "check-broken")
    assert not [f for f in report.findings if f.severity == "error"]
