"""Readers of real artefacts: bounded, hostile-safe, and producing only facts.

A reader is `read(value: str, facts: Facts) -> None`. It adds facts with `facts.put`, says what it could not look at
with `facts.could_not`, and reports damage with `facts.broken`. It never executes, unpickles or follows what it reads.
"""
