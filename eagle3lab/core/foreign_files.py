"""What a file is that was taken for weights: told by its first bytes."""

from __future__ import annotations

import re
from codecs import BOM_UTF8

_MAGIC = {
    rb"\s*(?:<!doctype|<html|<head)": "an HTML page, so the download was refused",
    rb"\s*<(?:\?xml|error)": "an XML answer of a server, so the download was refused",
    rb'\s*\{\s*"(?:error|message|detail)': "an error message of a server",
    rb"/annex/objects/|\.\./\S*\.git/annex/": "a git-annex pointer, not the weights",
    rb"PK\x03\x04": "a zip, most often a PyTorch pickle",
    rb"\x80[\x02-\x05][^\x00]": "a pickle",
    rb"GGUF": "a GGUF file",
    rb"\x1f\x8b": "a gzip archive",
    rb"\x28\xb5\x2f\xfd": "a zstandard archive",
    rb"\xfd7zXZ\x00": "an xz archive",
    rb"\x93NUMPY": "a numpy array (.npy)",
    rb"\x89HDF\r\n": "an HDF5 file",
    rb"[\s\S]{257}ustar": "a tar archive",
    rb"[\t\n\r\x20-\x7e]{16}": "text, not tensors",
}
"""How other files begin, the surest first; a byte-order mark before text is passed over."""


def looks_like(start: bytes) -> str | None:
    """What a file is that begins so, when that can be told."""
    begin = start.removeprefix(BOM_UTF8)
    return next((what for magic, what in _MAGIC.items() if re.match(magic, begin, re.IGNORECASE)), None)
