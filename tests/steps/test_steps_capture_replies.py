"""From replies of a served target to a folder of states: in this process, and through a server with the hook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eagle3lab.capture.exchange import convert_states
from eagle3lab.capture.final_norm import read_final_norm
from eagle3lab.capture.sglang_hook import create
from eagle3lab.capture.store import Store
from eagle3lab.core.errors import CorpusError, FetchError, StoreError, UsageError
from eagle3lab.corpus.chat import render_prompt
from eagle3lab.corpus.prompts import Prompt
from eagle3lab.corpus.regenerate import Settings, regenerate, settings_path
from eagle3lab.steps.capture_replies import CapturedReplies, capture_replies
from eagle3lab.targets.fetch import fetch
from eagle3lab.targets.model import Target, load_target
from eagle3lab.targets.profiles import PROFILE_FOLDER, load_profile
from tests.capture.fake_sglang import Engine, FakeServer
from tests.corpus.openai_server import ChatServer

SMALL = {"blocks = 61": "blocks = 8", "num_hidden_layers = 61": "num_hidden_layers = 8", "7168": "64"}
POINTS = [2, 4, 5]
PROMPTS = [Prompt(f"p{index}", "chat", f"say something {'longer ' * index}") for index in range(6)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A user's own profile: Kimi's architecture with 8 blocks of width 64."""
    place = tmp_path_factory.mktemp("small-kimi")
    text = (PROFILE_FOLDER / "kimi-thin.toml").read_text()
    for old, new in SMALL.items():
        text = text.replace(old, new)
    text = text.replace("points = [2, 30, 58]", f"points = {POINTS}").replace(
        'name = "kimi-thin"', 'name = "kimi-tiny"'
    )
    profile = place / "kimi-tiny.toml"
    profile.write_text(text)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("EAGLE3LAB_CACHE", str(place / "cache"))
        return str(profile), fetch(load_profile(str(profile)), note=lambda _: None)


@pytest.fixture(scope="module")
def replies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("replies") / "replies.jsonl"
    with ChatServer(thinking=True) as server:
        regenerate(PROMPTS, out, Settings("the-target", 0.0, 64), server=server.url)
    return out


def captured(outcome: CapturedReplies | None) -> CapturedReplies:
    assert outcome is not None
    return outcome


def test_in_this_process(small: tuple[str, Path], replies: Path, tmp_path: Path) -> None:
    profile, folder = small
    done = captured(capture_replies(profile, replies, tmp_path / "states", target=folder, dtype="float32"))
    assert (done.samples, done.width) == (6, 3 * 64)
    store, target = Store(tmp_path / "states", points=POINTS, verify=True), load_target(folder)
    sample = store[2]
    prompt = render_prompt(target.tokenizer, [{"role": "user", "content": PROMPTS[2].prompt}])
    assert sample.input_ids[: len(prompt)].tolist() == prompt
    said = target.tokenizer.decode(sample.input_ids[sample.loss_mask])
    assert said == f"about {PROMPTS[2].prompt}</think>{PROMPTS[2].prompt.upper()}<|im_end|>"
    _, states = target.states(sample.input_ids[None], points=POINTS)
    wanted = torch.cat(states, -1)[0]
    assert float((sample.aux - wanted).abs().max() / wanted.abs().max()) < 2**-8
    assert store.manifest.greedy
    assert json.loads(json.dumps(done.as_json()))["ranks"][0]["rank"] == 0
    assert "6 samples" in done.as_text()


def test_last_states_before_the_final_norm(small: tuple[str, Path], replies: Path, tmp_path: Path) -> None:
    profile, folder = small
    for last in ("pre", "post"):
        capture_replies(profile, replies, tmp_path / last, target=folder, dtype="float32", last=last)
    before, after = Store(tmp_path / "pre", verify=True), Store(tmp_path / "post", verify=True)
    assert (before.manifest.last, after.manifest.last) == ("pre_norm", "post_norm")
    norm = read_final_norm(folder)
    for index in range(len(before)):
        raw, normed = before[index].last.float(), after[index].last.float()
        assert torch.equal(before[index].aux, after[index].aux)
        assert float((norm(raw) - normed).abs().max() / normed.abs().max()) < 2**-7
        assert float((raw - normed).abs().max() / normed.abs().max()) > 0.1, "a norm that changes nothing shows nothing"
    assert convert_states(tmp_path / "pre", tmp_path / "exported", "speculators").samples == len(before)
    with pytest.raises(StoreError, match="last"):  # neither goes on as the other
        capture_replies(profile, replies, tmp_path / "pre", target=folder, dtype="float32")
    with pytest.raises(UsageError, match="--last pre with --server"):
        capture_replies(
            profile, replies, tmp_path / "s", target=folder, server="http://x", exchange=tmp_path, last="pre"
        )
    with pytest.raises(UsageError, match="--last before"):
        capture_replies(profile, replies, tmp_path / "s", target=folder, last="before")


def served_states(target: Target):
    def states(ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        last, found = target.states(ids[None], points=POINTS)
        return [state[0] for state in found], last[0]

    return states


def test_through_a_server_as_in_this_process(small: tuple[str, Path], replies: Path, tmp_path: Path) -> None:
    profile, folder = small
    target = load_target(folder)
    engine = Engine(create({"exchange": str(tmp_path / "exchange")}), served_states(target), packed=True, kimi=True)
    with FakeServer(engine) as server:
        done = captured(
            capture_replies(
                profile,
                replies,
                tmp_path / "served",
                target=folder,
                server=server.url + "/",
                exchange=tmp_path / "exchange",
                concurrency=3,
                note=lambda _: None,
            )
        )
    assert len(done.agreement) == 1
    assert "next-token agreement by shard" in done.as_text()
    capture_replies(profile, replies, tmp_path / "here", target=folder, dtype="float32")
    served, here = Store(tmp_path / "served", verify=True), Store(tmp_path / "here")
    for index in range(len(here)):
        assert torch.equal(served[index].input_ids, here[index].input_ids)
        assert torch.allclose(served[index].aux, here[index].aux, rtol=2**-7, atol=1e-3)


def test_what_cannot_work_is_refused(small: tuple[str, Path], replies: Path, tmp_path: Path) -> None:
    profile, folder = small
    with pytest.raises(UsageError, match="belong together"):
        capture_replies(profile, replies, tmp_path / "x", target=folder, server="http://127.0.0.1:1")
    with pytest.raises(UsageError, match="--dtype float32 with --server"):
        capture_replies(profile, replies, tmp_path / "x", server="u", exchange=tmp_path, dtype="float32")
    for wrong in ({"dtype": "bf16"}, {"server": "u", "exchange": tmp_path, "concurrency": 0}):
        with pytest.raises(UsageError, match=r"--dtype bf16; one of|--concurrency 0; 1 or more"):
            capture_replies(profile, replies, tmp_path / "x", target=folder, **wrong)
    assert not (tmp_path / "x").exists()
    with pytest.raises(FetchError, match="no target in"):
        capture_replies(profile, replies, tmp_path / "x", target=tmp_path)
    capture_replies(profile, replies, tmp_path / "states", target=folder)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(line + "\n" for line in replies.read_text().splitlines()[:3]))
    settings_path(other).write_bytes(settings_path(replies).read_bytes())
    with pytest.raises(StoreError, match="corpus_sha256"):
        capture_replies(profile, other, tmp_path / "states", target=folder)
    other.write_text("")
    with pytest.raises(CorpusError, match="no reply"):
        capture_replies(profile, other, tmp_path / "x", target=folder)


@pytest.mark.slow
def test_over_two_ranks_as_in_this_process(small: tuple[str, Path], replies: Path, tmp_path: Path) -> None:
    profile, folder = small
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        "-m",
        "eagle3lab",
    ]
    words = ["capture", "--profile", profile, "--replies", str(replies), "--out", str(tmp_path / "states")]
    done = subprocess.run(
        [*command, *words, "--target", str(folder), "--dtype", "float32", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)  # one result, from one rank
    assert [share["rank"] for share in found["ranks"]] == [0, 1]
    capture_replies(profile, replies, tmp_path / "here", target=folder, dtype="float32")
    split, here = Store(tmp_path / "states", points=POINTS, verify=True), Store(tmp_path / "here")
    assert split.manifest.engine_arguments == {"compute": "float32", "ranks": "2"}
    for index in range(len(here)):
        assert torch.allclose(split[index].aux.float(), here[index].aux.float(), rtol=2**-7, atol=1e-4)
    assert not torch.allclose(split[0].aux[1:].float(), here[0].aux[:-1].float(), rtol=2**-7, atol=1e-4)
    again = subprocess.run(
        [*command, *words, "--target", str(folder), "--dtype", "bfloat16"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert again.returncode != 0
    assert "compute" in again.stderr, "other arguments must be refused on every rank, without waiting for each other"
