"""Truth table of the verdict: what was done to fc is what the labels say, at three seeds and two widths.

Full width (7168 x 21504) runs only where width changes the answer, and is marked slow.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from fc_builders import float8_round_trip, low_rank, normal, save_fc, start_std, uniform

from eagle3lab.inspection import Inspection, inspect_checkpoint

SMALL, KIMI = (512, 1536), (7168, 21504)
NOISE = 0.227
"""RMS of the update over the start's, as the reported std of the Kimi drafter implies."""
AT_INIT = ["AT-INIT(kaiming-uniform)"]

Make = Callable[[tuple[int, int], int], np.ndarray]


def moved(shape: tuple[int, int], seed: int) -> np.ndarray:
    """A uniform start with a Gaussian update everywhere."""
    return uniform(shape, seed) + normal(shape, NOISE * start_std(shape), seed + 1000)


def changed(where: Callable[[tuple[int, int]], tuple]) -> Make:
    """A uniform start with the update of `moved` in one place only."""

    def make(shape: tuple[int, int], seed: int) -> np.ndarray:
        fresh, trained = uniform(shape, seed), moved(shape, seed)
        at = where(shape)
        fresh[at] = trained[at]
        return fresh

    return make


def zero_block(make: Make) -> Make:
    def with_zeros(shape: tuple[int, int], seed: int) -> np.ndarray:
        weights = make(shape, seed)
        weights[:, : shape[1] // 3] = 0
        return weights

    return with_zeros


def xavier(shape: tuple[int, int], seed: int) -> np.ndarray:
    bound = np.sqrt(6 / sum(shape))
    return uniform(shape, seed) * np.float32(bound * np.sqrt(shape[1]))


def pass_through(shape: tuple[int, int], seed: int, noise: float = 0.01) -> np.ndarray:
    weights = normal(shape, noise / np.sqrt(shape[1]), seed)
    weights[:, -shape[1] // 3 :] += np.eye(shape[0], shape[1] // 3, dtype=np.float32)
    return weights


def rows_of(shape: tuple[int, int]) -> list[int]:
    """1 % of the rows."""
    return list(range(7, shape[0], 100))


def columns_of(shape: tuple[int, int]) -> list[int]:
    """Five columns, in more than one block."""
    return [3, 77, shape[1] // 2, shape[1] - 100, shape[1] - 1]


TABLE: dict[str, tuple[Make, list[str]]] = {
    "fresh kaiming-uniform": (uniform, AT_INIT),
    "fresh normal-0.02": (lambda s, i: normal(s, 0.02, i), ["AT-INIT(normal-0.02)"]),
    "fresh kaiming-normal": (lambda s, i: normal(s, np.sqrt(2 / s[1]), i), ["AT-INIT(kaiming-normal)"]),
    "fresh lecun-normal": (lambda s, i: normal(s, np.sqrt(1 / s[1]), i), ["AT-INIT(lecun-normal)"]),
    "fresh xavier-uniform": (xavier, ["AT-INIT(xavier-uniform)"]),
    "fresh pass-through": (pass_through, ["AT-INIT(pass-through)"]),
    "plain identity": (lambda s, i: pass_through(s, i, 0.0), ["AT-INIT(pass-through)"]),
    "zeros": (lambda s, i: np.zeros(s, np.float32), ["DEAD"]),
    "constant": (lambda s, i: np.full(s, 0.01, np.float32), ["DEAD"]),
    "zeros in one block": (zero_block(uniform), ["DEAD(low)", *AT_INIT]),
    "N(0, 0.004)": (lambda s, i: normal(s, 0.004, i), ["INIT-UNKNOWN"]),
    "normal with the std of a moved uniform": (
        lambda s, i: normal(s, 1.0254 * start_std(s), i), ["INIT-UNKNOWN"],
    ),
    "one block": (changed(lambda s: (slice(None), slice(2 * s[1] // 3, None))), ["PARTLY-TRAINED(high)"]),
    "two blocks": (changed(lambda s: (slice(None), slice(s[1] // 3, None))), ["PARTLY-TRAINED(mid, high)"]),
    "float8 round trip": (lambda s, i: float8_round_trip(uniform(s, i)), AT_INIT),
    "float8 round trip, a scale a row": (lambda s, i: float8_round_trip(uniform(s, i), per_row=True), AT_INIT),
    "float8 round trip of a normal": (lambda s, i: float8_round_trip(normal(s, 0.02, i)), ["AT-INIT(normal-0.02)"]),
}  # fmt: skip

MOVED: dict[str, tuple[Make, float]] = {
    "noise": (moved, NOISE),
    "rank 4": (lambda s, i: uniform(s, i) + low_rank(s, 4, NOISE * start_std(s), i + 50), NOISE),
    "rank 512": (lambda s, i: uniform(s, i) + low_rank(s, 512, NOISE * start_std(s), i + 50), NOISE),
    "decayed below the start": (lambda s, i: uniform(s, i) * np.float32(0.95), 0.05),
    "decayed and trained": (
        lambda s, i: uniform(s, i) * np.float32(0.93) + normal(s, 0.1 * start_std(s), i + 50), np.hypot(0.07, 0.1),
    ),
    "float8 round trip of a moved one": (lambda s, i: float8_round_trip(moved(s, i)), NOISE),
    "normal-0.02, moved": (lambda s, i: normal(s, 0.02, i) + normal(s, 0.005, i + 50), 0.25),
}  # fmt: skip


def check(tmp_path, weights: np.ndarray, labels: list[str]) -> Inspection:
    found = inspect_checkpoint(save_fc(tmp_path, weights))
    assert found.verdict.labels == labels, found.verdict.evidence
    assert found.verdict.evidence
    return found


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("case", TABLE)
def test_labels(tmp_path, case: str, seed: int) -> None:
    make, labels = TABLE[case]
    found = check(tmp_path, make(SMALL, seed), labels)
    quantised = any("quantisation" in line for line in found.verdict.evidence)
    assert quantised is case.startswith("float8")


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("case", MOVED)
def test_moved(tmp_path, case: str, seed: int) -> None:
    make, size = MOVED[case]
    found = inspect_checkpoint(save_fc(tmp_path, make(SMALL, seed)))
    (label,) = found.verdict.labels
    name, _, argument = label.rstrip(")").partition("(")
    assert name == "MOVED-FROM-INIT", found.verdict.evidence
    assert float(argument) == pytest.approx(size, rel=0.08, abs=0.003)
    if case == "noise":
        update = found.judgement.updates[0]
        assert update.interval[0] < NOISE < update.interval[1]
    if case.startswith("decayed"):
        assert any("weight decay" in line for line in found.verdict.evidence)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_partly_trained_lists_exactly_what_moved(tmp_path, axis: str, seed: int) -> None:
    items = rows_of(SMALL) if axis == "rows" else columns_of(SMALL)
    make = changed(lambda s: (items, slice(None)) if axis == "rows" else (slice(None), items))
    count = f"{axis}: {len(items)} of {SMALL[axis == 'columns']}"
    found = check(tmp_path, make(SMALL, seed), [f"PARTLY-TRAINED({count})"])
    assert found.verdict.where[axis] == items


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_one_nan_is_dead_and_placed(tmp_path, seed: int) -> None:
    weights = uniform(SMALL, seed)
    weights[300, 1200] = np.nan
    found = check(tmp_path, weights, ["DEAD"])
    assert found.verdict.where["not_finite"] == [300, 1200]
    assert found.to_json()["fc"]["nan"] == 1


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("case", ["fresh", "one block", "columns"])
def test_transposed_has_the_same_verdict(tmp_path, case: str, seed: int) -> None:
    make = {
        "fresh": uniform, "one block": TABLE["one block"][0],
        "columns": changed(lambda s: (slice(None), columns_of(s))),
    }[case]  # fmt: skip
    straight = inspect_checkpoint(save_fc(tmp_path / "a", make(SMALL, seed)))
    turned = inspect_checkpoint(save_fc(tmp_path / "b", make(SMALL, seed).T))
    assert turned.verdict.labels == straight.verdict.labels and turned.verdict.where == straight.verdict.where
    assert any(note.startswith("layout: transposed") for note in turned.layout.notes)
    assert not any("transposed" in note for note in straight.layout.notes)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_swapped_blocks_do_not_change_the_weight_verdict(tmp_path, seed: int) -> None:
    low, mid, high = np.split(moved(SMALL, seed), 3, axis=1)
    found = inspect_checkpoint(save_fc(tmp_path, np.concatenate([high, mid, low], axis=1)))
    assert [label.partition("(")[0] for label in found.verdict.labels] == ["MOVED-FROM-INIT"]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("shape", [SMALL, (576, 1728), (1024, 5376)])
def test_a_native_bfloat16_draw_is_named(tmp_path, shape: tuple[int, int], seed: int) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(seed)
    bound = 1 / np.sqrt(shape[1])
    weights = torch.empty(shape, dtype=torch.bfloat16).uniform_(-bound, bound).float().numpy()
    check(tmp_path, weights, ["AT-INIT(kaiming-uniform-bf16)"])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_torch_linear_itself_is_at_init(tmp_path, seed: int) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(seed)
    weights = torch.nn.Linear(1536, 512, bias=False).weight.detach().numpy()
    check(tmp_path, weights, AT_INIT)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("case", ["fresh kaiming-uniform", "one block", "N(0, 0.004)", "fresh normal-0.02"])
def test_labels_at_full_width(tmp_path, case: str, seed: int) -> None:
    make, labels = TABLE[case]
    check(tmp_path, make(KIMI, seed), labels)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reported_drafter_at_full_width(tmp_path, seed: int) -> None:
    found = inspect_checkpoint(save_fc(tmp_path, moved(KIMI, seed)))
    assert found.verdict.labels == ["MOVED-FROM-INIT(0.227)"]
    assert found.pooled.std == pytest.approx(0.004037, abs=5e-7)
    assert found.pooled.kurtosis == pytest.approx(-1.0857, abs=1e-3)
    assert found.judgement.outside.total / found.pooled.n == pytest.approx(0.0521, abs=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_partly_trained_at_full_width(tmp_path, axis: str, seed: int) -> None:
    items = rows_of(KIMI) if axis == "rows" else columns_of(KIMI)
    make = changed(lambda s: (items, slice(None)) if axis == "rows" else (slice(None), items))
    found = inspect_checkpoint(save_fc(tmp_path, make(KIMI, seed)))
    assert found.verdict.labels == [f"PARTLY-TRAINED({axis}: {len(items)} of {KIMI[axis == 'columns']})"]
    assert found.verdict.where[axis] == items


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_native_draw_at_full_width(tmp_path, seed: int) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(seed)
    bound = 1 / np.sqrt(KIMI[1])
    weights = torch.empty(KIMI, dtype=torch.bfloat16).uniform_(-bound, bound).float().numpy()
    found = check(tmp_path, weights, ["AT-INIT(kaiming-uniform-bf16)"])
    assert found.pooled.mean == pytest.approx(-2.9e-5, rel=0.06)
