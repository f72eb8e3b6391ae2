"""A forward hook inside SGLang that notes every verify pass: what the drafter proposed, and what the target answered.

Factory `sglang_steps:create`, for the module `logits_processor`; the config names a file. One JSON line a request
and pass goes there: {"rid", "drafts": [k tokens], "choices": [k + 1 greedy tokens]}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

BATCH = 3
"""Place of the ForwardBatch among the positional arguments."""


def create(config: Mapping[str, Any]) -> Callable[..., None]:
    """Hook factory. config: `file`, where the lines go."""
    file = Path(config["file"])

    def note(module: Any, args: tuple[Any, ...], output: Any) -> None:
        batch = args[BATCH]
        if not batch.forward_mode.is_target_verify():
            return
        width = batch.spec_info.draft_token_num
        rows = batch.input_ids.view(-1, width).tolist()
        choices = output.next_token_logits.argmax(-1).view(-1, width).tolist()
        with file.open("a") as lines:
            for rid, row, chosen in zip(batch.rids, rows, choices, strict=True):
                # A row is the token that is certain already, then the drafts.
                lines.write(json.dumps({"rid": rid, "drafts": row[1:], "choices": chosen}) + "\n")

    return note
