"""Width, points and mask of states typed as facts."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import serious

POINTS = {"points": [2, 30, 58], "H": 8}
KIMI = {"target": {"blocks": 61, "hidden_size": 7168, "family": "kimi_k25"}}
SHARDS = [{"name": "A", "tokens": [1, 2], "hidden_rows": 2}]


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"dtype": "BF16", "shape": [4, 16], "recipe": "ones", **POINTS}, "width 16 is not 3 x 8 = 24"),
        ({"width": 16, "shards": SHARDS, **POINTS}, "width 16 is not 3 x 8 = 24"),
        ({"width": 32, **POINTS}, "width 32 is not 3 x 8 = 24; it is one state more"),
        ({"width": 16, "points": 3, "H": 8}, "width 16 is not 3 x 8 = 24"),
        ({"width": 16, "points": [2, 30, 58]}, "width 16 is no multiple of 3 points"),
        ({"width": 21503, **KIMI}, "width 21503 is no multiple of the hidden size 7168"),
        ({"width": 14336, "states_manifest_resid_pre": [2, 30, 58], **KIMI}, "width 14336 is not 3 x 7168 = 21504"),
        ({"width": 24, "shards": [{"name": "B", "width": 16}], **POINTS}, "shard B: width 16 is not 3 x 8 = 24"),
        ({"width": 12288, "points": [2, 30, 58], "H": 4096, **KIMI}, "H is 4096, the target's hidden size 7168"),
        ({"shape": [4, 24], "points": [2, 2, 58], "H": 8}, "capture points [2, 2, 58]: duplicate"),
        ({"shape": [4, 24], "points": [58, 30, 2], "H": 8}, "capture points [58, 30, 2]: not ascending"),
        ({"points": [2, 30, 62], **KIMI}, "[62] out of range; the target has 61 blocks"),
        ({"states_manifest_resid_pre": [-1, 4]}, "[-1] out of range"),
        ({"shape": [4, 24], "loss_mask": [0, 1, 1], **POINTS}, "loss_mask has 3 marks for 4 rows"),
        ({"shape": [4, 24], "loss_mask": [0, 0, 0, 0], **POINTS}, "no token is supervised"),
        ({"states": {"hidden_size": 4096}, **KIMI}, "the manifest says hidden_size 4096, the target has 7168"),
    ],
)
def test_wrong_sizes(facts: dict[str, Any], told: str) -> None:
    assert [severity for severity, said in serious(facts) if told in said] == ["error"], serious(facts)


@pytest.mark.parametrize(
    "facts",
    [
        {"shape": [4, 24], "recipe": "ones", "loss_mask": [0, 1, 1, 0], **POINTS},
        {"width": 24, "shards": SHARDS, **POINTS},
        {"width": 32, "with_last": True, **POINTS},
        {"width": 21504, "states_manifest_resid_pre": [2, 30, 58], **KIMI},
        {"width": 21504, **KIMI},
        {"width": 24, "shards": SHARDS},
        {"points": [2, 30, 61], **KIMI},  # after the last block: vLLM can capture it
        {"points": 3, "H": 8, "width": 24},
        {"loss_mask": [0, 1], "tokens": [5, 6]},
        {"states": {"hidden_size": 7168, "blocks": 61}, **KIMI},
        {"states": {"hidden_size": "x", "blocks": None}, **KIMI},
    ],
)
def test_right_sizes(facts: dict[str, Any]) -> None:
    assert not [said for severity, said in serious(facts) if severity == "error"]
