"""`accept decode|replay|served` as a person meets them: text, JSON, gate, exit codes, one line for an error."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from eagle3lab import cli
from eagle3lab.acceptance.sampling_head import TargetEnds, read_target_ends
from eagle3lab.acceptance.served_engines import Answer, SGLang
from eagle3lab.acceptance.served_http import Client, TransientError
from eagle3lab.core.errors import AcceptanceError, FetchError, UsageError
from eagle3lab.steps import accept_decode, accept_replay
from eagle3lab.steps.accept_decode import Drafting
from tests.acceptance.fake_engine import TOKENS, running
from tests.acceptance.lab import LIMIT, lab, states_of

NAMES = [f"p{i}" for i in range(40)]


def decoded(drafting=Drafting(3), temperature=0.0, **options):
    own = lab()
    settings = {"seed": 0, "batch": 16, "max_new_tokens": LIMIT} | options
    return accept_decode.measure(
        own.target, own.drafters["taught"], own.prompts, NAMES, drafting=drafting, temperature=temperature, **settings
    )


def replayed(**options):
    own = lab()
    settings = {"steps": 3, "greedy": True, "temperature": None} | options
    ends = TargetEnds(own.target.embedding.weight, own.target.final_norm.weight, own.target.head.weight, 1e-6)
    samples = states_of(own.target, own.prompts, own.plain)
    return accept_replay.measure(own.drafters["taught"], samples, ends=ends, **settings)


def test_decode_and_replay_print_the_same_counts():
    a, b = decoded(), replayed()
    for key in ("accept_length", "accept_rate", "joint", "conditional"):
        assert a.metrics[key] == b.metrics[key]
    assert a.metrics["lossless"] is True and a.exit_code == 0
    text = b.as_text()
    assert text.index("accept length") < text.index("position") < text.index("all-positions average length")
    assert b.metrics["all_positions_average_length"] != b.metrics["accept_length"]
    json.dumps([a.as_json(), b.as_json()], allow_nan=False)


def test_trees_and_sampling_name_themselves():
    tree = decoded(Drafting(steps=3, topk=2, draft_tokens=7))
    assert tree.metrics["lossless"] and tree.settings["drafting"] == "dynamic tree topk 2, depth 3, 6 drafted tokens"
    assert tree.metrics["counts"]["proposed"] == 6 * tree.metrics["counts"]["verify_steps"]
    sampled = decoded(temperature=1.0)
    assert sampled.metrics["lossless"] is None and sampled.settings["rule"] == "Rejection"
    assert "compared by distribution" in sampled.as_text()
    assert decoded(Drafting(widths=(2, 1)), temperature=1.0).settings["rule"] == "TargetOnly"


def test_replay_at_a_temperature_is_called_teacher_forced():
    found = replayed(temperature=1.0, greedy=False)
    assert found.metrics["kind"].startswith("teacher-forced expectation") and found.metrics["counts"] is None
    assert 1 < found.metrics["accept_length"] < 4 and len(found.metrics["overlap_all_positions"]) == 3
    assert "accepted unknown of unknown proposed" in found.as_text()
    assert "teacher-forced" in replayed(greedy=False).metrics["kind"]


def test_text_is_greedy_when_it_is_the_targets_choice(monkeypatch):
    """Also on a processor that is slow in the head's type, where its rows are widened; other text is caught."""
    own = lab()
    samples = states_of(own.target, own.prompts, own.plain)
    ends = TargetEnds(own.target.embedding.weight, own.target.final_norm.weight, own.target.head.weight, 1e-6)
    assert accept_replay.own_choice(samples, ends, pre_norm=False) == 1.0
    others = [replace(sample, input_ids=sample.input_ids.roll(1)) for sample in samples]
    assert accept_replay.own_choice(others, ends, pre_norm=False) < accept_replay.GREEDY_SHARE
    halves = replace(ends, head=ends.head.bfloat16())
    fast = halves.logits(samples[0].last)
    monkeypatch.setattr("eagle3lab.acceptance.sampling_head.compute_type", lambda *_: "float32")
    monkeypatch.setattr("eagle3lab.acceptance.sampling_head.ROWS", 7)
    torch.testing.assert_close(halves.logits(samples[0].last), fast, atol=0.05, rtol=0.05)


def test_gate_takes_the_lower_end():
    free = decoded()
    low, high = free.metrics["accept_length_interval"]
    assert low < free.metrics["accept_length"] < high
    assert decoded(gate=low).exit_code == 0
    missed = decoded(gate=free.metrics["accept_length"])
    assert missed.exit_code == 1 and missed.as_json()["gate"]["met"] is False
    assert "below --min-accept-length" in missed.as_text()


def test_a_decoder_that_changes_the_text_fails_and_is_named(monkeypatch):
    own = lab()
    monkeypatch.setattr(accept_decode, "generate", lambda *a, **k: [_changed(t) for t in own.plain])
    found = decoded()
    assert found.metrics["lossless"] is False and found.exit_code == 1
    assert "prompt p0 differs from plain decoding at token 0" in found.problems[0]


def _changed(tokens):
    from eagle3lab.targets.generate import Generated

    return Generated([(tokens[0] + 1) % 97, *tokens[1:]], False)


@pytest.mark.parametrize(
    ("drafting", "message"),
    [
        (Drafting(3, topk=4), "--topk 4 without --draft-tokens"),
        (Drafting(3, draft_tokens=5), "steps \\+ 1 = 4"),
        (Drafting(3, widths=(2,), topk=2), "--tree with --topk"),
    ],
)
def test_words_that_contradict_each_other(drafting, message):
    with pytest.raises(UsageError, match=message):
        drafting.shape()


def test_no_position_to_judge_is_an_error_and_not_1():
    own = lab()
    samples = states_of(own.target, own.prompts[:2], [text[:1] for text in own.plain[:2]])
    ends = TargetEnds(*[torch.zeros(1)] * 3, 1e-6)
    with pytest.raises(AcceptanceError, match="no position to judge"):
        accept_replay.measure(own.drafters["fresh"], samples, steps=3, greedy=True, temperature=None, ends=ends)


@pytest.mark.parametrize(("words", "found"), [(None, range(50)), ("-8:", range(42, 50)), ("3:5", range(3, 5))])
def test_sample_ranges(words, found):
    assert accept_replay._range(words, 50) == found


@pytest.mark.parametrize("words", ["3", "a:b", "60:", "1:2:3"])
def test_bad_sample_ranges(words):
    with pytest.raises(UsageError, match="--samples"):
        accept_replay._range(words, 50)


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_ends_of_a_target_are_those_of_the_loaded_model(prefix, tmp_path):
    from safetensors.torch import save_file

    own = lab()
    tensors = {prefix + n: t.clone().contiguous() for n, t in own.target.model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    text = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text} if prefix else text))
    ends = read_target_ends(tmp_path)
    ids = torch.tensor([[3, 4, 5]])
    after, before = own.target.states(ids)[0], own.target.states(ids, pre_norm=True)[0]
    right = own.target.logits(after)[0]
    torch.testing.assert_close(ends.logits(after[0]), right)
    torch.testing.assert_close(ends.logits(before[0], pre_norm=True), right)
    assert not torch.allclose(ends.logits(before[0]), right), "the wrong version forgets the norm"
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(FetchError, match=r"no model\.embed_tokens\.weight"):
        read_target_ends(tmp_path)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps({"id": f"n{i}", "prompt": f"p-{i}"}) for i in range(6)))
    return str(path)


def test_served_from_the_command_line(prompts, capfd):
    words = ["--prompts", prompts, "--raw", "--max-new-tokens", str(TOKENS), "--json"]
    with running() as fake:
        assert cli.run(["accept", "served", fake.url, *words, "--min-accept-length", "1.0"]) == 0
        out, err = capfd.readouterr()
        assert json.loads(out)["counts"]["verify_steps"] > 0 and "6 of 6 prompts" in err
        assert cli.run(["accept", "served", fake.url, *words, "--min-accept-length", "3.9"]) == 1
        assert json.loads(capfd.readouterr().out)["gate"]["met"] is False
    with running(algorithm="EAGLE") as fake:
        assert cli.run(["accept", "served", fake.url, *words]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and "runs speculative algorithm EAGLE, asked EAGLE3" in err


@pytest.mark.parametrize(
    "words",
    [
        ["served", "http://127.0.0.1:9", "--prompts", "nowhere.jsonl"],
        ["decode", "--draft", "nowhere", "--tree", "2,x"],
        ["decode", "--draft", "nowhere", "--topk", "3"],
        ["replay", "--draft", "nowhere", "--states", "nowhere", "--temperature", "0"],
    ],
)
def test_bad_words_are_one_line_and_exit_2(words, capfd):
    assert cli.run(["accept", *words]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("eagle3lab: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--min-accept-length", "nan"], "--min-accept-length nan"),
        (["--temperature", "nan"], "--temperature nan"),
        (["--temperature", "-1"], "--temperature -1"),
        (["--seed", "-1"], "--seed -1"),
        (["--limit", "-1"], "--limit -1"),
        (["--limit", "0"], "--limit 0"),
    ],
)
@pytest.mark.parametrize("kind", ["served", "decode"])
def test_numbers_that_mean_nothing_are_refused(kind, words, told, prompts, capfd):
    """None of them is taken for another one: NaN would pass every gate, -1 would leave the last prompt out."""
    place = ["http://127.0.0.1:9"] if kind == "served" else ["--draft", "nowhere"]
    assert cli.run(["accept", kind, *place, "--prompts", prompts, *words]) == 2
    assert told in capfd.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://a b", "http://[::1"])
def test_a_url_that_is_none_is_one_line(url, prompts, capfd):
    assert cli.run(["accept", "served", url, "--prompts", prompts, "--raw"]) == 2
    assert "server URL" in capfd.readouterr().err


@pytest.mark.parametrize("words", [["--out", "."], ["--resume", "."], ["--timeout", "nan"]])
def test_places_are_asked_for_before_anything_is_sent(words, prompts, capfd):
    with running() as fake:
        assert cli.run(["accept", "served", fake.url, "--prompts", prompts, "--raw", *words]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1


def test_counters_of_another_type_are_no_answer():
    engine = SGLang(Client("http://127.0.0.1:9"), {"speculative_num_steps": "3"}, "EAGLE3")
    with pytest.raises(TransientError, match="completion_tokens '3'"):
        engine.read(Answer(), {"text": "a", "meta_info": {"completion_tokens": "3"}})
    meta = {"spec_verify_ct": 2, "spec_num_correct_drafts": 1, "spec_correct_drafts_histogram": [1, 1]}
    assert engine.counts("p", meta).accepted == 1


def test_proposed_drafts_fit_the_servers_draft_tokens():
    meta = {"spec_verify_ct": 2, "spec_num_correct_drafts": 1, "spec_num_proposed_drafts": 10}
    told = {"speculative_num_steps": 3, "speculative_num_draft_tokens": 4}
    with pytest.raises(AcceptanceError, match=r"p: 10 drafts proposed in 2 verify steps .* = 6"):
        SGLang(Client("http://127.0.0.1:9"), told, "EAGLE3").counts("p", meta)
    for report in (told | {"speculative_num_draft_tokens": 6}, told | {"speculative_adaptive": True}):
        assert SGLang(Client("http://127.0.0.1:9"), report, "EAGLE3").counts("p", meta).proposed == 10
