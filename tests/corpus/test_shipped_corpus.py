"""What ships in data/: hashes hold, nothing held out occurs in training text, replies are the target's own."""

from __future__ import annotations

import re

import pytest
import torch

from eagle3lab.core.errors import CorpusError
from eagle3lab.core.files import read_json
from eagle3lab.core.hashes import sha256_file
from eagle3lab.core.paths import data_folder
from eagle3lab.corpus.build import HELD_OUT, held_out
from eagle3lab.corpus.chat import render_prompt
from eagle3lab.corpus.overlap import TrainingText
from eagle3lab.corpus.prompts import read_jsonl
from eagle3lab.corpus.replies import load_replies
from eagle3lab.targets.fetch import fetched_folder
from eagle3lab.targets.generate import generate
from eagle3lab.targets.profiles import load_profile

REPLIES = data_folder() / "replies"


def words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())


def shipped_rows() -> list[dict]:
    return [row for name in read_json(REPLIES / "replies.json")["files"] for row in read_jsonl(REPLIES / name)]


def test_files_match_their_manifest_and_are_small():
    for name, facts in read_json(REPLIES / "replies.json")["files"].items():
        assert sha256_file(REPLIES / name) == facts["sha256"]
        assert (REPLIES / name).stat().st_size < 1_000_000
        assert len(read_jsonl(REPLIES / name)) == facts["replies"]


def test_held_out_prompts_do_not_occur_in_training_text():
    rows = shipped_rows()
    text = TrainingText(words(part) for row in rows for part in (row["prompt"], row["reply"]))
    for name in HELD_OUT:
        prompts = held_out(name)
        assert len(prompts) >= 64
        dirty = [(p.id, overlap) for p in prompts if not (overlap := text.overlap(words(p.prompt))).clean]
        assert dirty == []
    # the check itself must be able to fail: a training prompt is not clean
    longest = max((row["prompt"] for row in rows), key=len)
    assert not text.overlap(words(longest)).clean


def test_no_held_out_id_is_trained_on():
    trained = {row["id"] for row in shipped_rows()}
    assert not trained & {p.id for name in HELD_OUT for p in held_out(name)}


@pytest.fixture(scope="module")
def target():
    folder = fetched_folder(load_profile("smollm2"))
    if not folder.is_dir():
        pytest.skip(f"the embedded target is not fetched ({folder}): eagle3lab fetch")
    from eagle3lab.targets.model import load_target

    return load_target(folder)


@pytest.mark.model
def test_replies_of_other_weights_are_refused(target):
    with pytest.raises(CorpusError, match="--regenerate"):
        load_replies(REPLIES, target.tokenizer, weight_sha256="0" * 64, eos_id=2)


@pytest.mark.model
def test_ten_greedy_replies_are_regenerated_one_at_a_time_in_fp32(target):
    """Token for token up to the first place where the target's two best logits are closer than 1e-3."""
    facts = read_json(REPLIES / "replies.json")
    assert facts["temperature"] == 0
    exact = {name for name, entry in facts["files"].items() if entry["compute"] == "float32"}
    replies = load_replies(
        REPLIES, target.tokenizer, weight_sha256=facts["target_weight_sha256"], eos_id=target.eos_ids[0]
    )
    precise = {row["id"] for name in exact for row in read_jsonl(REPLIES / name)}
    some = [reply for reply in replies if reply.id in precise][:: max(1, len(precise) // 10)][:10]
    compared = total = 0
    for reply in some:
        prompt = render_prompt(target.tokenizer, [{"role": "user", "content": reply.prompt}])
        made = generate(target, [prompt], max_new_tokens=facts["max_new_tokens"], batch=1)[0].tokens
        last, _ = target.states(torch.tensor([[*prompt, *reply.tokens]]))
        top = target.logits(last[0, len(prompt) - 1 : -1]).topk(2, -1).values
        ties = (top[:, 0] - top[:, 1] < 1e-3).nonzero().flatten().tolist()
        end = ties[0] if ties else len(reply.tokens)
        assert made[:end] == reply.tokens[:end], reply.id
        compared, total = compared + end, total + len(reply.tokens)
    assert len(some) == 10 and compared >= 0.9 * total
    # a wrong version is caught: another prompt does not give this reply
    other = render_prompt(target.tokenizer, [{"role": "user", "content": some[0].prompt}])
    assert generate(target, [other], max_new_tokens=16, batch=1)[0].tokens != some[-1].tokens[:16]
