"""What notebooks say: blocks of fixed width are broken between words, never inside them."""

from __future__ import annotations

from eagle3lab.steps.show import fenced

TEXT = "head\n  - a long line of several words that goes on\n\n  name   1.02  704\nan-unbreakable-word-of-forty-letters"


def test_long_lines_are_broken_between_words_with_their_indent() -> None:
    lines = fenced(TEXT, width=24).splitlines()
    assert lines[0] == lines[-1] == "```" and lines[1] == "head"
    assert lines[2:5] == ["  - a long line of", "    several words that", "    goes on"]
    assert lines[5:8] == ["", "  name   1.02  704", "an-unbreakable-word-of-forty-letters"]


def test_no_word_is_lost() -> None:
    assert fenced(TEXT, width=20).strip("`").split() == TEXT.split()
