"""One changed line in a throw-away installation of SGLang 0.5.23: a CPU builds the draft tree with the Triton kernels.

`sglang/kernels/ops/speculative/spec_tree.py` takes its Triton kernels on XPU only; every other platform needs a
compiled extension, and none is published for a CPU. Run by scripts/install_sglang.sh with that installation's Python.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PLACE = "kernels/ops/speculative/spec_tree.py"
BEFORE = "_is_xpu = is_xpu()\n"
AFTER = "_is_xpu = True  # changed by eagle3lab: a CPU takes the Triton tree kernels\n"


def main() -> int:
    """0: changed or already changed; 3: this is not the file that the change was written for."""
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:
        print("NOT RUN: sglang, it is not installed beside this interpreter")
        return 3
    path = Path(found.origin).parent / PLACE
    text = path.read_text() if path.exists() else ""
    if text.count(AFTER) == 1:
        return 0
    if text.count(BEFORE) != 1:
        print(f"NOT RUN: sglang, {PLACE} does not hold the line {BEFORE.strip()!r} once; the change is for 0.5.23")
        return 3
    path.write_text(text.replace(BEFORE, AFTER))
    return 0


if __name__ == "__main__":
    sys.exit(main())
