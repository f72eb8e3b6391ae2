"""What the lab's own reader of captured states refuses is a finding of the doctor too, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3lab.doctor.run import Inputs, visit

from .states_files import IDENTITY, POINTS, H, sample, shard, whole, write, write_target

Shards = list[dict[str, np.ndarray]]


def serious(folder: Path, target: Path | None = None) -> list[str]:
    report = visit(Inputs(states=str(folder), target=str(target or "")))
    return [f"{f.severity} {f.code}: {f.message}" for f in report.findings if f.severity != "info"]


def cast(name: str, dtype: Any) -> Callable[[Shards], None]:
    return lambda shards: shards[1].__setitem__(name, shards[1][name].astype(dtype))


def flat(value: float | None) -> Callable[[Shards], None]:
    """The middle point of one shard holds the same numbers in every row."""

    def change(shards: Shards) -> None:
        columns = slice(H, 2 * H)
        shards[1]["aux"][:, columns] = shards[1]["aux"][0, columns] if value is None else value

    return change


def empty(shards: Shards) -> None:
    shards[2] = {name: values[:0] for name, values in shards[2].items()} | {"offsets": np.zeros(1, np.int64)}


def copied(shards: Shards) -> None:
    shards[2] = dict(shards[0])


LISTED = {"name": "states-00000.safetensors", "sha256": "0", "samples": 2, "tokens": 50}
FAULTS: dict[str, tuple[Callable[[Shards], None], dict[str, Any], str]] = {
    "ids as floats": (cast("input_ids", np.float32), {}, "input_ids is F32, needed I64"),
    "narrow ids": (cast("input_ids", np.int32), {}, "input_ids is I32, needed I64"),
    "a mask of numbers": (cast("loss_mask", np.int64), {}, "loss_mask is I64, needed BOOL"),
    "narrow offsets": (cast("offsets", np.int32), {}, "offsets is I32, needed I64"),
    "no sample": (empty, {}, "states-00002.safetensors: no sample is in it"),
    "a shard twice": (copied, {}, "sample 0 follows sample 3"),
    "samples fall": (lambda s: s[0]["sample_id"].__setitem__(1, 0), {}, "sample 0 follows sample 0"),
    "a point of zeros": (flat(0.0), {}, "the columns of point 4 are the same in every row"),
    "a constant point": (flat(None), {}, "the columns of point 4 are the same in every row"),
    "another release": (lambda s: None, {"schema_version": "eagle3lab-states/9"}, "schema_version: Input should be"),
    "last in other words": (lambda s: None, {"last": "sideways"}, "last: Input should be 'post_norm' or 'pre_norm'"),
    "text for a number": (lambda s: None, {"seed": "0"}, "seed: Input should be a valid integer"),
    "more than planned": (lambda s: None, {"planned_shards": 2}, "lists 3 shards, 2 were planned"),
    "lists that disagree": (lambda s: None, {"points_checkpoint": POINTS}, "are the points [2, 5, 7]"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_an_error(tmp_path: Path, name: str) -> None:
    change, manifest, told = FAULTS[name]
    shards = whole()
    change(shards)
    found = serious(write(tmp_path / "s", shards, **manifest))
    assert any(one.startswith("error states-") and told in one for one in found), found


@pytest.mark.parametrize("name", ["target_id", "greedy", "points_checkpoint"])
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "s", whole())
    said = json.loads((folder / "manifest.json").read_text())
    del said[name]
    (folder / "manifest.json").write_text(json.dumps(said))
    assert [one for one in serious(folder) if f"{name}: Field required" in one]


def test_a_shard_that_is_listed_twice_or_with_other_samples(tmp_path: Path) -> None:
    folder = write(tmp_path / "s", whole())
    said = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**said, "shards": [*said["shards"], said["shards"][0]]}))
    assert any("lists states-00000.safetensors 2 times" in one for one in serious(folder))
    said["shards"][0]["samples"] = 7
    (folder / "manifest.json").write_text(json.dumps(said))
    assert serious(folder) == ["error states-layout: states-00000.safetensors has 2 samples, the manifest says 7"]


def test_a_token_that_the_target_has_not(tmp_path: Path) -> None:
    shards, target = whole(), write_target(tmp_path / "t")
    shards[1]["input_ids"][3] = 60
    assert serious(write(tmp_path / "good", shards), target) == []
    shards[1]["input_ids"][3] = 61
    assert any("holds token 61, the target's vocabulary has 61" in one for one in
               serious(write(tmp_path / "bad", shards), target))  # fmt: skip


@pytest.mark.parametrize(
    "shards",
    [
        [shard([sample(1, 2), sample(2, 3)])],
        [shard([sample(1)], first=40)],
        [shard([sample(1)]), shard([sample(2)], first=9)],  # ids may leave numbers out
    ],
    ids=["short", "begins later", "gaps"],
)
def test_healthy_folders(tmp_path: Path, shards: Shards) -> None:
    assert serious(write(tmp_path / "s", shards), write_target(tmp_path / "t")) == []


def test_equal_tokens_may_have_equal_states(tmp_path: Path) -> None:
    """The first point is the embedding of one token that stands in every row."""
    shards = whole()
    shards[0]["input_ids"][:] = 7
    shards[0]["aux"][:, :H] = shards[0]["aux"][0, :H]
    assert not any("same in every row" in one for one in serious(write(tmp_path / "s", shards)))


@pytest.mark.parametrize(("family", "ids"), [("kimi_k25", [1, 4, 6]), ("llama", [0, 3, 5]), ("unheard-of", [5, 6, 7])])
def test_lists_that_agree(tmp_path: Path, family: str, ids: list[int]) -> None:
    points = POINTS if family != "kimi_k25" else [2, 5, 7]
    said = {**IDENTITY, "family": family, "points_checkpoint": ids, "points": points}
    found = serious(write(tmp_path / "s", whole(), **said))
    assert not any("points_checkpoint" in one for one in found), found


@pytest.mark.parametrize("manifest", ["{}", '{"schema": "eagle3lab-run/1", "profile": "smollm2"}'])
def test_a_folder_of_something_else(tmp_path: Path, manifest: str) -> None:
    """A run has a manifest.json too, and no shard: that is said, not passed over."""
    (tmp_path / "manifest.json").write_text(manifest)
    assert any("manifest.json is none of eagle3lab-states/1" in one for one in serious(tmp_path))
