"""More neighbours, for checks whose cases show only one side: numbers, logs, states, notebooks."""

from __future__ import annotations

from typing import Any

from .pairs import Pair

KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
VIEW = {"application/vnd.jupyter.widget-view+json": {"model_id": "m1"}}
WIDGETS = {"application/vnd.jupyter.widget-state+json": {"state": {"m1": {"state": {}}}}}
SETTINGS = "server_args=ServerArgs(model_path='T', speculative_algorithm='{}', speculative_draft_model_path='D')"


def notebook(*outputs: Any, count: int | None = 1, **metadata: Any) -> dict[str, Any]:
    cells = [{"source": "x", "execution_count": count, "outputs": list(outputs)}]
    return {"notebook": {"metadata": {**KERNEL, **metadata}, "cells": cells}}


def compared(**second: Any) -> dict[str, Any]:
    first = {"accept_length": 2.9, "temperature": 0.0, "dataset": "chat"}
    return {"a": first, "b": {**first, "accept_length": 2.4, **second}}


def answer(correct: int) -> dict[str, Any]:
    return {
        "completion_tokens": 11 + correct,
        "spec_verify_ct": 10,
        "spec_num_correct_drafts": correct,
        "spec_num_proposed_drafts": 30,
        "spec_correct_drafts_histogram": [10 - correct, correct],
    }


def losses(values: list[float]) -> list[dict[str, Any]]:
    return [{"step": step, "loss": loss} for step, loss in enumerate(values)]


REPORT = {
    "accept_length": 1.5,
    "counts": {"verify_steps": 10, "proposed": 30, "accepted": 5, "histogram": [5, 5, 0, 0]},
}
TOKENS = [[1, 2, 3, 4], [5, 6, 7, 1]]

MORE: dict[str, Pair] = {
    "accept-comparable": ("", compared(temperature=0.7), compared()),
    "accept-counters": (
        "",
        {"drafts": 10, "drafted": 30, "accepted": 31},
        {"drafts": 10, "drafted": 30, "accepted": 29},
    ),
    "accept-joint-rates": ("", {"joint_rates": [[0.5, 0.7]]}, {"joint_rates": [[0.7, 0.5]]}),
    "accept-tree": (
        "",
        {"steps": 4, "topk": 2, "draft_tokens": 9, "verify_steps": 10, "correct_drafts": 12},
        {"steps": 4, "topk": 1, "draft_tokens": 5, "verify_steps": 10, "correct_drafts": 12},
    ),
    "draft-tokens": (
        "",
        {"steps": 5, "topk": 1, "draft_tokens": 5},
        {"steps": 5, "topk": 1, "draft_tokens": 6},
    ),
    "file-header-plan": (
        "",
        {"plan": {"tensors": 2_000_000, "header_bytes_per_tensor": 80.0}},
        {"plan": {"tensors": 2_000, "header_bytes_per_tensor": 80.0}},
    ),
    "log-acceptance": (
        "",
        {"log": "Decode batch, #running-req: 1, accept len: 1.00, accept rate: 0.00"},
        {"log": "Decode batch, #running-req: 1, accept len: 2.61, accept rate: 0.54"},
    ),
    "log-algorithm": (
        "",
        {"log": SETTINGS.format("EAGLE"), "draft_config": {"architectures": ["LlamaForCausalLMEagle3"]}},
        {"log": SETTINGS.format("EAGLE3"), "draft_config": {"architectures": ["LlamaForCausalLMEagle3"]}},
    ),
    "mask-gradient": (
        "",
        {"grad_norm_by_place": {"first boundary": 0.0, "stale right edge": 0.2}},
        {"grad_norm_by_place": {"first boundary": 0.2, "stale right edge": 0.0}},
    ),
    "mask-share": ("", {"samples_supervised_tokens": [4, 0]}, {"samples_supervised_tokens": [4, 5]}),
    "notebook-ran": ("", notebook(count=None, papermill={"status": "completed"}), notebook()),
    "notebook-widgets": (
        "",
        notebook({"output_type": "display_data", "data": VIEW}),
        notebook({"output_type": "display_data", "data": VIEW}, widgets=WIDGETS),
    ),
    "resume-losses": (
        "",
        {"losses_straight": [5.0, 4.0, 3.0], "losses_resumed": [5.0, 4.0, 3.5]},
        {"losses_straight": [5.0, 4.0, 3.0], "losses_resumed": [5.0, 4.0, 3.0]},
    ),
    "states-batch-1": (
        "",
        {"rows_compared": 2, "cosine_to_batch_1": [0.999, 0.5], "threshold": 0.99},
        {"rows_compared": 2, "cosine_to_batch_1": [0.999, 0.998], "threshold": 0.99},
    ),
    "states-generated-rows": (
        "sglang",
        {"prompt_tokens": 7, "completion_tokens": 4, "hidden_rows": 11},
        {"prompt_tokens": 7, "completion_tokens": 4, "hidden_rows": 10},
    ),
    "states-overflow": (
        "",
        {"dtype_before": "F32", "value": 80000.0, "dtype_after": "F16"},
        {"dtype_before": "F32", "value": 60000.0, "dtype_after": "F16"},
    ),
    "states-swapped": (
        "",
        {
            "head": "identity 8 x 8",
            "tokens": [[1, 2, 3, 4], [5, 6, 7, 1]],
            "state_rows_argmax": [[6, 7, 1, 0], [2, 3, 4, 0]],
        },
        {
            "head": "identity 8 x 8",
            "tokens": [[1, 2, 3, 4], [5, 6, 7, 1]],
            "state_rows_argmax": [[2, 3, 4, 0], [6, 7, 1, 0]],
        },
    ),
    "accept-prefix": ("", {"acceptance_vector": [1, 2, 0]}, {"acceptance_vector": [1, 1, 0]}),
    "accept-answers": ("", {"answers": [answer(0), answer(0)]}, {"answers": [answer(9), answer(9)]}),
    "accept-report": ("", {"acceptance": {**REPORT, "accept_length": 2.9}}, {"acceptance": REPORT}),
    "corpus-rows": (
        "",
        {"corpus": {"samples": 9, "empty_reply_count": 3, "empty_reply": [4]}},
        {"corpus": {"samples": 9, "empty_reply_count": 0}},
    ),
    "corpus-template": (
        "",
        {"corpus": {"tokenizer": {"template": "kimi"}, "templates": {"chatml": 12}}},
        {"corpus": {"tokenizer": {"template": "chatml"}, "templates": {"chatml": 12}}},
    ),
    "log-weights": (
        "",
        {"log": "Parameter model.foo.weight not found in params_dict"},
        {"log": "Load weight end. avail mem=1.00 GB"},
    ),
    "loss-average": (
        "",
        {"loss_over_all_positions": 0.5, "loss_over_masked_positions": 2.5},
        {"loss_over_all_positions": 2.5, "loss_over_masked_positions": 2.5},
    ),
    "run-curve": ("", {"curve": losses([5.0] * 12)}, {"curve": losses([5.0 - 0.2 * i for i in range(12)])}),
    "run-fc": (
        "",
        {"fc_trajectory": [{"step": 0, "std": 0.01}, {"step": 50, "std": 0.01, "moved": 0.0}]},
        {"fc_trajectory": [{"step": 0, "std": 0.01}, {"step": 50, "std": 0.011, "moved": 0.2}]},
    ),
    "run-status": (
        "",
        {"status": {"notebooks": {"03": {"status": "dead", "failing_cell": 4, "cells": 9}}}},
        {"status": {"notebooks": {"03": {"status": "ok"}}}},
    ),
    "server-speculation": (
        "",
        {"server": {"engine": "sglang", "speculating": False}},
        {"server": {"engine": "sglang", "speculating": True, "algorithm": "EAGLE3"}},
    ),
    "states-contents": (
        "",
        {"shard_states": {"states-00000": {"points": [2, 9], "block": 4, "repeated": [[3, 4]]}}},
        {"shard_states": {"states-00000": {"points": [2, 9], "block": 4, "repeated": []}}},
    ),
    "states-layout": (
        "",
        {"shards": [{"name": "s0", "tokens": 90}], "states": {"shards": [{"name": "s0", "tokens": 91}]}},
        {"shards": [{"name": "s0", "tokens": 91}], "states": {"shards": [{"name": "s0", "tokens": 91}]}},
    ),
    "states-norm": (
        "",
        {"state_rows_argmax": [], "states": {"norm": {"rms": 3.0, "declared": "post_norm"}}},
        {"state_rows_argmax": [], "states": {"norm": {"rms": 1.01, "declared": "post_norm"}}},
    ),
}
