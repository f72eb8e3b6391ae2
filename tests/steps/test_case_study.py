"""What notebook 06 calls: evidence labelled or absent, every metric at zero, fc at three ages, the doctor's word."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from eagle3lab.acceptance.counts import from_lengths
from eagle3lab.acceptance.flags import Served, serve
from eagle3lab.acceptance.sources import from_sglang_meta_info, from_vllm_metrics, prefill_floor
from eagle3lab.core.errors import RunError
from eagle3lab.drafter.checkpoint import save_drafter
from eagle3lab.runs.directory import Run
from eagle3lab.steps import case_decode, case_fc, case_metrics, figures
from eagle3lab.steps.case_decode import Case
from eagle3lab.steps.case_evidence import EVIDENCE_HEAD, REMAKE, evidence_label, evidence_rows, read_evidence
from eagle3lab.steps.case_study import ask_doctor, launch_line, result
from tests.acceptance.lab import LIMIT, lab

FACTS = {
    "what": "SGLang",
    "command": "make evidence",
    "date": "2026-01-02T03:04:05Z",
    "versions": {"sglang": "0.5.23"},
    "arguments": {"speculative_num_steps": 3},
    "prompts": [
        {
            "id": "a",
            "tokens": [1, 2, 3],
            "meta_info": {
                "completion_tokens": 24,
                "spec_verify_ct": 23,
                "spec_num_correct_drafts": 0,
                "spec_num_proposed_drafts": 69,
                "spec_accept_length": 24 / 23,
                "spec_correct_drafts_histogram": [23],
            },
        }
    ],
}


def write(folder: Path, algorithm: str, **changes) -> None:
    (folder / f"sglang-{algorithm.lower()}.json").write_text(json.dumps(FACTS | changes))


def test_absent_evidence_is_said_and_nothing_stands_in_its_place(tmp_path: Path) -> None:
    pair = read_evidence("EAGLE", tmp_path), read_evidence("EAGLE3", tmp_path)
    assert all("is not here" in evidence_label(one) and REMAKE in evidence_label(one) for one in pair)
    assert evidence_rows(pair) == []


def test_evidence_is_labelled_with_command_versions_and_date(tmp_path: Path) -> None:
    write(tmp_path, "EAGLE")
    other = [FACTS["prompts"][0] | {"tokens": [1, 2, 4]}]
    write(tmp_path, "EAGLE3", prompts=other)
    pair = read_evidence("EAGLE", tmp_path), read_evidence("EAGLE3", tmp_path)
    label = evidence_label(pair[0])
    for word in ("committed evidence", "not computed here", "make evidence", "sglang 0.5.23", "2026-01-02", "EAGLE"):
        assert word in label
    row = dict(zip(EVIDENCE_HEAD, evidence_rows(pair)[0], strict=True))
    assert (row["accepted"], row["drafted"], row["accept length from counts"]) == (0, 69, "1.00")
    assert row["SGLang's spec_accept_length"] == "1.0435" and row["same text under both flags"] == "no"
    write(tmp_path, "EAGLE3")
    pair = pair[0], read_evidence("EAGLE3", tmp_path)
    assert evidence_rows(pair)[0][-1] == "yes"


@pytest.mark.parametrize("text", ["{", "[]", '{"prompts": [{}]}', json.dumps(FACTS | {"date": None, "versions": 3})])
def test_broken_evidence_is_said_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "sglang-eagle.json").write_text(text)
    found = read_evidence("EAGLE", tmp_path)
    assert found.facts is None and "cannot be read" in evidence_label(found) and "\n" not in found.problem


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_committed_evidence_can_be_read_or_is_absent(algorithm: str) -> None:
    found = read_evidence(algorithm)
    assert (found.facts is not None and found.counts) or "is not here" in found.problem


def test_forms_of_the_engines_are_read_back_by_our_readers() -> None:
    counts = from_lengths([0, 2, 0, 3, 1], k=3, prompt="p", generated=12)
    assert from_sglang_meta_info(case_metrics.as_sglang(counts), steps=3, prompt="p") == counts
    theirs = from_vllm_metrics(case_metrics.as_vllm(counts))
    assert (theirs.verify_steps, theirs.accepted, theirs.histogram) == (5, 6, counts.histogram)


def test_sglang_floor_is_not_the_accept_length() -> None:
    zero = from_lengths([0] * 15, k=3, generated=16)
    told = case_metrics.as_sglang(zero)["spec_accept_length"]
    assert told == prefill_floor(16) == pytest.approx(1.0667, abs=1e-4)
    assert zero.accept_length == 1.0 != told, "the wrong version reads SGLang's number as the accept length"


@pytest.fixture(scope="module")
def case() -> Case:
    own = lab()
    served: dict[str, Served] = {
        flag: serve(own.target, own.drafters["taught"], own.prompts[:8], [f"p{i}" for i in range(8)], algorithm=flag,
                    k=3, max_new_tokens=LIMIT)
        for flag in case_decode.ALGORITHMS
    }  # fmt: skip
    return Case(served, own.plain[:8], 1.0, False)


def test_every_number_of_both_flags(case: Case) -> None:
    rows = {row[0]: row for row in case_metrics.metric_rows(case)}
    assert all(len(row) == len(case_metrics.METRIC_HEAD) for row in rows.values())
    for column, flag in enumerate(case_decode.ALGORITHMS, 2):
        counts = case.served[flag].counts
        assert rows["accepted / drafted"][column] == f"{counts.accepted} of {counts.proposed}"
        assert rows["accept length"][column] == f"{counts.accept_length:.2f}"
        assert rows["text equals plain greedy"][column] == "8 of 8"
    assert rows["calls of fc"][2] == "0" and int(rows["calls of fc"][3]) > 0
    assert {row["set"] for row in figures.by_flag(case).rows} == {"served as EAGLE", "served as EAGLE3"}


def test_nothing_accepted_reads_as_its_floor_everywhere() -> None:
    """Counts of a drafter without luck; the column beside it, which accepts, must read otherwise."""
    own = lab()
    names, prompts = ["p0", "p1"], own.prompts[:2]
    right = serve(own.target, own.drafters["taught"], prompts, names, algorithm="EAGLE3", k=3, max_new_tokens=LIMIT)
    zero = [type(r)(r.tokens, [0] * (len(r.tokens) - 1), [[0, 0, 0]] * (len(r.tokens) - 1)) for r in right.replies]
    wrong = Served("EAGLE", 3, 32, 32, [], names, zero, 2.0)
    both = Case({"EAGLE": wrong, "EAGLE3": right}, own.plain[:2], 1.0, False)
    found = {row[0]: row for row in case_metrics.metric_rows(both)}
    steps = sum(len(r.tokens) - 1 for r in zero)
    assert found["accepted / drafted"][2] == f"0 of {3 * steps}" and found["accept length"][2] == "1.00"
    assert found["accept rate"][2] == "0.0%" and found["conditional by position"][2] == "0.0%, unknown, unknown"
    assert found["SGLang histogram"][2] == str([steps, 0, 0, 0])
    assert found["vLLM counters"][2] == f"{steps}, {3 * steps}, 0, [0, 0, 0]"
    floors = sorted(prefill_floor(len(r.tokens)) for r in zero)
    assert found["SGLang spec_accept_length"][2] == f"{floors[0]:.4f} to {floors[-1]:.4f}" and floors[0] > 1
    assert found["seconds against plain decoding"][2] == "x 2.0"
    assert found["accepted / drafted"][3] != found["accepted / drafted"][2]


def test_widths_name_the_call_of_fc(case: Case) -> None:
    rows = case_decode.width_rows(case.served, "here")
    assert rows[0] == ("here", "EAGLE", "32", "32", "never")
    assert rows[1][:4] == ("here", "EAGLE3", "96", "32") and rows[1][4].endswith("96 wide")


@pytest.mark.slow
def test_kimis_true_widths() -> None:
    found = case_decode.decode_at_kimi_width()
    assert (found["EAGLE"].handed, found["EAGLE"].fc_inputs) == (7168, [])
    assert found["EAGLE3"].handed == 21_504 and set(found["EAGLE3"].fc_inputs) == {21_504}


@pytest.fixture
def run(tmp_path: Path, monkeypatch) -> Run:
    """A run whose drafter has snapshots of fc at steps 0, 1, 3, 12 and 40, 192 x 576."""
    monkeypatch.setenv("EAGLE3LAB_RUNS", str(tmp_path / "runs"))
    made = Run.create("smollm2", "quick")
    generator = np.random.default_rng(0)
    start = generator.uniform(-1, 1, (192, 576)) / np.sqrt(576)
    for step in (0, 1, 3, 12, 40):
        moved = start + generator.normal(0, 0.008 * step / 40, start.shape)
        path = made.drafter / "fc_snapshots" / f"step-{step:06d}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"fc.weight": torch.tensor(moved).bfloat16()}, path)
    with made.recording("train"):
        pass
    return made


def test_fc_at_three_ages(run: Run) -> None:
    ages = case_fc.fc_ages(run)
    assert [age.step for age in ages] == [0, 12, 40], "the nearest to half way, not the next to last by count"
    rows = case_fc.fc_rows(ages)
    assert "AT-INIT(kaiming-uniform)" in rows[0][-1] and rows[0][4] == "1.0000"
    assert "MOVED-FROM-INIT" in rows[2][-1] and float(rows[2][4]) > float(rows[1][4]) > 1
    assert all("mean=" in row[1] and "std=" in row[1] for row in rows)
    plot = case_fc.fc_histogram(ages)
    assert len(plot.rows[0]) == 2 + 3 and all(age.name in plot.alt for age in ages)


def test_one_snapshot_shows_no_way(run: Run) -> None:
    for path in sorted((run.drafter / "fc_snapshots").iterdir())[1:]:
        path.unlink()
    with pytest.raises(RunError, match="1 snapshots of fc"):
        case_fc.fc_ages(run)


def test_the_pair_at_kimis_width() -> None:
    rows, follows = case_fc.kimi_pair()
    start, full = 1 / np.sqrt(3 * 21_504), 0.004037
    half = np.sqrt(start**2 + (full**2 - start**2) / 4)
    assert [row[1] for row in rows] == [f"mean=0.000000, std={std:.6f}" for std in (start, half, full)]
    assert rows[2][2] == "1.02537" and rows[1][2] == f"{half / start:.5f}" != rows[2][2]
    assert "2.54%" in follows[0] and "EAGLE" in follows[-1]


def test_the_doctor_names_the_flag_and_is_quiet_about_the_right_one(
    run: Run, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = lab()
    own.target.model.save_pretrained(tmp_path / "target")
    monkeypatch.setattr("eagle3lab.steps.case_study.fetched_folder", lambda profile: tmp_path / "target")
    save_drafter(own.drafters["taught"], run.drafter, record={})
    visits = {flag: ask_doctor(run, flag) for flag in case_decode.ALGORITHMS}
    codes = {
        flag: [one["code"] for one in visit.as_json()["findings"] if one["severity"] == "error"]
        for flag, visit in visits.items()
    }
    assert "launch-algorithm" in codes["EAGLE"] and "launch-algorithm" not in codes["EAGLE3"]
    assert launch_line("EAGLE", "a b").count("'a b'") == 1
    pair = read_evidence("EAGLE", tmp_path), read_evidence("EAGLE3", tmp_path)
    told = result(case, visits, pair)
    wrong = case.served["EAGLE"].counts
    assert f"{wrong.accepted} of {wrong.proposed} drafts" in told and "launch-algorithm" in told
    assert "Fix: `--speculative-algorithm EAGLE3`" in told and "real SGLang" not in told
