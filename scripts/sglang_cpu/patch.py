"""Two small changes in a throw-away installation of SGLang 0.5.23, without which a CPU cannot draft, or not in time.

1. `kernels/ops/speculative/spec_tree.py` builds the draft tree with Triton kernels on XPU only; every other platform
   needs a compiled extension, and none is published for a CPU. The CPU takes XPU's way.
2. `torch_native` attention does not know the pass in which the target verifies drafts, so the target's 30 blocks would
   run in Triton's interpreter too: a minute for 24 tokens instead of seconds. In that pass `seq_lens` leaves the drafts
   out and the extend lengths are unset; they are filled in. Right for a chain (top-k 1), whose tree mask is causal.

The drafter's own attention stays SGLang's Triton kernels (`--speculative-draft-attention-backend triton`).
Run by scripts/install_sglang.sh with that installation's Python. Does nothing when the changes are there.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

LENGTHS = """            forward_batch.seq_lens,
            forward_batch.extend_prefix_lens,
            forward_batch.extend_seq_lens,
            forward_batch.encoder_lens,
"""
VERIFY = """            *(  # changed by eagle3lab: lengths of the pass that verifies a chain of drafts
                (
                    forward_batch.seq_lens + forward_batch.spec_info.draft_token_num,
                    forward_batch.seq_lens,
                    torch.full_like(forward_batch.seq_lens, forward_batch.spec_info.draft_token_num),
                )
                if forward_batch.forward_mode.is_target_verify()
                else (forward_batch.seq_lens, forward_batch.extend_prefix_lens, forward_batch.extend_seq_lens)
            ),
            forward_batch.encoder_lens,
"""
CHANGES = {
    "kernels/ops/speculative/spec_tree.py": (
        "_is_xpu = is_xpu()\n",
        "_is_xpu = True  # changed by eagle3lab: a CPU takes the Triton tree kernels\n",
    ),
    "srt/layers/attention/torch_native_backend.py": (LENGTHS, VERIFY),
}
"""File below the package -> (text that stands there once, text that takes its place)."""


def main() -> int:
    """0: changed or already changed; 1: these are not the files that the changes were written for."""
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:
        print("FAILED: sglang, it is not installed beside this interpreter")
        return 1
    for name, (before, after) in CHANGES.items():
        path = Path(found.origin).parent / name
        text = path.read_text() if path.exists() else ""
        if text.count(after) == 1:
            continue
        if text.count(before) != 1:
            print(f"FAILED: sglang, {name} does not hold the lines to change once; the change is for 0.5.23")
            return 1
        changed = path.with_name(path.name + ".changed")
        changed.write_text(text.replace(before, after))
        changed.replace(path)  # whole or not at all
    return 0


if __name__ == "__main__":
    sys.exit(main())
