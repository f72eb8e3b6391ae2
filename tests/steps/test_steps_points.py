"""The `points` step: text, JSON, and the target folder."""

from __future__ import annotations

import json

import pytest

from eagle3lab.core.errors import PointsError, ProfileError, UsageError
from eagle3lab.steps.points import parse_ids, points


@pytest.fixture
def kimi_folder(tmp_path):
    config = {"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2", "num_hidden_layers": 61}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_target_names_family_and_blocks(kimi_folder) -> None:
    outcome = points(engine="sglang", ids=[1, 29, 57], target=kimi_folder)
    assert (outcome.family, outcome.blocks, outcome.found.resid_pre) == ("kimi_k25", 61, [2, 30, 58])


def test_blocks_that_the_target_contradicts(kimi_folder) -> None:
    with pytest.raises(UsageError, match="num_hidden_layers 61"):
        points(engine="sglang", ids=[1, 29, 57], target=kimi_folder, blocks=30)


@pytest.mark.parametrize(
    ("text", "error"),
    [("[]", ProfileError), ("{", ProfileError), ('{"model_type": "mamba", "num_hidden_layers": 61}', PointsError)],
)
def test_unusable_config(tmp_path, text: str, error: type[Exception]) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(error, match="mamba" if error is PointsError else r"config\.json"):
        points(engine="sglang", ids=[1, 29, 57], target=tmp_path)


def test_inverse_says_list_and_key() -> None:
    outcome = points(engine="sglang", resid_pre=[2, 15, 27], blocks=30, family="llama")
    assert outcome.as_json()["write"] == [{"ids": [1, 14, 26], "key": "eagle_config.eagle_aux_hidden_state_layer_ids"}]
    assert "1,14,26" in outcome.as_text() and outcome.exit_code == 0


def test_ambiguous_is_said_in_text_and_json() -> None:
    outcome = points(engine="sglang", ids=[4, 20, 40], blocks=61, family="kimi_k25")
    assert "ambiguous" in outcome.as_text().splitlines() and outcome.as_json()["ambiguous"] is True


def test_fewer_states_than_ids_is_exit_1() -> None:
    assert points(engine="sglang", ids=[24, 30, 36], blocks=36, family="llama").exit_code == 1


@pytest.mark.parametrize(
    ("text", "want"),
    [("2,30,58", [2, 30, 58]), ("[2, 30, 58]", [2, 30, 58]), ("none", None), ("NULL", None), (None, None)],
)
def test_parse_ids(text: str | None, want: list[int] | None) -> None:
    assert parse_ids(text, "--ids") == want
