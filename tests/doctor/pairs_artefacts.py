"""The pairs of `pairs.py` for acceptance, logs and captured states."""

from __future__ import annotations

import json
from typing import Any

Pair = tuple[str, dict[str, Any], dict[str, Any]]

CAPTURE = ["--model-path", "T", "--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3"]
WHOLE = [*CAPTURE, "--disable-radix-cache", "--chunked-prefill-size=-1"]
CHUNK = "--chunked-prefill-size"
CHAIN = ["--speculative-num-steps=5", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens"]
ROWS = {"rows": 6, "width": 8, "largest": [3.5, 1, 2]}
NAN = {**ROWS, "nan_row_count": 2, "nan_rows": [1, 4], "nan_by_block": {"0": 3}}
SERVER_ARGS = "server_args=ServerArgs(model_path='T', speculative_algorithm={}, speculative_num_steps=3)"


def counters(verify: int, right: int, histogram: list[int], tokens: int) -> dict[str, Any]:
    return {
        "completion_tokens": tokens,
        "spec_verify_ct": verify,
        "spec_num_correct_drafts": right,
        "spec_num_proposed_drafts": 5 * verify,
        "spec_correct_drafts_histogram": histogram,
        "spec_accept_length": tokens / verify,
    }


def report(accept_length: float, accepted: int = 30) -> dict[str, Any]:
    return {"acceptance": {"accept_length": accept_length, "counts": {"verify_steps": 40, "accepted": accepted}}}


def probe(width: int | None, given: int, *, equal: bool = True) -> str:
    """The drafter's line of the probe hook: fc was called at `width`, or not at all."""
    weight = {"loaded": {"shape": [8, 24], "mean": 0.0, "std": 0.1}, "file": {"name": "fc.weight"}, "equal": equal}
    fc = {"called": width is not None, "width": width, "dtype": "bfloat16"}
    line = {"part": "draft", "rank": 0, "given": {"width": given}, "fc": fc, "weights": {"fc": weight}}
    return f"[10:00:00] eagle3lab probe: {json.dumps(line)}"


def shard(name: str, tokens: list[int], rows: int) -> dict[str, Any]:
    return {"name": name, "tokens": tokens, "hidden_rows": rows}


def states(shards: int) -> dict[str, Any]:
    listed = [{"name": f"states-0000{i}.safetensors", "tokens": 9} for i in range(shards)]
    return {"states": {"planned_shards": 2, "shards": listed}, "shards": [{**one, "hidden_rows": 9} for one in listed]}


def norm(declared: str, rms: float) -> dict[str, Any]:
    return {"states": {"norm": {"declared": declared, "rms": rms}}, "state_rows_argmax": [[1]], "tokens": [[0, 1]]}


POINTS = [*WHOLE, "--return-aux-hidden-state-layer-ids"]
LLAMA = {"target": {"blocks": 32, "hidden_size": 4096, "family": "llama"}}

PAIRS: dict[str, Pair] = {
    "capture-points": (
        "sglang",
        {**LLAMA, "launch_args": [*POINTS, "2", "16", "31"]},
        {**LLAMA, "launch_args": [*POINTS, "1", "15", "28"]},
    ),
    "capture-flags": (
        "sglang",
        {"launch_args": ["--model-path", "T", POINTS[-1], "2"]},
        {"launch_args": ["--model-path", "T", *POINTS, "2"]},
    ),
    "accept-answer": ("", {"meta_info": counters(9, 0, [9], 10)}, {"meta_info": counters(9, 4, [5, 4], 13)}),
    "accept-counters": (
        "",
        {"drafts": 50, "accepted": 260, "drafted": 250},
        {"drafts": 50, "accepted": 60, "drafted": 250},
    ),
    "accept-tree": (
        "",
        {"verify_steps": 20, "correct_drafts": 44, "steps": 3, "topk": 4, "draft_tokens": 16},
        {"verify_steps": 20, "correct_drafts": 44, "steps": 3, "topk": 1, "draft_tokens": 4},
    ),
    "accept-ceiling": ("", {"accept_length": 6.3, "steps": 5}, {"accept_length": 5.9, "steps": 5}),
    "accept-joint-rates": ("", {"joint_rates": [0.6, 0.2, 0.3]}, {"joint_rates": [0.6, 0.3, 0.3]}),
    "accept-per-position": ("", {"per_depth": [0.4, 0.5]}, {"per_depth": [0.4, 0.5], "meaning": "conditional"}),
    "accept-prefix": ("", {"acceptance_vector": [1, 2, 0]}, {"acceptance_vector": [[1, 0, 1], [1, 1, 1]]}),
    "accept-comparable": (
        "",
        {"a": {"accept_length": 2.0, "top_p": 1.0}, "b": {"accept_length": 2.4, "top_p": 0.9}},
        {"a": {"accept_length": 2.0, "top_p": 1.0}, "b": {"accept_length": 2.4, "top_p": 1.0}},
    ),
    "accept-report": ("", report(2.75), report(1.75)),
    "accept-answers": (
        "",
        {"answers": [counters(9, 0, [9], 10), counters(5, 0, [5], 6), {}]},
        {"answers": [counters(9, 0, [9], 10), counters(5, 2, [3, 2], 8)]},
    ),
    "launch-draft-tokens": ("sglang", {"launch_args": [*CHAIN, "5"]}, {"launch_args": [*CHAIN, "6"]}),
    "draft-tokens": ("", {"steps": 2, "topk": 1, "draft_tokens": 2}, {"steps": 2, "topk": 1, "draft_tokens": 3}),
    "log-acceptance": (
        "",
        {"log": "Decode batch, accept len: 1.00, accept rate: 0.00\n" * 3},
        {"log": "Decode batch, accept len: 1.00\nDecode batch, accept len: 2.75"},
    ),
    "log-algorithm": (
        "",
        {"log": SERVER_ARGS.format("'NEXTN'"), "draft_config": {"architectures": ["LlamaForCausalLMEagle3"]}},
        {"log": SERVER_ARGS.format("'eagle3'"), "draft_config": {"architectures": ["LlamaForCausalLMEagle3"]}},
    ),
    "log-weights": (
        "",
        {"log": "Parameter module.fc.weight not found in params_dict"},
        {"log": "Parameter count: 1.2 B, all found"},
    ),
    "probe-fc": ("", {"log": probe(None, 8)}, {"log": probe(24, 24)}),
    "probe-weights": ("", {"log": probe(24, 24, equal=False)}, {"log": probe(24, 24)}),
    "capture-prefix-cache": ("sglang", {"launch_args": [*CAPTURE, CHUNK, "-1"]}, {"launch_args": WHOLE}),
    "capture-chunked-prefill": (
        "sglang",
        {"launch_args": [*WHOLE, CHUNK, "64"], "prompt_tokens": [30, 65]},
        {"launch_args": [*WHOLE, CHUNK, "64", CHUNK, "-1"], "prompt_tokens": [30, 65]},
    ),
    "states-rows": (
        "",
        {"shards": [shard("p", [7, 8, 9, 1], 4), shard("q", [7, 8, 9, 2, 3], 2)]},
        {"shards": [shard("p", [7, 8, 9, 1], 4), shard("q", [7, 8, 9, 2, 3], 5)]},
    ),
    "states-generated-rows": (
        "",
        {"prompt_tokens": 12, "completion_tokens": 8, "hidden_rows": 20},
        {"prompt_tokens": 12, "completion_tokens": 8, "hidden_rows": 19},
    ),
    "states-resume": (
        "",
        {"shards": [{"i": 0, "state": "good"}, {"i": 1, "state": "another template hash"}]},
        {"shards": [{"i": 0, "state": "good"}, {"i": 1, "state": "good"}]},
    ),
    "states-disk": (
        "",
        {
            "conversations": 10,
            "tokens_each": 100,
            "H": 64,
            "points": [2, 3],
            "dtype": "float32",
            "disk_free_bytes": 511999,
        },
        {
            "conversations": 10,
            "tokens_each": 100,
            "H": 64,
            "points": [2, 3],
            "dtype": "float32",
            "disk_free_bytes": 512000,
        },
    ),
    "states-overflow": (
        "",
        {"value": -65520.0, "dtype_after": "float16"},
        {"value": -65519.0, "dtype_after": "float16"},
    ),
    "states-finite": (
        "",
        {"shape": [3, 8], "recipe": "ones; [2, 5] = -inf", "points": [1, 2], "H": 4},
        {"shape": [3, 8], "recipe": "ones; [2, 5] = -9e4", "points": [1, 2], "H": 4, "dtype": "BF16"},
    ),
    "states-width": (
        "",
        {"width": 40, "points": [1, 2, 3], "H": 16},
        {"width": 48, "points": [1, 2, 3], "H": 16},
    ),
    "states-points": (
        "",
        {"states_manifest_resid_pre": [4, 2, 9]},
        {"states_manifest_resid_pre": [2, 4, 9]},
    ),
    "states-mask": (
        "",
        {"shape": [3, 8], "loss_mask": [0, 1]},
        {"shape": [3, 8], "loss_mask": [0, 1, 1]},
    ),
    "states-target": (
        "",
        {"states": {"hidden_size": 64, "blocks": 12}, "target": {"hidden_size": 32, "blocks": 12}},
        {"states": {"hidden_size": 32, "blocks": 12}, "target": {"hidden_size": 32, "blocks": 12}},
    ),
    "states-swapped": (
        "",
        {"tokens": [[1, 2, 3, 4], [5, 6, 7, 8]], "state_rows_argmax": [[6, 7, 8, 0], [2, 3, 4, 0]]},
        {"tokens": [[1, 2, 3, 4], [5, 6, 7, 8]], "state_rows_argmax": [[2, 3, 4, 0], [6, 7, 0, 0]]},
    ),
    "states-agreement": (
        "",
        {"next_token_agreement_by_shard": [0.61, 0.58, 0.04]},
        {"next_token_agreement_by_shard": [0.61, 0.38, 0.55]},
    ),
    "states-same": (
        "",
        {
            "shards": [
                {"name": "u", "tokens": [1], "states_hash": "h"},
                {"name": "v", "tokens": [2], "states_hash": "h"},
            ]
        },
        {
            "shards": [
                {"name": "u", "tokens": [1], "states_hash": "h"},
                {"name": "v", "tokens": [1], "states_hash": "h"},
            ]
        },
    ),
    "states-batch-1": ("", {"cosine_to_batch_1": [0.999, 0.97]}, {"cosine_to_batch_1": [0.999, 0.991]}),
    "states-layout": ("", states(1), states(2)),
    "states-contents": (
        "",
        {"shard_states": {"s": {"aux": NAN, "points": [2], "block": 8, "dtype": "BF16"}}},
        {"shard_states": {"s": {"aux": ROWS, "points": [2], "block": 8, "dtype": "BF16"}}},
    ),
    "states-norm": ("", norm("post_norm", 4.2), norm("post_norm", 1.001)),
}
