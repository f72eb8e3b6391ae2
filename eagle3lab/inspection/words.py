"""What a bare `mean` and `std` of fc let one conclude, what they do not, and which measurement would decide.

    eagle3lab inspect --shape 7168x21504 --mean 0.0 --std 0.004037

No file is needed. Every number is arithmetic on the shape and the two values; nothing is assumed about the trainer.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np

from eagle3lab.core.errors import UsageError
from eagle3lab.inspection.families import Family, families
from eagle3lab.inspection.formats import grid
from eagle3lab.inspection.report import plain

SIX_DIGITS = 5.000001e-7
"""Half a unit of the last digit of 0.000000."""
NEAR = 0.40
"""A family is a candidate when its std is within this share of the reported one."""
LARGEST = 3.4028235e38
"""Of float32, which bf16's largest lies below."""
DRAWN_BY = {
    "kaiming-uniform": "torch nn.Linear (TorchSpec, EAGLE)",
    "normal-0.02": "transformers post_init (SpecForge, speculators)",
}
"""Family -> what draws fc from it (EAGLE cb7e084, TorchSpec 6dda2bf, SpecForge a6b6b02, speculators c05b95b)."""
AT_INIT = 1e-3
"""Relative distance of std to a family's below which nothing speaks against an untouched draw."""


@dataclass
class NumberPair:
    """The answer. `families`: name, std, ratio of the reported std to it, distance in standard errors."""

    shape: tuple[int, int]
    mean: float
    std: float
    rounding: float = 0.0
    families: list[dict[str, Any]] = field(default_factory=list)
    in_short: str = ""
    nearest: str | None = None
    update_ratio: float | None = None
    follows: list[str] = field(default_factory=list)
    does_not_follow: list[str] = field(default_factory=list)
    decides: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """Always 0: two numbers fail no gate."""
        return 0

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return plain(asdict(self))

    def as_text(self) -> str:
        """Prose for a terminal or a notebook."""
        rows, columns = self.shape
        lines = [f"fc {rows} x {columns} ({rows * columns:,} entries), mean {self.mean:g}, std {self.std:g}"]
        lines += [f"In short: {self.in_short}", ""]
        if self.families:
            lines += [f"  {'initial family':<17}{'std':>10}  {'reported / it':>13}  {'standard errors':>15}  drawn by"]
            lines += [
                f"  {f['name']:<17}{f['std']:>10.7f}  {f['ratio']:>13.5f}  {f['standard_errors']:>15,.0f}  "
                f"{DRAWN_BY.get(f['name'], 'no known trainer')}"
                for f in self.families
            ]
            lines += [""]
        for title, items in (
            ("What follows", self.follows), ("What does not follow", self.does_not_follow),
            ("What would decide", self.decides),
        ):  # fmt: skip
            lines += [title + ":", *(f"  - {item}" for item in items), ""]
        return "\n".join(lines).rstrip()


def parse_shape(text: str) -> tuple[int, int]:
    """`7168x21504` (also `7168,21504`) -> (7168, 21504): [out, in]."""
    found = re.fullmatch(r"\s*\[?\s*(\d+)\s*[xX×,]\s*(\d+)\s*\]?\s*", text)
    if not found or 0 in (shape := (int(found[1]), int(found[2]))):
        raise UsageError(f"--shape {text!r}", rule="rows x columns of fc", fix="--shape 7168x21504")
    return shape


def answer_number_pair(shape: tuple[int, int], mean: float | str, std: float | str) -> NumberPair:
    """Say what (mean, std) of an fc of `shape` [out, in] imply.

    Numbers given as text keep their number of digits: a difference within half a unit of the last one decides nothing.

    Raises:
        UsageError: text that is no number, a negative std, or more than a weight can hold.
    """
    mean, mean_rounding = _number("--mean", mean)
    std, rounding = _number("--std", std)
    answer = NumberPair(shape, mean, std, rounding)
    if math.isfinite(std) and std < 0:
        raise UsageError(f"--std {std:g}", rule="a standard deviation is not negative")
    if not (math.isfinite(std) and math.isfinite(mean)):
        answer.in_short = "fc is dead: it holds numbers that are not finite."
        answer.follows.append("DEAD: a mean or std that is not a finite number means that fc holds NaN or infinity.")
        answer.does_not_follow.append("how many entries are hit: one is enough to make both numbers NaN.")
        answer.decides.append("eagle3lab inspect CHECKPOINT counts them and names the first row and column.")
        return answer
    for flag, number in (("--mean", mean), ("--std", std)):
        if abs(number) > LARGEST:
            raise UsageError(f"{flag} {number:g}", rule=f"no float32 or bf16 weight is above {LARGEST:.3g}")
    if std == 0:
        answer.in_short = "fc is dead, or its std was printed with too few digits."
        answer.follows.append(f"DEAD: std 0 means that every entry is {mean:g}: fc passes on nothing of the states.")
        answer.does_not_follow.append("why: zeroed on purpose, never loaded, or printed with too few digits.")
        answer.decides.append("print std with %.3e, or eagle3lab inspect CHECKPOINT.")
        return answer
    known = [family for family in families(shape) if not family.native]
    n = shape[0] * shape[1]
    for family in known:
        raw4 = 1.8 if family.kind == "uniform" else 3.0
        se = family.std * math.sqrt((raw4 - 1) / (4 * n))
        answer.families.append({
            "name": family.name, "std": family.std, "ratio": std / family.std,
            "standard_errors": (std - family.std) / se, "std_se": se,
        })  # fmt: skip
    near = min(known, key=lambda family: abs(std / family.std - 1))
    _conclusions(answer, near, n, mean_rounding)
    return answer


def _number(flag: str, value: float | str) -> tuple[float, float]:
    """The number, and half a unit of the last digit that was written (0 for a float)."""
    if not isinstance(value, str):
        return float(value), 0.0
    try:
        number = float(value)
    except ValueError as error:
        raise UsageError(f"{flag} {value!r}", rule="a number, such as 0.004037") from error
    if not math.isfinite(number):
        return number, 0.0
    exponent = Decimal(value.strip().replace("_", "")).as_tuple().exponent
    return number, 0.5 * 10.0**exponent if isinstance(exponent, int) else 0.0


def _conclusions(answer: NumberPair, near: Family, n: int, mean_rounding: float) -> None:
    std, ratio = answer.std, answer.std / near.std
    mean_se = std / math.sqrt(n)
    answer.follows.append("not zero and not constant: std is above 0.")
    if abs(ratio - 1) > NEAR:
        closest = f"{near.name} ({near.std:.7f}, ratio {ratio:.3f})"
        answer.follows.append(f"no listed initial family is within {NEAR:.0%}; the nearest is {closest}.")
        answer.in_short = "not dead, and of no initial family that is listed; whether it was trained cannot be told."
        answer.does_not_follow.append("that it was trained: a draw of another scale prints the same pair.")
    else:
        answer.nearest = near.name
        se = next(f for f in answer.families if f["name"] == near.name)
        distance = f"{abs(ratio - 1):.2%} {'above' if ratio > 1 else 'below'} {near.name} ({near.std:.7f})"
        if _off_zero(answer, mean_se, mean_rounding) and abs(std - near.std) <= max(
            answer.rounding, AT_INIT * near.std
        ):
            answer.follows.append(f"std is {distance}; every family is drawn around 0, and the mean is not there.")
            answer.in_short = f"not dead, and not an untouched {near.name}: its mean is not 0."
        elif abs(std - near.std) <= answer.rounding and abs(ratio - 1) >= AT_INIT:
            answer.follows.append(
                f"std is {distance}, within the digits it was printed with (± {answer.rounding:.1e}): that decides "
                "nothing."
            )
            answer.in_short = f"not dead; std has too few digits to tell an untouched {near.name} from a trained fc."
        elif abs(ratio - 1) < AT_INIT:
            answer.follows.append(f"std is {distance}: what an untouched draw of that family would print.")
            answer.in_short = f"not dead, but these are the numbers of an untouched {near.name}: look into the file."
            hidden = math.sqrt((1 + AT_INIT) ** 2 - 1)
            answer.does_not_follow.append(
                f"that nothing was trained: an update below {hidden:.1%} of the initial RMS moves std by less than "
                f"{AT_INIT:.1%}."
            )
        else:
            answer.follows.append(
                f"std is {distance}, {abs(se['standard_errors']):,.0f} standard errors: not an untouched draw of it."
            )
            answer.in_short = (
                f"not dead, and not an untouched {near.name}: consistent with real training. Two numbers cannot say "
                "how well it was trained, nor that a server uses it."
            )
            _size(answer, near, ratio, n)
    answer.follows.append(_about_the_mean(answer, mean_se, mean_rounding))
    low, high = _bf16_neighbours(std)
    if min(std - low, high - std) > answer.rounding:
        around = f"neighbours {low:.7f} and {high:.7f}"
        answer.follows.append(f"the std was computed in float32 or better: {std:g} is no bfloat16 number ({around}).")
    if answer.nearest:
        answer.does_not_follow.append(
            f"that the initial family was {near.name}: a normal draw with std {std:g} prints the same pair."
        )
    answer.does_not_follow += [
        "that it is well trained, or that it helps: weights can show that something moved, acceptance on held-out "
        "prompts shows what it is worth.",
        "that a server uses it: with --speculative-algorithm EAGLE SGLang skips an EAGLE-3 fc without a word. "
        "eagle3lab doctor --draft DRAFT --target TARGET --launch '...' looks for such causes of zero acceptance.",
    ]
    if answer.update_ratio is not None and ratio > 1 and answer.shape[1] % 3 == 0:
        excess = ratio**2 - 1
        one, two = math.sqrt(1 + 3 * excess), math.sqrt(1 + 1.5 * excess)
        answer.does_not_follow.insert(
            0,
            f"which point blocks moved: one block alone (std ratios {one:.4f} / 1 / 1), two ({two:.4f} / {two:.4f} / "
            f"1) or all three ({ratio:.4f} each) give the same pooled std.",
        )
    _deciders(answer, near)


def _off_zero(answer: NumberPair, se: float, rounding: float) -> bool:
    """Whether the mean excludes an untouched draw, one made directly in bfloat16 included."""
    native = native_mean(answer.shape)
    beyond = max(6 * se, SIX_DIGITS) + rounding
    return abs(answer.mean) > beyond and abs(answer.mean - native) > beyond + 0.02 * abs(native)


def _about_the_mean(answer: NumberPair, se: float, rounding: float) -> str:
    native = native_mean(answer.shape)
    if abs(answer.mean) < SIX_DIGITS:
        shown = math.erf(SIX_DIGITS / (se * math.sqrt(2)))
        if shown < 0.05 and rounding > SIX_DIGITS:
            return f"the mean says nothing: its standard error is {se:.1e} and it was given as {answer.mean:g}."
        if shown < 0.05:
            return (
                f"the mean is closer to zero than chance: its standard error is {se:.1e}, {shown:.1%} of draws print "
                "0.000000. Is it the mean of this tensor?"
            )
        few = "Printed with six digits it" if rounding > SIX_DIGITS else "It"
        return (
            f"the mean says almost nothing: its standard error is {se:.1e}, and {shown:.0%} of untouched draws print "
            f"0.000000 too. {few} only speaks against a uniform drawn directly in bfloat16 on a CPU, whose mean is "
            f"{native:.1e}."
        )
    text = f"the mean is {abs(answer.mean) / se:,.1f} standard errors ({se:.1e}) from zero"
    if abs(answer.mean - native) < max(4 * se, 0.02 * abs(native)):
        return f"{text}; a uniform drawn in bfloat16 on a CPU has it there ({native:.2e})."
    return f"{text}."


def _size(answer: NumberPair, near: Family, ratio: float, n: int) -> None:
    if ratio < 1:
        answer.follows.append(
            "std below the initial one is evidence of change too: weight decay, averaging or a norm folded in shrink "
            "it."
        )
        return
    update = math.sqrt(answer.std**2 - near.std**2)
    answer.update_ratio = update / near.std
    answer.follows.append(
        f"if it started as {near.name} and the update is uncorrelated with the start (no weight decay), the update's "
        f"RMS is {update:.2e} = {answer.update_ratio:.1%} of the initial RMS, its norm {update * math.sqrt(n):.1f} "
        f"against {near.std * math.sqrt(n):.1f}, and cos(fc, its start) should be {1 / ratio:.3f}."
    )
    answer.follows.append(
        f"an Adam step moves an entry by about the learning rate at most: at a peak rate of 5e-5 that is at least "
        f"{math.ceil(update / 5e-5)} steps in one direction, about {(update / 5e-5) ** 2:,.0f} with independent signs."
    )


def _deciders(answer: NumberPair, near: Family) -> None:
    if near.kind == "uniform":
        g = grid("BF16")
        bound = near.largest(g)
        moved = ""
        if answer.update_ratio:
            p = near.cells(g.edges, tau=answer.update_ratio * near.std)
            share = float(p[np.abs(g.values) > bound].sum())
            raw = float((p * g.values**4).sum() / (p * g.values**2).sum() ** 2)
            moved = f", an update of this size puts {share:.2%} there (excess kurtosis {raw - 3:.3f} against -1.2)"
        answer.decides.append(
            f"the support: an untouched {near.name} in bfloat16 has no entry above {bound:.8f}{moved}. One entry above "
            "disproves an untouched draw."
        )
    answer.decides += [
        "excess kurtosis: -1.2 for a uniform start, 0 for a normal one: it tells the families apart where std cannot.",
        "std of each point block, row and column: it tells which parts moved.",
        "the checkpoint of step 0, or the same seed drawn again: the cosine to it gives the size without assumptions.",
        "eagle3lab inspect CHECKPOINT does these in seconds; --states D adds what fc does to real hidden states.",
    ]


def native_mean(shape: tuple[int, int]) -> float:
    """Mean of a uniform drawn in bfloat16 on a CPU (see `Family.native`)."""
    uniform = next(family for family in families(shape) if family.native)
    g = grid("BF16")
    return float((uniform.cells(g.edges) * g.values).sum())


def _bf16_neighbours(value: float) -> tuple[float, float]:
    values = grid("BF16").values
    i = int(np.searchsorted(values, value, side="right"))
    return float(values[i - 1]), float(values[min(i, len(values) - 1)])
