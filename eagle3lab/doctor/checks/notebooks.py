"""Notebooks that a runner executes: parameters, kernel, limits, and what really ran.

`notebook_findings` is all of it for one notebook; CI uses the same checks on this repository's own.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.findings import Finding, error, info, warning
from eagle3lab.doctor.notebook import Cell, Notebook, names_of, notebook_of, parse
from eagle3lab.doctor.notebook_fate import Fate, fate_of
from eagle3lab.doctor.notebook_parameters import Parameter, parameters_of
from eagle3lab.doctor.notebook_values import printed, seconds_of
from eagle3lab.doctor.registry import check
from eagle3lab.doctor.views import mapping, real

EVERYWHERE = "python3"
"""Kernel name that every installation of ipykernel provides."""


def each(facts: Facts) -> Iterator[tuple[str, Notebook]]:
    """(name or "", notebook) of the one fact `notebook` and of the many in `notebooks`."""
    if isinstance(facts.get("notebook"), Mapping):
        yield "", notebook_of(facts["notebook"])
    for name, raw in mapping(facts.get("notebooks")).items():
        yield str(name)[:200], notebook_of(raw)


def named(name: str, finding: Finding) -> Finding:
    """The finding with the notebook's name in front, when there are several."""
    if not name:
        return finding
    return dataclasses.replace(finding, message=f"{name}: {finding.message}", subject=name)


@check(
    code="notebook-parameters",
    title="parameters that take effect",
    reads=("notebook|notebooks",),
    also=("parameters",),
    rule="one cell is tagged parameters, it assigns every given name, nothing in it is computed from another, and no "
    "later cell sets a parameter again",
    fix="tag the cell with the assignments: parameters",
    symptom="the run succeeds with the old values",
)
def parameters(facts: Facts) -> Iterator[Finding]:
    """What the runner was given against what the notebook declares."""
    for name, notebook in each(facts):
        for finding in _parameters(notebook, _given(facts, notebook)):
            # of a copy that was executed only what is wrong is told: nobody asked what takes effect
            if finding.severity != "info" or facts.has("parameters"):
                yield named(name, finding)


def _given(facts: Facts, notebook: Notebook) -> Mapping[str, Any]:
    """What a runner was told, else what papermill noted in the copy that it executed."""
    return mapping(facts["parameters"]) if facts.has("parameters") else notebook.injected


def _parameters(notebook: Notebook, given: Mapping[str, Any]) -> Iterator[Finding]:
    tagged = notebook.tagged("parameters")
    if len(tagged) > 1:
        cells = [cell.number for cell in tagged]
        yield error("parameters", f"{len(tagged)} cells are tagged parameters: {cells}", actual=cells,
                    fix="tag one cell only: a runner takes the first")  # fmt: skip
    if not tagged and (
        texts := [cell.number for cell in notebook.cells if not cell.code and "parameters" in cell.tags]
    ):
        text = f"the tag parameters stands on text cell {texts[0]}: what the notebook assigns below it stays as it is"
        yield warning("parameters", text, actual=texts, fix="tag the code cell with the assignments")
    if tagged and notebook.python and (why := _unreadable(tagged[0])):
        text = f"cell {tagged[0].number}, tagged parameters, is no Python: {why}"
        yield error("parameters", text, actual=why, fix="correct the cell", cell=tagged[0].number)
        return
    would = {"wanted_output": "\n".join(printed(notebook, given))} if given else {}
    if not tagged:
        yield from _untagged(notebook, given, would)
        return
    declared = {p.name: p for cell in tagged[:1] for p in parameters_of(cell)}
    fates = {name: fate_of(notebook, name) for name in declared if name in given or not given}
    findings = [_unknown(str(key), declared) for key in given if key not in declared]
    findings += [wrong for key, value in given.items() if key in declared and (wrong := _type(declared[key], value))]
    findings += [_derived(p, derived) for p in declared.values() if (derived := _stale(p, declared, given))]
    findings += [again for name, fate in fates.items() if (again := _overwritten(name, fate, given))]
    for finding in findings:
        yield dataclasses.replace(finding, evidence={**finding.evidence, **would})
    if given and not findings:
        yield from _effective(given, fates, would)


def _unreadable(cell: Cell) -> str | None:
    """Why a cell cannot be read as Python, None when it can or when it holds magics."""
    if parse(cell.source) is not None or any(mark in cell.source for mark in "%!?"):
        return None
    try:
        ast.parse(cell.source)
    except SyntaxError as problem:
        return f"{problem.msg} (line {problem.lineno})"
    except (ValueError, RecursionError, MemoryError) as problem:
        return str(problem)[:80]
    return None


def _effective(given: Mapping[str, Any], fates: Mapping[str, Fate], would: Mapping[str, Any]) -> Iterator[Finding]:
    """Which of the given values take effect, and of which that is not certain."""
    open_ = [str(name) for name in given if fates[name].kind == "may"]
    for name in open_:
        fate = fates[name]
        text = f"cell {fate.cell} may set {name} again ({fate.line[:60]}): whether the given value takes effect is open"
        yield info(name, text, actual=fate.line[:60], cell=fate.cell, **would)
    sure = [str(name) for name in given if name not in open_]
    if sure:
        yield info("parameters", f"{', '.join(sure)} {'take' if len(sure) > 1 else 'takes'} effect", **would)


def _untagged(notebook: Notebook, given: Mapping[str, Any], would: Mapping[str, Any]) -> Iterator[Finding]:
    """A runner injects at the top: what the notebook assigns itself wins, what it only reads takes effect."""
    names = list(map(str, given))
    lost = [name for name in names if fate_of(notebook, name).kind == "set" or not _named(notebook, name)]
    rest = [name for name in names if name not in lost]
    if lost:
        unread = any(fate_of(notebook, name).kind != "set" for name in lost)
        what = "and overwritten or never read" if unread else "and then overwritten"
        text = f"no cell is tagged parameters: {', '.join(lost)} is injected at the top {what}"
        yield error("parameters", text, actual=None, given=names, lost=lost, **would)
    elif rest:
        text = f"no cell is tagged parameters: {', '.join(rest)} is injected at the top"
        yield warning("parameters", text, actual=None, given=names, **would)


def _named(notebook: Notebook, name: str) -> bool:
    """Whether a cell beside the injected one names it, or can not be read."""
    trees = [parse(cell.source) for cell in notebook.code if "injected-parameters" not in cell.tags]
    return any(tree is None or name in names_of(tree) for tree in trees)


def _stale(parameter: Parameter, declared: Mapping[str, Parameter], given: Mapping[str, Any]) -> list[str]:
    """Names that this value is computed from and that a runner replaces behind it; without a run, all of them.

    A derived value that is itself given is not stale.
    """
    names = [name for name in parameter.needs if name in declared]
    if not given:
        return names
    below = [name for name in names if name in given or _stale(declared[name], _before(name, declared), given)]
    return [] if parameter.name in given else below


def _overwritten(name: str, fate: Fate, given: Mapping[str, Any]) -> Finding | None:
    """A parameter that a later cell sets before anything uses it: an error when it is given, a trap when none is."""
    if fate.kind != "set":
        return None
    try:
        if name in given and fate.value is not None and ast.literal_eval(fate.value) == given[name]:
            return None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        pass  # computed: it is not known to be the same
    told, said = (error, "the given value is") if name in given else (warning, "a given value would be")
    text = f"cell {fate.cell} sets {name} again ({fate.line[:60]}): {said} overwritten"
    fix = "take that line out, or give it another name"
    return told(name, text, actual=fate.line[:60], fix=fix, cell=fate.cell)


def _before(name: str, declared: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """The parameters that stand above this one: a value can only be computed from those."""
    keys = list(declared)
    return {key: declared[key] for key in keys[: keys.index(name)]}


def _unknown(key: str, declared: Mapping[str, Parameter]) -> Finding:
    close = nearest(key, list(declared))
    hint = f"did you mean {close}?" if close else f"known: {', '.join(declared)}"
    text = f"{key[:80]} is not a parameter; {hint}"
    fix = f"-p {close} VALUE" if close else "assign it in the parameters cell"
    return error("parameters", text, actual=key[:80], fix=fix, known=list(declared), nearest=close)


def nearest(name: str, known: list[str]) -> str | None:
    """Closest known name: similar letters, else the initials or a subsequence of it (`learning_rate`: `lr`)."""
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    if close:
        return close[0]
    initials = "".join(word[:1] for word in name.lower().split("_"))
    for other in known:
        pair = sorted((name.lower(), other.lower()), key=len)
        if other.lower() == initials or "".join(w[:1] for w in other.lower().split("_")) == name.lower():
            return other
        letters = iter(pair[1])
        if len(pair[0]) >= 2 and pair[1].startswith(pair[0][0]) and all(letter in letters for letter in pair[0]):
            return other
    return next(iter(difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)), None)


_ACCEPTS = {"float": (float, int), "int": (int,), "str": (str,), "bool": (bool,), "list": (list,), "dict": (dict,)}


def _type(parameter: Parameter, value: Any) -> Finding | None:
    """A value that the declared type does not take; a runner hands it over unchecked."""
    if parameter.kind is None:
        return None
    options = _options(parameter.kind)
    known = [option for option in options if option in _ACCEPTS]
    if len(known) + options.count("none") != len(options) or not known:
        return None
    if not parameter.hinted and {"int", "float"} & set(known):
        known = ["int", "float"]  # a default of 0 says "number", not "whole number"
    if value is None:
        fits = "none" in options or not parameter.hinted
    else:
        fits = any(isinstance(value, _ACCEPTS[o]) and (o == "bool" or not isinstance(value, bool)) for o in known)
    if fits:
        return None
    given, needed = type(value).__name__, " | ".join(known)
    text = f"{parameter.name} is given as {given} {str(value)[:40]!r}, needed {needed}"
    return error(parameter.name, text, actual=str(value)[:40], fix=f"give {needed}", given=given, needed=needed)


def _options(hint: str) -> list[str]:
    """Names of the types that a hint takes: "none" for None, what stands in Optional, Union and Annotated."""
    try:
        return _alternatives(ast.parse(hint.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [hint]


def _alternatives(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant):  # a hint may be quoted
        return _options(node.value) if isinstance(node.value, str) else ["none"] if node.value is None else ["?"]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _alternatives(node.left) + _alternatives(node.right)
    if isinstance(node, ast.Subscript):
        inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        base = ast.unparse(node.value).rpartition(".")[2]
        if base in ("Optional", "Union"):
            found = [name for item in inside for name in _alternatives(item)]
            return [*found, "none"] if base == "Optional" else found
        if base in ("Annotated", "Final"):
            return _alternatives(inside[0])
        return [base.lower() if base in ("List", "Dict") else base]
    name = ast.unparse(node)
    return [name.rpartition(".")[2].lower() if name.endswith(("List", "Dict")) else name]


def _derived(parameter: Parameter, sources: list[str]) -> Finding:
    text = f"{parameter.name} is computed from {', '.join(sources)} in the parameters cell: it keeps the old value"
    return warning(parameter.name, text, fix="move it to the next cell", move_to="the next cell", sources=sources)


@check(
    code="notebook-kernel",
    title="kernel named in the notebook",
    reads=("notebook|notebooks",),
    also=("installed_kernels",),
    rule=f"every notebook names the kernel {EVERYWHERE}, which every installation has",
    fix=f"set kernelspec.name to {EVERYWHERE}",
    symptom="green in one runner, refused by another",
)
def kernel(facts: Facts) -> Iterator[Finding]:
    """A missing kernelspec, or a kernel of another machine."""
    installed = facts.get("installed_kernels")
    installed = [str(item) for item in installed] if isinstance(installed, list) else None
    for name, notebook in each(facts):
        if notebook.kernel is None:
            text = "no kernelspec: one runner passes it (nbmake), the other refuses it (papermill)"
            yield named(name, error("kernelspec", text, actual=None, fix=f"kernelspec.name {EVERYWHERE}"))
        elif installed is not None and notebook.kernel not in installed:
            suggest = EVERYWHERE if EVERYWHERE in installed else (installed or [EVERYWHERE])[0]
            text = f"kernel {notebook.kernel[:80]} is not installed; use {suggest}"
            finding = warning("kernelspec", text, actual=notebook.kernel[:80], installed=installed[:20],
                              suggest=suggest, fix=f"set kernelspec.name to {suggest}")  # fmt: skip
            yield named(name, finding)
        elif installed is None and notebook.kernel != EVERYWHERE:
            text = f"kernel {notebook.kernel[:80]} exists on some machines only"
            yield named(name, warning("kernelspec", text, actual=notebook.kernel[:80]))


DEFAULT_LIMIT = {
    "nbmake": 300.0,
    "papermill": None,
    "nbconvert": None,
    "jupyter execute": None,
    "nbclient": None,
}
"""Seconds a cell that a runner allows when nothing is said; None is no limit. The last: others are built on it."""
_OTHERS = ("nbval", "testbook", "jupytext", "ploomber")
"""Runners with limits of their own that are not known here."""


@check(
    code="notebook-limits",
    title="time limit and permission to fail",
    reads=("notebook|notebooks",),
    also=("limit_s", "runner", "used_as", "parameters"),
    rule="limits come from the command line; a notebook that is a test may not excuse its own errors",
    fix="remove metadata.execution from the notebook",
    symptom="a test that cannot fail, or one that hangs for an hour",
)
def limits(facts: Facts) -> Iterator[Finding]:
    """What is in force, and where it comes from."""
    said = " ".join(str(facts.get("runner") or "").lower().replace("jupyter-", "jupyter ").split())
    runner = next((known for known in (*_OTHERS, *DEFAULT_LIMIT) if known in said), "")
    for name, notebook in each(facts):
        given = _given(facts, notebook) if runner in ("", "papermill", "ploomber") else {}  # others inject none
        for finding in _permissions(notebook, runner, str(facts.get("used_as") or "")):
            yield named(name, finding)
        for finding in _limits(notebook, real(facts.get("limit_s")), runner, given):
            yield named(name, finding)


def _permissions(notebook: Notebook, runner: str, used_as: str) -> Iterator[Finding]:
    test = used_as == "test"
    if notebook.execution.get("allow_errors"):
        if not _reads_metadata(runner):
            yield info("allow_errors", f"execution.allow_errors is true: {runner} does not read it", actual=True)
        else:
            told = error if test else warning
            text = "execution.allow_errors is true" + (" in a test notebook" if test else ": a failing cell looks fine")
            yield told("allow_errors", text, actual=True)
    if test and runner != "papermill":  # which fails on any error that it finds in the outputs
        excused = [c.number for c in notebook.code if "raises-exception" in c.tags and not (c.empty or c.skipped)]
        if excused:
            which = f"cell {excused[0]} is" if len(excused) == 1 else f"cells {', '.join(map(str, excused[:5]))} are"
            text = f"{which} tagged raises-exception in a test notebook: its errors pass"
            fix = "take the tag away, and catch the error that is meant: try, except"
            yield error("raises-exception", text, actual=excused, fix=fix, cells=excused)


def _reads_metadata(runner: str) -> bool:
    """Whether the notebook's own `metadata.execution` counts: nbmake alone reads it; an unnamed runner may be it."""
    return runner in ("", "nbmake")


def _bound(seconds: float | None) -> float | None:
    """A limit as a runner takes it: 0 and below are no limit."""
    return seconds if seconds is not None and seconds > 0 else None


def _limits(notebook: Notebook, flag: float | None, runner: str, given: Mapping[str, Any]) -> Iterator[Finding]:
    default = DEFAULT_LIMIT.get(runner)
    stated = notebook.sets_timeout and _reads_metadata(runner)
    effective = _bound(notebook.timeout) if stated else _bound(flag) if flag is not None else default
    limit = "no limit" if effective is None else f"limit {effective:g} s"
    numbers: dict[str, Any] = {"effective_limit_s": effective, "default_s": default}
    if notebook.sets_timeout:
        numbers["metadata"] = notebook.timeout
    ignored = f"; {runner} does not read execution.timeout" if notebook.sets_timeout and not stated else ""
    if stated and (flag is None or effective != _bound(flag)):
        over = "no flag is given" if flag is None else f"the flag says {flag:g} s" if flag > 0 else "the flag sets none"
        yield warning("execution.timeout", f"{limit} comes from the notebook, {over}", actual=notebook.timeout,
                      flag=flag, origin="notebook metadata", **numbers)  # fmt: skip
    elif runner in DEFAULT_LIMIT and flag is not None:
        text = f"{limit} comes from the command line{ignored}"
        yield info("limit", text, actual=flag, origin="command line", flag=flag, **numbers)
    elif runner in DEFAULT_LIMIT:
        text = f"{limit} is the default of {runner}{ignored}"
        yield info("limit", text, origin="default of the runner", **numbers)
    if effective is not None:
        yield from _too_long(notebook, effective, given)


def _too_long(notebook: Notebook, limit: float, given: Mapping[str, Any]) -> Iterator[Finding]:
    for cell, sleeps in zip(notebook.code, seconds_of(notebook, given), strict=True):
        seconds = cell.seconds if cell.seconds is not None else sleeps
        if seconds > limit and not cell.skipped:
            count = len(notebook.code)
            took = f"{seconds:g} s" if math.isfinite(seconds) else "it never ends"
            text = f"cell {cell.number} of {count} ran past {limit:g} s ({took})"
            yield error("limit", text, actual=seconds, fix="raise the limit, or do less in the cell",
                        timed_out_cell=cell.number, of=count, status="timeout", limit_s=limit)  # fmt: skip
            return
