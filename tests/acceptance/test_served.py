"""A server that misbehaves: every prompt ends as a reply or a named failure, and counts are those of the replies."""

from __future__ import annotations

import json

import pytest

from eagle3lab.acceptance.counts import from_lengths, total
from eagle3lab.acceptance.served import Effort
from eagle3lab.acceptance.served_prompts import read_served_prompts
from eagle3lab.core.errors import AcceptanceError, CorpusError, ServerError, UsageError
from eagle3lab.steps.accept_served import served
from tests.acceptance.fake_engine import LENGTHS, TOKENS, K, running

QUICK = Effort(concurrency=4, retries=2, backoff=0.01)
SILENT = {"hang": 1.5, "trickle": 1.5}
"""Faults that only a time-out ends; the others must not depend on how busy the machine is."""
FAULTS = [500, 429, "hang", "trickle", "half", "fields", "close", "error"]


@pytest.fixture
def prompts(tmp_path):
    """Twelve prompts p-0 .. p-11 of two kinds."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"n{i}", "prompt": f"p-{i}", "kind": "code" if i % 2 else "chat"} for i in range(12)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def counted(numbers):
    return total(from_lengths(LENGTHS[i % 3], k=K, prompt=f"n{i}", generated=TOKENS) for i in numbers)


def measure(url, prompts, **options):
    options = {"raw": True, "effort": QUICK, "timeout": 60.0, "max_new_tokens": TOKENS} | options
    return served(url, prompts, **options)


def test_sglang_counts_are_those_of_its_answers(prompts):
    with running() as fake:
        outcome = measure(fake.url, prompts)
    expected = counted(range(12)).to_json()
    assert outcome.exit_code == 0 and outcome.problems == ()
    for key in ("accept_length", "accept_length_interval", "accept_rate", "joint", "conditional", "counts"):
        assert outcome.metrics[key] == expected[key]
    assert set(outcome.metrics["kinds"]) == {"chat", "code"}
    assert sorted(fake.requests) == sorted(f"p-{i}" for i in range(12)) and fake.most <= 4
    assert outcome.metrics["timing"]["server"]["tokens_per_second"] > 0
    assert "api_key" not in outcome.metrics["server"], "only named facts are kept: a report may hold keys"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_fault_is_retried_and_nothing_is_lost(fault, kind, prompts):
    with running(kind=kind, faults={"p-3": [fault], "p-5": [fault, fault]}) as fake:
        effort, timeout = Effort(1, retries=2, backoff=0.01), SILENT.get(fault, 60.0)
        outcome = measure(fake.url, prompts, raw=kind == "sglang", effort=effort, timeout=timeout)
    m = outcome.metrics
    assert m["failures"] == [] and m["replies"] == 12 and m["retried"] == 2
    assert fake.requests.count("p-3") == 2 and fake.requests.count("p-5") == 3
    if kind == "sglang":
        assert m["counts"] == counted(range(12)).to_json()["counts"] and outcome.exit_code == 0
    else:
        # An attempt that failed late left tokens behind in the server's counters: its group, and no other, is left out.
        left = set(m["groups_left_out"])
        assert left <= {"group-004", "group-006"} and outcome.exit_code == bool(left)
        kept = [i for i in range(12) if f"group-{i + 1:03d}" not in left]
        assert m["counts"]["verify_steps"] == counted(kept).verify_steps


@pytest.mark.parametrize("fault", [*FAULTS, 400])
def test_a_prompt_that_always_fails_is_named_and_the_rest_is_kept(fault, prompts):
    with running(faults={"p-3": [fault] * 9}) as fake:
        outcome = measure(fake.url, prompts, timeout=SILENT.get(fault, 60.0))
    (failure,) = outcome.metrics["failures"]
    assert failure["prompt"] == "n3" and failure["attempts"] == (1 if fault == 400 else 3)
    assert outcome.exit_code == 1 and "n3" in outcome.problems[0]
    assert outcome.metrics["counts"] == counted([i for i in range(12) if i != 3]).to_json()["counts"]
    said = {"hang": "timed out", "half": "half an event", "close": "IncompleteRead|broke off", "error": "out of memory",
            "trickle": "took more|timed out", "fields": "keys"}  # fmt: skip
    import re

    assert re.search(said.get(fault, str(fault)), failure["error"]), failure["error"]


def test_resume_sends_only_what_is_missing_and_gives_the_same_counts(prompts, tmp_path):
    log = tmp_path / "log.jsonl"
    with running(faults={"p-3": [500] * 3, "p-7": [400]}) as fake:
        first = measure(fake.url, prompts, resume=log)
        assert len(first.metrics["failures"]) == 2
        with log.open("ab") as handle:
            handle.write(b'{"kind": "prompt", "name": "n3", "tex')  # a killed process
        fake.requests.clear()
        second = measure(fake.url, prompts, resume=log)
        assert sorted(fake.requests) == ["p-3", "p-7"]
        assert second.metrics["counts"] == counted(range(12)).to_json()["counts"] and second.exit_code == 0
        assert second.metrics["timing"]["server"]["prompts_of_an_earlier_session"] == 10
        assert any("half-written" in note for note in second.metrics["notes"])
        fake.requests.clear()
        third = measure(fake.url, prompts, resume=log)
        assert fake.requests == [] and third.metrics["counts"] == second.metrics["counts"]
        assert third.metrics["timing"]["server"]["tokens_per_second"] is None, "nothing was measured, so not 0"
        with pytest.raises(AcceptanceError, match="settings"):
            measure(fake.url, prompts, resume=log, max_new_tokens=64)
    (tmp_path / "other.jsonl").write_text('{"schema": "other"}\n')
    with running() as fake, pytest.raises(AcceptanceError, match="schema"):
        measure(fake.url, prompts, resume=tmp_path / "other.jsonl")


@pytest.mark.parametrize("concurrency", [1, 4])
def test_vllm_counts_are_differences_of_its_counters(concurrency, prompts):
    with running(kind="vllm") as fake:
        fake.drafts, fake.accepted, fake.generated = 1000, 900, 5000  # work of an earlier client
        fake.per_position.update({0: 500, 1: 300, 2: 100})
        outcome = measure(fake.url, prompts, raw=False, effort=Effort(concurrency))
    m = outcome.metrics
    expected = counted(range(12)).to_json()
    assert {k: m["counts"][k] for k in ("verify_steps", "accepted", "proposed", "histogram")} == {
        k: expected["counts"][k] for k in ("verify_steps", "accepted", "proposed", "histogram")
    }
    assert len(m["per_prompt"]) == (12 if concurrency == 1 else 3)
    assert m["interval_over"] == ("prompts" if concurrency == 1 else "groups of 4 prompts")
    assert m["server"]["algorithm"] == "unnamed" and "does not say with which" in m["notes"][0]
    assert outcome.exit_code == 0


def test_a_vllm_that_was_restarted_costs_one_group(prompts):
    with running(kind="vllm") as fake:
        fake.drafts, fake.accepted, fake.generated = 1000, 900, 5000
        fake.per_position.update({0: 500, 1: 300, 2: 100})
        real = fake.served

        def served(prompt):
            if prompt == "p-5":  # a new process: its counters begin anew, and its tokens soon look like enough
                fake.drafts, fake.accepted, fake.generated = 0, 0, 50_000
                fake.per_position.update(dict.fromkeys(range(K), 0))
            return real(prompt)

        fake.served = served
        outcome = measure(fake.url, prompts, raw=False, effort=Effort(1))
    assert "counters went back: they only rise until the server is restarted" in str(outcome.metrics)
    kept = [i for i in range(12) if i != 5]
    assert outcome.exit_code == 1 and outcome.metrics["counts"]["verify_steps"] == counted(kept).verify_steps


def test_other_traffic_on_vllm_is_noticed(prompts):
    with running(kind="vllm") as fake:
        real = fake.served

        def crowded(prompt):
            if prompt == "p-2":
                fake.foreign += 50
                fake.drafts += 20
            return real(prompt)

        fake.served = crowded
        outcome = measure(fake.url, prompts, raw=False, effort=Effort(4))
    assert list(outcome.metrics["groups_left_out"]) == ["group-001"] and outcome.exit_code == 1
    assert outcome.metrics["counts"]["verify_steps"] == counted(range(4, 12)).verify_steps


def test_vllm_resume_counts_whole_groups(prompts, tmp_path):
    log = tmp_path / "log.jsonl"
    with running(kind="vllm", faults={"p-5": [400]}) as fake:
        first = measure(fake.url, prompts, raw=False, effort=Effort(4), resume=log)
        assert [f["prompt"] for f in first.metrics["failures"]] == ["n5"]
        fake.requests.clear()
        second = measure(fake.url, prompts, raw=False, effort=Effort(4), resume=log)
        assert sorted(fake.requests) == ["p-4", "p-5", "p-6", "p-7"], "a group is counted whole"
    assert second.metrics["counts"]["verify_steps"] == counted(range(12)).verify_steps and second.exit_code == 0


@pytest.mark.parametrize(
    ("kind", "algorithm", "asked", "message"),
    [
        ("sglang", "EAGLE", "EAGLE3", "runs speculative algorithm EAGLE, asked EAGLE3"),
        ("sglang", None, "EAGLE3", "runs speculative algorithm none, asked EAGLE3"),
        ("sglang", "EAGLE3", "none", "runs speculative algorithm EAGLE3, asked none"),
        ("vllm", None, "EAGLE3", "runs speculative algorithm none"),
        ("vllm", "eagle3", "none", "asked none"),
        ("other", None, "EAGLE3", "answers neither as SGLang"),
    ],
)
def test_servers_that_run_something_else_are_refused(kind, algorithm, asked, message, prompts):
    with running(kind=kind, algorithm=algorithm) as fake:
        with pytest.raises(ServerError, match=message):
            measure(fake.url, prompts, algorithm=asked)
        assert fake.requests == [], "nothing is sent to a server that is refused"


def test_nextn_is_eagle_and_case_does_not_matter(prompts):
    with running(algorithm="eagle3") as fake:
        assert measure(fake.url, prompts, limit=2).exit_code == 0
    with running(algorithm="NEXTN") as fake:
        assert measure(fake.url, prompts, limit=2, algorithm="EAGLE").exit_code == 0


def test_absent_counters_are_unknown_and_never_0(prompts):
    with running(counters=False) as fake:
        outcome = measure(fake.url, prompts, gate=1.0)
    assert outcome.metrics["accept_length"] is None and outcome.exit_code == 1
    text = outcome.as_text()
    assert "accept length unknown" in text and "12 replies carry no acceptance counters" in text
    assert "cannot be judged" in text


def test_baseline_gives_speed_and_text(prompts):
    with running() as fake, running(algorithm=None, counters=False) as plain:
        same = measure(fake.url, prompts, baseline=plain.url)
        assert same.metrics["lossless"] is True and same.metrics["timing"]["baseline"]["tokens_per_second"] > 0
        plain.text = "other "
        other = measure(fake.url, prompts, baseline=plain.url)
        assert other.metrics["lossless"] is False and other.metrics["same_text"] == {"same": 0, "compared": 12}
        with pytest.raises(ServerError, match="asked none"):
            measure(fake.url, prompts, baseline=fake.url)


def test_gate_is_judged_by_the_lower_end(prompts, tmp_path):
    with running() as fake:
        length, (low, _) = (measure(fake.url, prompts).metrics[k] for k in ("accept_length", "accept_length_interval"))
        assert low < length
        assert measure(fake.url, prompts, gate=low - 1e-6).exit_code == 0
        outcome = measure(fake.url, prompts, gate=(low + length) / 2, out=tmp_path / "out.json")
    assert outcome.exit_code == 1, "the mean would pass; the interval does not"
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["gate"]["met"] is False and saved["replies"]["n0"]["text"] == "word " * TOKENS


def test_simulated_acceptance_is_refused(prompts, monkeypatch):
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    with running() as fake, pytest.raises(AcceptanceError, match="SGLANG_SIMULATE_ACC_LEN=3"):
        measure(fake.url, prompts)


@pytest.mark.parametrize("method", ["synthetic", "standard"])
def test_vllm_that_says_so_in_its_development_mode_is_refused(method, prompts):
    config = {"method": "eagle3", "rejection_sample_method": method}
    info = {
        "/server_info": {"vllm_config": "speculative_config=SpeculativeConfig(method='eagle3', num_spec_tokens=3)"},
        "/server_info?config_format=json": {"vllm_config": {"speculative_config": config}},
    }
    with running(kind="vllm", info=info) as fake:
        if method == "standard":
            assert measure(fake.url, prompts).exit_code == 0
            return
        with pytest.raises(AcceptanceError, match="rejection_sample_method synthetic"):
            measure(fake.url, prompts)
        assert fake.requests == []


def test_requests_that_cannot_be_sent_are_named_before_anything_is(prompts):
    with running() as fake:
        with pytest.raises(UsageError, match="--tokenizer"):
            measure(fake.url, prompts, raw=False)
        assert fake.requests == []
    with pytest.raises(ServerError, match="refused"):
        measure("http://127.0.0.1:9", prompts)
    with pytest.raises(UsageError, match="server URL"):
        measure("ftp://host", prompts)
    with pytest.raises(UsageError, match="concurrency 65"):
        Effort(concurrency=65)


def test_prompt_styles(tmp_path):
    path = tmp_path / "p.jsonl"
    rows = [
        {"task_id": "HumanEval/0", "prompt": "def f():"},
        {"question": "How many?", "answer": "3"},
        {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
        {"id": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = read_served_prompts(path)
    assert [(p.id, p.kind, p.text) for p in found] == [
        ("HumanEval/0", "unknown", "def f():"),
        ("p-0002", "unknown", "How many?"),
        ("81", "writing", "first"),
        ("m", "unknown", "u"),
    ]
    path.write_text('{"text": "x"}')
    with pytest.raises(CorpusError, match=r"p\.jsonl:1 has the keys \['text'\]"):
        read_served_prompts(path)
    path.write_text('{"id": 1, "prompt": "x"}\n{"id": 1, "prompt": "y"}')
    with pytest.raises(CorpusError, match="named 1 like line 1"):
        read_served_prompts(path)
