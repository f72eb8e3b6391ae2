"""`--log FILE`: the text of a SGLang or vLLM server log; of a long one its first and last megabytes."""

from __future__ import annotations

from codecs import BOM_UTF16_LE
from pathlib import Path

from eagle3lab.doctor.facts import Facts
from eagle3lab.doctor.readers.bounded import TEXT_LIMIT, decoded, encoding_of
from eagle3lab.doctor.run import existing

HEAD = 4_000_000
"""Bytes read from the start, where settings and weights are logged; the rest of `TEXT_LIMIT` comes from the end."""


def read(value: str, facts: Facts) -> None:
    """Add the fact `log`. Bytes that are no letters are replaced: a log is read for its lines, not for its letters."""
    path = existing(value, "--log")
    if not path.is_file():
        facts.broken(str(path), "is not a regular file", fix="give --log the log file")
        return
    try:
        text = _text(path, facts)
    except OSError as error:
        facts.broken(str(path), f"cannot be read ({error.strerror or error})")
        return
    facts.put("log", text, str(path))
    if not text.strip():
        facts.could_not(f"{path.name}", "it is empty", fix="give --log a log with a request in it")


def _text(path: Path, facts: Facts) -> str:
    size = path.stat().st_size
    with path.open("rb") as handle:
        if size <= TEXT_LIMIT:
            return decoded(handle.read(TEXT_LIMIT))
        head = handle.read(HEAD)
        tail_bytes = TEXT_LIMIT - HEAD
        handle.seek(size - tail_bytes)
        tail = handle.read(tail_bytes)
    skipped = size - TEXT_LIMIT
    facts.could_not(f"{skipped} bytes in the middle of {path.name}", f"a log is read up to {TEXT_LIMIT} bytes")
    code = encoding_of(head)
    if code.startswith("utf-16"):  # the end begins at a whole unit, in the order of the start
        code, tail = f"utf-16-{'le' if head.startswith(BOM_UTF16_LE) else 'be'}", tail[(size - tail_bytes) % 2 :]
    return decoded(head) + "\n" + tail.decode(code, "replace").partition("\n")[2]
