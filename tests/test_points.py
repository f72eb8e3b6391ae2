"""The conversion table of every engine, the wrong conversions that it must not be, and the inverse for any n."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from eagle3lab.core.errors import PointsError
from eagle3lab.points import (
    ENGINES,
    FAMILIES,
    NESTED_KEY,
    TOP_LEVEL_KEY,
    captured,
    check_points,
    compare,
    default_points,
    family_of,
    written,
)

N = 61
DEFAULT = [2, 30, 58]

# ids written -> captured, per (engine, family). Columns and rows as published for n = 61.
TABLE = [
    (None, {"kimi": DEFAULT, "llama": DEFAULT, "vllm": DEFAULT, "specforge": DEFAULT, "speculators": DEFAULT}),
    (
        [2, 30, 58],
        {"kimi": DEFAULT, "llama": [3, 31, 59], "vllm": DEFAULT, "specforge": DEFAULT, "speculators": DEFAULT},
    ),
    (
        [1, 29, 57],
        {"kimi": DEFAULT, "llama": DEFAULT, "vllm": [1, 29, 57], "specforge": DEFAULT, "speculators": [1, 29, 57]},
    ),
    ([1, 30, 58], {"kimi": [2, 31, 59], "llama": [2, 31, 59], "vllm": [1, 30, 58]}),
    ([3, 31, 59], {"kimi": [3, 31, 59], "llama": [4, 32, 60], "vllm": [3, 31, 59]}),
    ([2, 30, 61], {"vllm": [2, 30, 61]}),
]
COLUMNS = {
    "kimi": ("sglang", "kimi_k25"),
    "llama": ("sglang", "llama"),
    "vllm": ("vllm", "kimi_k25"),
    "specforge": ("specforge", "kimi_k25"),
    "speculators": ("speculators", "kimi_k25"),
}
CELLS = [(ids, column, want) for ids, row in TABLE for column, want in row.items()]


@pytest.mark.parametrize(("ids", "column", "want"), CELLS)
def test_table(ids: list[int] | None, column: str, want: list[int]) -> None:
    engine, family = COLUMNS[column]
    got = captured(ids, blocks=N, engine=engine, family=family)
    assert got.resid_pre == want
    assert not got.refused


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ids, column: ids,  # every engine verbatim
        lambda ids, column: [i + 1 for i in ids],  # every engine adds one
        lambda ids, column: [i + 1 for i in ids] if column in ("kimi", "llama") else ids,  # SGLang always adds one
        lambda ids, column: [i + 1 for i in ids] if ids[0] == 1 else ids,  # first-id rule everywhere
    ],
)
def test_table_tells_wrong_conversions_apart(wrong) -> None:
    assert any(wrong(ids, column) != want for ids, column, want in CELLS if ids is not None)


def test_llama_families_add_one_and_deepseek_families_do_not() -> None:
    for family in ("llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "gemma3", "minimax_m2", "exaone_moe"):
        assert captured(DEFAULT, blocks=N, engine="sglang", family=family).resid_pre == [3, 31, 59], family
    for family in ("kimi_k25", "kimi_k2", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"):
        assert captured(DEFAULT, blocks=N, engine="sglang", family=family).resid_pre == DEFAULT, family


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("engine", ["vllm", "vllm-v2", "speculators"])
def test_vllm_side_ignores_the_family(engine: str, family: str) -> None:
    assert captured([3, 31, 59], blocks=N, engine=engine, family=family).resid_pre == [3, 31, 59]


@pytest.mark.parametrize(
    ("version", "want"),
    [
        ("0.5.12.post1", [3, 31, 59]),
        ("0.5.9", [3, 31, 59]),
        ("0.5.13", DEFAULT),
        ("v0.5.23", DEFAULT),
        ("0.6", DEFAULT),
    ],
)
def test_first_id_rule_came_with_0_5_13(version: str, want: list[int]) -> None:
    assert captured(DEFAULT, blocks=N, engine="sglang", family="kimi_k25", version=version).resid_pre == want


def test_without_a_version_the_older_reading_is_printed() -> None:
    notes = " ".join(captured(DEFAULT, blocks=N, engine="sglang", family="kimi_k25").notes)
    assert "0.5.13" in notes and "[3, 31, 59]" in notes


def test_unreadable_version() -> None:
    with pytest.raises(PointsError, match="nightly"):
        captured(DEFAULT, blocks=N, engine="sglang", family="kimi_k25", version="nightly")


@pytest.mark.parametrize(
    ("ids", "ambiguous"),
    [
        (None, False),
        (DEFAULT, False),
        ([1, 29, 57], False),
        ([4, 20, 40], True),
        ([1, 30, 58], True),
        ([58, 2, 30], False),
    ],
)
def test_ambiguity_of_the_first_id_rule(ids: list[int] | None, ambiguous: bool) -> None:
    assert captured(ids, blocks=N, engine="sglang", family="kimi_k25").ambiguous is ambiguous
    assert captured(ids, blocks=N, engine="vllm", family="kimi_k25").ambiguous is False


def test_ambiguous_list_prints_the_other_reading() -> None:
    assert "[5, 21, 41]" in " ".join(captured([4, 20, 40], blocks=N, engine="sglang", family="kimi_k25").notes)


def test_gpt_oss_is_verbatim_only_with_the_last_boundary() -> None:
    at_end = captured([24, 30, 36], blocks=36, engine="sglang", family="gpt_oss")
    assert at_end.resid_pre == [24, 30, 36]
    assert "before the final norm" in " ".join(at_end.notes)
    assert captured([1, 17, 33], blocks=36, engine="sglang", family="gpt_oss").resid_pre == [2, 18, 34]


def test_out_of_reach_is_lost_in_llama_and_refused_in_kimi() -> None:
    llama = captured([24, 30, 36], blocks=36, engine="sglang", family="llama")
    assert (llama.resid_pre, llama.refused) == ([25, 31], False)
    assert "id 37 is out of range" in " ".join(llama.notes) and "captured 2 of 3" in " ".join(llama.notes)
    kimi = captured([2, 30, 61], blocks=N, engine="sglang", family="kimi_k25")
    assert (kimi.resid_pre, kimi.refused) == ([2, 30], True)
    assert "captured 2 of 3" in kimi.notes[-1]
    assert captured([24, 30, 36], blocks=36, engine="sglang", family="qwen3_moe").refused  # layers[37] raises
    assert captured([2, 30, 62], blocks=N, engine="vllm", family="kimi_k25").resid_pre == [2, 30]


def test_duplicates() -> None:
    kimi = captured([2, 30, 30], blocks=N, engine="sglang", family="kimi_k25")
    assert kimi.refused and "captured 2 of 3" in kimi.notes[-1]
    llama = captured([1, 29, 29], blocks=N, engine="sglang", family="llama")
    assert (llama.resid_pre, llama.refused) == ([2, 30], False)
    assert any("duplicate" in note for note in llama.notes)


def test_order_has_no_effect_but_the_first_id_has() -> None:
    assert captured([58, 2, 30], blocks=N, engine="sglang", family="kimi_k25").resid_pre == DEFAULT
    assert captured([29, 1, 57], blocks=N, engine="sglang", family="kimi_k25").resid_pre == [1, 29, 57]
    assert any("ascending" in note for note in captured([58, 2, 30], blocks=N, engine="vllm").notes)


def test_id_0_negative_and_empty() -> None:
    assert captured([0, 30, 58], blocks=N, engine="sglang", family="kimi_k25").resid_pre == [0, 30, 58]
    assert captured([0, 30, 58], blocks=N, engine="vllm", family="kimi_k25").refused
    assert captured([-1, 30, 58], blocks=N, engine="sglang", family="llama").refused
    assert captured([], blocks=N, engine="vllm").refused


def test_specforge_takes_three() -> None:
    assert captured([1, 57], blocks=N, engine="specforge", family="kimi_k25").refused


def test_speculators_appends_the_last_state() -> None:
    assert "61" in captured(None, blocks=N, engine="speculators", family="kimi_k25").notes[-1]


def test_model_file_that_shifts_the_default_too() -> None:
    assert captured(None, blocks=N, engine="sglang", family="minimax_m3_vl").resid_pre == [3, 31, 59]
    assert captured(None, blocks=N, engine="sglang", family="minimax_m3").resid_pre == DEFAULT


def test_no_family_says_so() -> None:
    got = captured(DEFAULT, blocks=N, engine="sglang")
    assert got.resid_pre == DEFAULT and "Kimi/DeepSeek" in got.notes[0]


def test_unknown_names_give_the_nearest() -> None:
    with pytest.raises(PointsError, match="'sglang'"):
        captured(None, blocks=N, engine="sgland")
    with pytest.raises(PointsError, match="'qwen3_moe'"):
        captured(None, blocks=N, engine="sglang", family="qwen3moe")


@pytest.mark.parametrize(("blocks", "want"), [(61, DEFAULT), (30, [2, 15, 27]), (7, [2, 3, 4]), (8, [2, 4, 5])])
def test_default_points(blocks: int, want: list[int]) -> None:
    assert default_points(blocks) == want


@pytest.mark.parametrize("blocks", [0, 1, 4, 6, -1, True])
def test_default_points_of_too_few_blocks(blocks: int) -> None:
    with pytest.raises(PointsError, match=str(blocks)):
        default_points(blocks)


@pytest.mark.parametrize("points", [[2, 30, 62], [-1, 30, 58], [2, 2, 58], [30, 2, 58], [], [2.0, 30, 58], "2,30"])
def test_check_points_refuses(points: list[int]) -> None:
    with pytest.raises(PointsError) as error:
        check_points(points, N)
    assert "61" in str(error.value) or "integers" in str(error.value)


def test_smollm2_lists() -> None:
    points = [2, 15, 27]
    [nested] = written(points, blocks=30, engine="sglang", family="llama")
    [top] = written(points, blocks=30, engine="vllm-v2", family="llama")
    assert (nested.ids, nested.key) == ([1, 14, 26], NESTED_KEY)
    assert (top.ids, top.key) == (points, TOP_LEVEL_KEY)


def test_kimi_list_is_right_in_sglang_and_vllm() -> None:
    for engine in ENGINES:
        assert written(DEFAULT, blocks=N, engine=engine, family="kimi_k25")[0].ids == DEFAULT, engine
    assert written(DEFAULT, blocks=N, engine="sglang", family="kimi_k25", version="0.5.12")[0].ids == [1, 29, 57]


@pytest.mark.parametrize(
    ("points", "engine", "family", "version"),
    [
        ([2, 30, 61], "sglang", "kimi_k25", None),
        ([2, 30, 61], "sglang", "llama", None),
        ([0, 30, 58], "sglang", "llama", None),
        ([0, 30, 58], "sglang", "kimi_k25", "0.5.12"),
        ([1], "sglang", "kimi_k25", None),
        ([0, 30, 58], "vllm", "deepseek_v3", None),
        ([2, 58], "specforge", "kimi_k25", None),
    ],
)
def test_points_that_no_list_expresses(points: list[int], engine: str, family: str, version: str | None) -> None:
    with pytest.raises(PointsError, match=r"cannot capture .* n = 61"):
        written(points, blocks=N, engine=engine, family=family, version=version)


@settings(max_examples=400, deadline=None)
@given(data=st.data(), blocks=st.integers(7, 130), engine=st.sampled_from(ENGINES))
def test_captured_inverts_written(data: st.DataObject, blocks: int, engine: str) -> None:
    family = data.draw(st.sampled_from([None, *FAMILIES]))
    version = data.draw(st.sampled_from([None, "0.5.12.post1", "0.5.23"]))
    points = sorted(data.draw(st.sets(st.integers(0, blocks), min_size=1, max_size=5)))
    try:
        [entry] = written(points, blocks=blocks, engine=engine, family=family, version=version)
    except PointsError:
        # Only the corners may be out of reach: the embedding, the last boundary, a lone 1, or not three for SpecForge.
        assert points[0] == 0 or points[-1] == blocks or points == [1] or (engine == "specforge" and len(points) != 3)
        assume(False)
    got = captured(entry.ids, blocks=blocks, engine=engine, family=family, version=version)
    assert got.resid_pre == points and not got.refused


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 70), min_size=1, max_size=5), engine=st.sampled_from(ENGINES))
def test_captured_is_ascending_in_range_and_explained(ids: list[int], engine: str) -> None:
    got = captured(ids, blocks=N, engine=engine, family="kimi_k25")
    assert got.resid_pre == sorted(set(got.resid_pre)) and all(0 <= p <= N for p in got.resid_pre)
    assert got.notes
    if len(got.resid_pre) != len(ids):
        assert got.refused or any("captured" in note for note in got.notes)


def test_compare_names_the_off_by_one() -> None:
    assert compare(DEFAULT, DEFAULT) is None
    assert "all points one lower" in compare([1, 29, 57], DEFAULT)
    assert "all points one higher" in compare([3, 31, 59], DEFAULT)
    partly = compare([2, 31, 59], DEFAULT)
    assert "all points" not in partly and "one higher at [30, 58]" in partly
    assert "one" not in compare([4, 32, 60], DEFAULT).split(":")[1]
    assert "another order" in compare([30, 2, 58], DEFAULT)
    assert "2 points against 3" in compare([2, 30], DEFAULT)


def test_family_of_config() -> None:
    assert family_of({"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2"}}) == "kimi_k25"
    assert family_of({"model_type": "wrapper", "text_config": {"model_type": "gemma3_text"}}) == "gemma3"
    assert family_of({"model_type": "mamba"}) is None
    assert family_of({}) is None


def test_needs_no_torch() -> None:
    code = "import sys, eagle3lab.points; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
