"""Greedy decoding by vLLM on a CPU, in its own environment: python vllm_decode.py FOLDER

Reads FOLDER/request.json: target, draft (or null), k, prompts (token ids), max_new_tokens. Writes FOLDER/answer.json:
tokens of every prompt, every verify step as the scheduler saw it (drafts that were checked, tokens that came out), the
engine's own counters and versions. The engine core runs in this process, so no port is opened.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"


def record_steps(steps: dict[str, list[dict]]) -> None:
    """Have the scheduler note drafts and outcome of every verify step, per request."""
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.update_from_output

    def noting(self, scheduler_output, model_runner_output):
        for request, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            out = model_runner_output.sampled_token_ids[model_runner_output.req_id_to_index[request]]
            steps.setdefault(request, []).append({"drafts": [int(t) for t in drafts], "out": [int(t) for t in out]})
        return original(self, scheduler_output, model_runner_output)

    Scheduler.update_from_output = noting


def steps_of(steps: dict[str, list[dict]], request: str) -> list[dict]:
    """Steps of one request; inside, the engine may add a suffix to the id that it handed out."""
    return next((found for name, found in steps.items() if name == request or name.startswith(f"{request}-")), [])


def counters(llm) -> dict:
    """vLLM's own speculative counters: name -> value, or list of values by position."""
    found = {}
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            found[metric.name] = metric.values if hasattr(metric, "values") else metric.value
    return found


def main(folder: Path) -> None:
    """Answer one request file."""
    request = json.loads((folder / "request.json").read_text())
    steps: dict[str, list[dict]] = {}
    record_steps(steps)
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    speculation = None
    if request["draft"]:
        speculation = {"method": "eagle3", "model": request["draft"], "num_speculative_tokens": request["k"]}
    options = {
        "speculative_config": speculation,
        "dtype": "float32",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "max_model_len": request["max_model_len"],
        "max_num_seqs": request["max_num_seqs"],
        "seed": 0,
        "disable_log_stats": False,
    }
    llm = LLM(request["target"], **options)
    sampling = SamplingParams(temperature=0.0, max_tokens=request["max_new_tokens"])
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in request["prompts"]], sampling)
    answer = {
        "engine": "vllm-cpu",
        "version": vllm.__version__,
        "torch": torch.__version__,
        "options": options,
        "replies": [{"tokens": list(o.outputs[0].token_ids), "steps": steps_of(steps, o.request_id)} for o in outputs],
        "counters": counters(llm),
    }
    (folder / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
