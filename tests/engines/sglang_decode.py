"""Greedy decoding by SGLang on a CPU, in its own environment: python sglang_decode.py FOLDER

Reads FOLDER/request.json: target, draft (or null), algorithm (EAGLE3, EAGLE or null), k, prompts (token ids),
max_new_tokens. Writes FOLDER/answer.json: of each prompt its tokens, meta_info (acceptance counters and histogram), the
size of the text after every verify step, and what each step proposed. The drafter runs in Triton's interpreter; see
scripts/install_sglang.sh.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def options(request: dict) -> dict:
    """Engine arguments: plain decoding, or a chain of k drafts."""
    common = {
        "model_path": request["target"],
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "host": "127.0.0.1",
        "disable_overlap_schedule": True,
        "disable_radix_cache": True,
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.3,
        "max_total_tokens": 2048,
        "max_running_requests": 4,
        "skip_server_warmup": True,
        "random_seed": 0,
        "log_level": "warning",
    }
    if request["draft"] is None:
        return common
    return common | {
        "speculative_draft_attention_backend": "triton",
        "speculative_algorithm": request["algorithm"],
        "speculative_draft_model_path": request["draft"],
        "speculative_num_steps": request["k"],
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": request["k"] + 1,
    }


def record_steps(file: Path) -> list[dict]:
    """The hook of sglang_steps.py on the target's logits processor; the drafter's has no verify pass."""
    return [
        {
            "name": "verify-steps",
            "target_modules": ["logits_processor"],
            "hook_factory": "sglang_steps:create",
            "config": {"file": str(file)},
        }
    ]


def steps_of(file: Path, request: str) -> list[dict]:
    """Noted steps of one request."""
    noted = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [{"drafts": step["drafts"], "choices": step["choices"]} for step in noted if step["rid"] == request]


def main(folder: Path) -> None:
    """Answer one request file."""
    request = json.loads((folder / "request.json").read_text())
    if request["draft"] is not None:
        os.environ["TRITON_INTERPRET"] = "1"
    import sglang
    import torch

    arguments, noted = options(request), folder / "steps.jsonl"
    engine = sglang.Engine(**arguments, forward_hooks=record_steps(noted))
    answer = {
        "engine": "sglang",
        "version": sglang.__version__,
        "torch": torch.__version__,
        "options": arguments,
        "environment": {name: os.environ[name] for name in ("TRITON_INTERPRET",) if name in os.environ},
        "replies": [],
    }
    sampling = {"temperature": 0.0, "max_new_tokens": request["max_new_tokens"]}
    for number, ids in enumerate(request["prompts"]):
        started = time.monotonic()
        sizes, last = [], None
        for last in engine.generate(input_ids=ids, sampling_params=sampling, stream=True, rid=f"prompt-{number}"):
            sizes.append(last["meta_info"]["completion_tokens"])
        answer["replies"].append(
            {
                "tokens": list(last["output_ids"]),
                "meta_info": {k: v for k, v in last["meta_info"].items() if isinstance(v, int | float | str | list)},
                "sizes": sizes,
                "steps": steps_of(noted, f"prompt-{number}"),
                "seconds": round(time.monotonic() - started, 1),
            }
        )
        partial = folder / "answer.json.partial"
        partial.write_text(json.dumps(answer))
        print(f"prompt {len(answer['replies'])} of {len(request['prompts'])}: {sizes[-1]} tokens", flush=True)
    partial.replace(folder / "answer.json")
    engine.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
