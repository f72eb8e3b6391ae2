"""vLLM 0.32.0 on a CPU proposes and accepts the very tokens that our own decoding does, and changes no text.

This is the test that wrong layer ids, residual order, rotary base, cache or norms do not pass. Drafters made to give a
known count leave attention and MLP at zero and cannot show them.
"""

from __future__ import annotations

import os

import pytest

from eagle3lab.targets.generate import generate
from tests.engines.compare import SHARE, compare_steps, compare_texts
from tests.engines.conftest import MAX_NEW_TOKENS, K
from tests.engines.ours import decode, other_points, rope_base
from tests.engines.runner import run_engine

LIMIT = float(os.environ.get("EAGLE3LAB_ENGINE_LIMIT", "900"))
"""Seconds for one start and all prompts; about 90 on two quiet cores."""
WRONG_PROMPTS = 3


def ask(bench, folder, draft):
    return run_engine(
        "vllm",
        {
            "target": str(bench.target_folder),
            "draft": draft,
            "k": K,
            "prompts": bench.prompts,
            "max_new_tokens": MAX_NEW_TOKENS,
            "max_model_len": max(map(len, bench.prompts)) + MAX_NEW_TOKENS + K + 8,
            "max_num_seqs": 4,
        },
        folder,
        limit=LIMIT,
        environment={"LD_PRELOAD": openmp(), "VLLM_CPU_OMP_THREADS_BIND": cores()},
    )


def cores() -> str:
    """The cores that this process may use, as vLLM wants them: it pins its threads itself, past any other limit."""
    allowed = sorted(os.sched_getaffinity(0))
    threads = int(os.environ.get("OMP_NUM_THREADS") or len(allowed))
    return ",".join(map(str, allowed[-threads:]))


def openmp() -> str:
    """Path of libiomp5.so inside vLLM's environment: its kernels need it loaded before torch's own."""
    from tests.engines.runner import environment_python

    found = sorted(environment_python("vllm").parents[1].glob("lib/**/libiomp5.so"))
    assert found, "vLLM's environment holds no libiomp5.so: scripts/install_vllm.sh"
    return str(found[0])


@pytest.fixture(scope="module")
def ours(bench):
    return decode(bench.target, bench.drafter, bench.prompts, k=K, max_new_tokens=MAX_NEW_TOKENS)


@pytest.fixture(scope="module")
def drafting(bench, tmp_path_factory):
    return ask(bench, tmp_path_factory.mktemp("vllm-eagle3"), str(bench.drafter_folder))


@pytest.fixture(scope="module")
def plain(bench, tmp_path_factory):
    return ask(bench, tmp_path_factory.mktemp("vllm-plain"), None)


def test_text_is_plain_greedy(bench, ours, drafting, plain):
    spoken, alone = ([r["tokens"] for r in answer["replies"]] for answer in (drafting, plain))
    here = [g.tokens for g in generate(bench.target, bench.prompts, max_new_tokens=MAX_NEW_TOKENS)]
    assert compare_texts(spoken, alone, ours) == []
    assert compare_texts(spoken, here, ours) == []


def test_proposed_and_accepted_step_by_step(bench, ours, drafting):
    theirs = [reply["steps"] for reply in drafting["replies"]]
    result = compare_steps(ours, theirs, limit=MAX_NEW_TOKENS, stops=bench.target.eos_ids)
    print(f"vLLM {drafting['version']}, {len(bench.prompts)} prompts x {MAX_NEW_TOKENS} tokens: {result.lines()}")
    assert result.differences == [], result.lines()
    assert result.share >= SHARE, result.lines()


def test_the_drafter_is_worth_comparing(ours):
    """A drafter that is never right would agree with any engine."""
    accepted = [step.accepted for reply in ours for step in reply.steps]
    assert sum(accepted) > 0.05 * K * len(accepted)
    assert {0, 1, 2} <= set(accepted)


def test_its_own_counters_are_those_steps(drafting):
    """What vLLM exports for dashboards is what its scheduler did."""
    steps = [step for reply in drafting["replies"] for step in reply["steps"]]
    counters = drafting["counters"]
    assert counters["vllm:spec_decode_num_drafts"] == len(steps)
    assert counters["vllm:spec_decode_num_draft_tokens"] == K * len(steps)
    assert counters["vllm:spec_decode_num_accepted_tokens"] == sum(len(step["out"]) - 1 for step in steps)
    by_position = [sum(len(step["out"]) - 1 > i for step in steps) for i in range(K)]
    assert counters["vllm:spec_decode_num_accepted_tokens_per_pos"] == by_position


@pytest.mark.parametrize(
    "wrong", [lambda d: other_points(d, 1), lambda d: rope_base(d, 10_000.0)], ids=["points one late", "rotary base"]
)
def test_catches(bench, drafting, wrong):
    """The same weights with one thing wrong accept other drafts; acceptance itself hardly falls."""
    prompts = bench.prompts[:WRONG_PROMPTS]
    other = decode(bench.target, wrong(bench.drafter), prompts, k=K, max_new_tokens=MAX_NEW_TOKENS)
    theirs = [reply["steps"] for reply in drafting["replies"][:WRONG_PROMPTS]]
    assert compare_steps(other, theirs, limit=MAX_NEW_TOKENS, stops=bench.target.eos_ids).differences
