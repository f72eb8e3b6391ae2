"""Compare a doctor's report with the `expected` of a case. No rule about drafters in here: only the format's own words.

Facts may be told in any wording, so a fact holds when its numbers and names are in the finding. Truth values count only
where the finding has evidence under the same name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

SEVERITY = {"warn": "warning", "error": "error", "info": "info", "pass": "pass"}
TOLD_ABOUT_OTHERS = {
    *("findings", "exit_code", "may_say", "note", "predicts", "measured", "engine_symptom", "runner_today"),
    *("library_today", "source", "must_say", "must_not", "must_not_print", "must_not_be", "must_not_say"),
    *("same_tensors_as", "otherwise", "under_other_policy", "must_not_mix", "our_writer", "not_supervised"),
}
"""Keys of `expected` that are not values to compute (tests/cases/data/README.md)."""
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w])")
_NAME = re.compile(r"[A-Za-z_][\w.\-]*[\d_.\-][\w.\-]*[\w]|[A-Z][A-Z0-9]{2,}")


class Told:
    """Everything that one or more findings say: numbers, text, evidence by name."""

    def __init__(self, findings: list[dict[str, Any]]) -> None:
        self.text = " ".join(json.dumps(f, ensure_ascii=False) for f in findings).lower().replace("×", "x")
        self.numbers = {float(n) for n in _NUMBER.findall(self.text)}
        self.evidence: dict[str, list[Any]] = {}
        for finding in findings:
            for name, value in finding["evidence"].items():
                self.evidence.setdefault(name, []).append(value)

    def holds(self, name: str, value: Any) -> bool:
        """Whether every number and name of `value` is told."""
        if isinstance(value, bool) or value is None:
            return name not in self.evidence or value in self.evidence[name]
        return all(self._has(leaf) for leaf in leaves(value))

    def _has(self, leaf: Any) -> bool:
        if isinstance(leaf, (int, float)):
            digits = len(repr(leaf).partition(".")[2]) if isinstance(leaf, float) and "e" not in repr(leaf) else 9
            slack = 0.5 * 10.0**-digits * 1.0001 if isinstance(leaf, float) else 1e-9
            return any(abs(leaf - number) <= max(slack, abs(leaf) * 1e-9) for number in self.numbers)
        text = str(leaf).lower()
        if " " not in text:
            return text in self.text or text.strip(".*") in self.text
        names = [n.lower() for n in _NAME.findall(str(leaf))]
        numbers = [float(n) for n in _NUMBER.findall(str(leaf))]
        return all(n in self.text for n in names) and all(any(abs(n - m) < 1e-9 for m in self.numbers) for n in numbers)


def leaves(value: Any) -> Iterator[Any]:
    """Numbers and texts of a nested value; keys count when they are names (not plain labels)."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not re.fullmatch(r"[A-Za-z_]\w*|[\w ]+", str(key)):
                yield str(key)
            yield from leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item)
    elif value is not None and not isinstance(value, bool):
        yield value


def complaints(case: dict[str, Any], report: dict[str, Any], exit_code: int, printed: str) -> list[str]:
    """Everything in which the report differs from the case; empty when the case passes."""
    expected, findings = case["expected"], report["findings"]
    allowed = {SEVERITY[case["severity"]], *(SEVERITY[s] for s in case.get("also_ok", []))}
    found: list[str] = []
    rank = ["error", "warning", "info", "pass"]
    worst = min((f["severity"] for f in findings), key=rank.index, default="pass")
    # an info beside a pass says nothing against the input
    seen = {worst, "pass"} if worst == "info" else {worst}
    if not seen & allowed:
        found.append(f"worst severity is {worst}, expected {sorted(allowed)}")
    for wanted in expected.get("findings", []):
        severities = {SEVERITY[wanted["severity"]], *allowed} - {"pass"}
        if "pass" in allowed and worst in ("info", "pass"):
            continue
        candidates = [f for f in findings if f["severity"] in severities]
        facts = wanted.get("facts", {})
        if not any(all(Told([f]).holds(k, v) for k, v in facts.items()) for f in candidates):
            misses = [[k for k, v in facts.items() if not Told([f]).holds(k, v)] for f in candidates]
            found.append(f"no {sorted(severities)} finding about {wanted['about']!r} with {facts} (missing: {misses})")
    told = Told(findings)
    for key, value in expected.items():
        if key not in TOLD_ABOUT_OTHERS and not told.holds(key, value):
            found.append(f"{key}: {value} is not told")
    found += _rules(case, expected, findings, printed)
    if "exit_code" in expected and expected["exit_code"] != exit_code:
        found.append(f"exit code {exit_code}, expected {expected['exit_code']}")
    if exit_code != int(any(f["severity"] == "error" for f in findings)):
        found.append(f"exit code {exit_code} does not follow from the findings")
    return found


def _rules(case: dict[str, Any], expected: dict[str, Any], findings: list[dict[str, Any]], printed: str) -> list[str]:
    found: list[str] = []
    severities = [f["severity"] for f in findings]
    if case.get("false_positive_trap") and "error" in severities:
        found.append("an error on a trap")
    text = " ".join(f["message"] for f in findings).replace("×", "x")
    for phrase in expected.get("must_say", []):
        if not Told(findings).holds("must_say", phrase):
            found.append(f"does not say {phrase!r}")
    rules = expected.get("must_not", [])
    for rule in [rules] if isinstance(rules, str) else rules:
        if SEVERITY.get(rule) in severities:
            found.append(f"must not give {rule}")
        elif rule not in SEVERITY and any(rule in f["fix"] for f in findings):
            found.append(f"must not advise {rule!r}")
    for token in expected.get("must_not_print", []):
        if re.search(rf"(?<![\w.]){re.escape(token)}(?![\w.])", text):
            found.append(f"prints {token}")
    if expected.get("must_not_say") and expected["must_not_say"].lower() in printed.lower():
        found.append(f"says {expected['must_not_say']!r}")
    for name, value in (expected.get("must_not_be") or {}).items():
        if any(value in values for key, values in Told(findings).evidence.items() if key == name):
            found.append(f"{name} is {value}")
    return found
