"""SGLang 0.5.23 on a CPU: the same drafter gives our acceptance under EAGLE3, and nothing at all under EAGLE.

The second is the bug that this project is about: the server starts, the text is right, nothing is logged, no draft is
ever accepted. With EAGLE the target records no states, so the drafter gets the last hidden state, which is as wide as
an embedding, and fc is skipped.
"""

from __future__ import annotations

import datetime
import json
import os
from itertools import pairwise

import pytest

from eagle3lab.targets.generate import generate
from tests.engines.compare import SHARE, before_tie, compare_texts
from tests.engines.conftest import K
from tests.engines.ours import decode, other_points, rope_base
from tests.engines.runner import ROOT, run_engine

PROMPTS, EAGLE_PROMPTS, MAX_NEW_TOKENS = 3, 1, 24
LIMIT = float(os.environ.get("EAGLE3LAB_ENGINE_LIMIT", "900"))
"""Seconds for one start and all prompts. Drafting is interpreted: about a minute a prompt, two with EAGLE."""
EVIDENCE = ROOT / "data" / "evidence"


def ask(bench, folder, algorithm, prompts):
    return run_engine(
        "sglang",
        {
            "target": str(bench.target_folder),
            "draft": None if algorithm is None else str(bench.drafter_folder),
            "algorithm": algorithm,
            "k": K,
            "prompts": bench.prompts[:prompts],
            "max_new_tokens": MAX_NEW_TOKENS,
        },
        folder,
        limit=LIMIT,
        environment={"PYTHONPATH": str(ROOT / "scripts" / "sglang_cpu")},
    )


@pytest.fixture(scope="module")
def ours(bench):
    return decode(bench.target, bench.drafter, bench.prompts[:PROMPTS], k=K, max_new_tokens=MAX_NEW_TOKENS)


@pytest.fixture(scope="module")
def plain(bench, tmp_path_factory):
    return ask(bench, tmp_path_factory.mktemp("sglang-plain"), None, PROMPTS)


@pytest.fixture(scope="module")
def eagle3(bench, tmp_path_factory):
    return keep(bench, "EAGLE3", ask(bench, tmp_path_factory.mktemp("sglang-eagle3"), "EAGLE3", PROMPTS))


@pytest.fixture(scope="module")
def eagle(bench, tmp_path_factory):
    return keep(bench, "EAGLE", ask(bench, tmp_path_factory.mktemp("sglang-eagle"), "EAGLE", EAGLE_PROMPTS))


def test_text_is_plain_greedy(bench, ours, plain, eagle3):
    spoken, alone = ([r["tokens"] for r in answer["replies"]] for answer in (eagle3, plain))
    here = [g.tokens for g in generate(bench.target, bench.prompts[:PROMPTS], max_new_tokens=MAX_NEW_TOKENS)]
    assert compare_texts(spoken, alone, ours) == []
    assert compare_texts(spoken, here, ours) == []


def test_eagle3_accepts_what_we_do(ours, eagle3):
    """Step by step from the sizes of the streamed text, and as the engine's own histogram and totals."""
    compared = 0
    for reply, theirs in zip(ours, eagle3["replies"], strict=True):
        safe, gap = before_tie(reply)
        grown = [after - before for before, after in pairwise(theirs["sizes"])]
        assert grown[: max(safe - 1, 0)] == [step.accepted + 1 for step in reply.steps[: max(safe - 1, 0)]]
        compared += safe
        if gap is not None:
            continue
        agreed = [step.agreed for step in reply.steps]  # it counts what the end of the reply cuts off
        info = theirs["meta_info"]
        assert info["spec_correct_drafts_histogram"] == [agreed.count(j) for j in range(max(agreed) + 1)]
        assert info["spec_verify_ct"] == len(agreed)
        assert info["spec_num_correct_drafts"] == sum(agreed)
        assert info["spec_num_proposed_drafts"] == K * len(agreed)
    steps = sum(len(reply.steps) for reply in ours)
    print(f"SGLang {eagle3['version']}, {len(ours)} x {MAX_NEW_TOKENS} tokens: {compared} of {steps} steps compared")
    assert compared >= SHARE * steps


@pytest.mark.parametrize(
    "wrong", [lambda d: other_points(d, 1), lambda d: rope_base(d, 10_000.0)], ids=["points", "rotary"]
)
def test_catches(bench, ours, eagle3, wrong):
    """The same weights with one thing wrong accept other drafts somewhere in these prompts."""
    other = decode(bench.target, wrong(bench.drafter), bench.prompts[:PROMPTS], k=K, max_new_tokens=MAX_NEW_TOKENS)
    theirs = [[after - before - 1 for before, after in pairwise(reply["sizes"])] for reply in eagle3["replies"]]
    assert [[step.accepted for step in reply.steps] for reply in other] != theirs


def test_eagle_accepts_nothing_and_says_nothing(plain, eagle, ours):
    """0 accepted, right text, and an accept length above 1 that hides it: completion tokens over verify steps."""
    reply, text = eagle["replies"][0], plain["replies"][0]["tokens"]
    info = reply["meta_info"]
    assert reply["tokens"] == text
    assert info["spec_num_correct_drafts"] == 0
    assert info["spec_verify_ct"] == len(text) - 1
    assert info["spec_accept_length"] == pytest.approx(len(text) / (len(text) - 1))
    assert sum(step.accepted for step in ours[0].steps) > 0  # the same drafter and prompt, rightly served


def keep(bench, algorithm, answer):
    """Write an answer for data/evidence when EAGLE3LAB_WRITE_EVIDENCE=1; the committed files come from here."""
    if os.environ.get("EAGLE3LAB_WRITE_EVIDENCE") != "1":
        return answer
    training = json.loads((bench.drafter_folder / "eagle3lab_training.json").read_text())
    record = {
        "what": f"SGLang --speculative-algorithm {algorithm}, greedy, fp32, CPU; drafting in Triton's interpreter",
        "command": "EAGLE3LAB_WRITE_EVIDENCE=1 make test-engines",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "versions": {"sglang": answer["version"], "torch": answer["torch"]},
        "arguments": {k: v for k, v in answer["options"].items() if not k.endswith("path")},
        "target": "SmolLM2-135M-Instruct",
        "drafter": {"init": training["init"], "settings": training["settings"], "steps_done": training["steps_done"]},
        "prompts": [
            {
                "id": name,
                "text": bench.target.tokenizer.decode(reply["tokens"]),
                "tokens": reply["tokens"],
                "seconds": reply["seconds"],
                "meta_info": {k: v for k, v in reply["meta_info"].items() if k.startswith(("spec_", "completion"))},
            }
            for name, reply in zip(bench.names, answer["replies"], strict=False)
        ],
    }
    EVIDENCE.mkdir(exist_ok=True)
    (EVIDENCE / f"sglang-{algorithm.lower()}.json").write_text(json.dumps(record, indent=2) + "\n")
    return answer
