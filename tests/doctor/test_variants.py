"""The kinds of the case files with other numbers, names and layouts, and valid input that looks odd."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from eagle3lab.doctor.run import Inputs, visit

from .conftest import visit_facts
from .pairs_artefacts import CAPTURE
from .pairs_runs import notebook, tagged

LLAMA = ["<|start_header_id|>", "assistant", "<|end_header_id|>", "\n\n"]
CHATML = ["<|im_start|>", "assistant", "\n"]


def said(facts: dict[str, Any], severity: str, engine: str = "") -> str:
    return " | ".join(f.message for f in visit_facts(facts, engine).findings if f.severity == severity)


FAULTS = [
    (
        {"meta_info": {"completion_tokens": 5, "spec_verify_ct": 4, "spec_accept_token_num": 0}},
        "no draft accepted in 4",
    ),
    ({"log": "x\nDecode batch, accept len: 1.0, accept rate: 0\n"}, "exactly 1.00"),
    ({"per_depth": [70.1, 36.9], "meaning": "joint"}, "per cent"),
    ({"drafts": 10, "accepted": 31, "drafted": 30}, "accepted 31 of 30"),
    ({"accept_length": {"mt": 3.2, "code": 6.1}, "topk": 1, "draft_tokens": 6}, "6.10 is above 6.00"),
    ({"accept_length": 0.62, "steps": 3}, "below 1.00"),
    (
        {"acceptance": {"accept_length": 2.0, "lossless": False, "counts": {"verify_steps": 4, "accepted": 4}}},
        "differs",
    ),
    (
        {
            "shards": [{"name": "z", "tokens": 40, "hidden_rows": 8}],
            "launch_args": [*CAPTURE, "--chunked-prefill-size=16"],
        },
        "chunked prefill",
    ),
    ({"prompt_tokens": 33, "hidden_rows": 1}, "1 rows, needed 33"),
    (
        {"shape": [9, 12], "H": 4, "points": [1, 2, 3], "recipe": "normal(0, 1); rows 2 and 7 all NaN"},
        "2 rows, first 2",
    ),
    ({"shape": [9, 12], "H": 4, "points": [1, 20, 3], "recipe": "zeros; [8, 6] = -inf"}, "column 6, point 20"),
    (
        {"tokens": [[1, 2], [3, 4], [5, 6]], "state_rows_argmax": [[4, 0], [6, 0], [2, 0]]},
        "sample 0 holds the states of sample 1",
    ),
    ({"tokens": [*CHATML, "Hi", "<|im_end|>"], "template": "llama-3"}, "the chatml header 1 times"),
    (
        {
            "tokens": ["<|im_start|>", "assistant", "Hi"],
            "template": "chatml",
            "assistant_header": "<|im_start|>assistant\n",
        },
        "as it is written",
    ),
    ({"tokens": [*LLAMA, "Hi", "<|eot_id|>"], "template": "llama3", "max_length": 4}, "the reply starts at token 4"),
    ({"samples_supervised_tokens": [0, 0]}, "2 of 2 samples"),
    ({"tokens": ["Q", "Q", "R0", "R1", "R2", "R3"], "loss_mask": [0, 0, 1, 1, 1, 1]}, "one place late"),
    ({"run": {"step": 7, "weights": True, "scheduler": False}}, "optimizer, scheduler, rng, sampler missing"),
    ({"run": {"step": 50}, "log_lr": [[40, 9.2e-5], [50, 9.0e-5], [51, 1.0e-4]]}, "jumps at step 51"),
    ({"file": {"name": "w.safetensors", "text": "<!DOCTYPE html><html>404</html>"}}, "HTML page"),
    (
        {
            "file": {
                "header_text": '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
                '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
                "data_bytes": 1,
            }
        },
        "stands twice",
    ),
    ({"index": {"weight_map": {"k": "s"}}, "files": {"s": {}}}, "lacks 1 tensors"),
    ({"tensor": {"dtype": "F32", "shape": [1, 2], "bytes_hex": "0000803f0000c0ff"}}, "1 NaN, first at [0, 1]"),
    ({"a": "arange(8) as float32, shape [2, 2, 2]", "save": "a @ a"}, "could not"),
    ({"grad_norm_by_place": {"left edge": 0.0, "right edge": 0.098}}, "the place after the end does (0.098)"),
    ({"vocab_size": 151669, "logits_width": 607744, "tensor_parallel": 4}, "607744 = 4 x 151936"),
    ({"draft_headers": {}}, "the file holds no tensor"),
    ({**notebook("import time\nfor i in range(8):\n    time.sleep(1)"), "limit_s": 7}, "ran past 7 s"),
    ({**notebook(tagged("k: int | None = None")), "parameters": {"k": "3"}}, "given as str"),
    ({**notebook(tagged("hidden_size = 8")), "parameters": {"hiden_size": 9}}, "did you mean hidden_size"),
    (
        notebook(
            {"source": "x", "execution_count": 1, "outputs": [{"output_type": "error", "ename": "E", "evalue": "no"}]}
        ),
        "failed with E: no",
    ),
]


@pytest.mark.parametrize(("facts", "words"), FAULTS, ids=[words for _, words in FAULTS])
def test_fault(facts: dict[str, Any], words: str) -> None:
    assert words in said(facts, "info" if words == "could not" else "error")


HEALTHY = [
    {"meta_info": {"completion_tokens": 40, "spec_verify_ct": 30, "spec_num_correct_drafts": 9}},
    {"joint_rates": [[0.5, 0.5, 0.0], []][:1]},
    {"per_depth": [1.0, 1.0], "meaning": "joint"},
    {"accept_length": [2.0, 3.99], "steps": 3, "topk": 8, "draft_tokens": 32},
    {"prompt_tokens": 9, "completion_tokens": 1, "hidden_rows": 9},
    {"shape": [2, 4], "recipe": "normal(0, 1); [0, 3] = -5e4", "dtype": "BF16", "points": [1], "H": 4},
    {"next_token_agreement_by_shard": [0.9, 0.4, 0.6]},
    {"tokens": [[1, 1, 1], [2, 2, 2]], "state_rows_argmax": [[1, 1, 9], [2, 2, 9]]},
    {"tokens": [*LLAMA, "Hi", "<|eot_id|>"], "template": "llama3"},
    {"tokens": [*CHATML, "<think>", "a", "</think>", "b", "<|im_end|>", "\n"], "template": "qwen3"},
    {"run": {"step": 100}, "log_lr": [[80, 1e-5], [100, 0.8e-5], [120, 0.6e-5]]},
    {"run": {"step": 0, "weights": True}},
    {"grad_norm_by_place": {"left edge": 0.114, "right edge": 0.0}},
    {
        "corpus_distinct_tokens": 41000,
        "draft_vocab_size": 32000,
        "vocab_size": 163840,
        "built_map": {"padded": False},
    },
    {"vocab_size": 151669, "logits_width": 151936, "tensor_parallel": 4},
    {"losses_straight": [2.0], "losses_resumed": [2.0 + 1e-9]},
    {"file": {"tensors": {"a": ["F8_E4M3", [3, 3]], "b": ["I64", []]}}},
    {"tensor": {"dtype": "BF16", "shape": [2], "bytes_hex": "0080807f"[:4] + "7f7f"}},
    {"a": "arange(8) as int32, shape [2, 4]", "save": "a.reshape(4, 2)"},
    {**notebook(tagged("temperature = 0\nname: str = 'x'")), "parameters": {"temperature": 0.7, "name": "y"}},
    {**notebook({"cell_type": "markdown", "source": "no code"}), "parameters": {}},
    notebook({"source": "x = 1", "execution_count": None}, {"source": "y", "execution_count": None}),
    {**notebook("import time\ndef f():\n    time.sleep(99)"), "limit_s": 7},
]


@pytest.mark.parametrize("facts", HEALTHY, ids=[str(sorted(facts)) for facts in HEALTHY])
def test_healthy(facts: dict[str, Any]) -> None:
    assert [f.message for f in visit_facts(facts).findings if f.severity != "info"] == []


def test_unsorted_ids_are_compared_too() -> None:
    """[57, 1, 29] is taken as it stands, because its first id is not 1: order has no effect, but one too low has."""
    facts = {"target": {"blocks": 61, "hidden_size": 8, "family": "kimi_k25"}, "states_manifest_resid_pre": [2, 30, 58]}
    assert "captures [1, 29, 57]" in said({**facts, "draft_config_ids": [57, 1, 29]}, "error", "sglang")
    assert said({**facts, "draft_config_ids": [58, 2, 30]}, "error", "sglang") == ""


def test_the_default_points_of_a_family_that_adds_one() -> None:
    facts = {"target": {"blocks": 61, "hidden_size": 8, "family": "minimax_m3_vl"}, "draft_config_ids": None}
    assert said(facts, "error", "sglang") == ""


def test_a_count_of_states_that_is_not_that_of_the_list() -> None:
    """`num_aux_hidden_states` sizes fc, the list decides what is captured."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 6, "target_hidden_size": 8,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4, 5]}, "num_aux_hidden_states": 3,
    }  # fmt: skip
    target = {"blocks": 8, "hidden_size": 8, "vocab_size": 10}

    def errors(columns: int, states: int) -> str:
        headers = {"fc.weight": ["BF16", [6, columns]], "midlayer.hidden_norm.weight": ["BF16", [6]]}
        facts = {
            "target": target,
            "draft_config": {**config, "num_aux_hidden_states": states},
            "draft_headers": headers,
        }
        return said(facts, "error", "sglang")

    assert "captures 4 states, width 32 against fc 24" in errors(24, 3)
    assert "against fc" not in errors(32, 4)


@pytest.mark.parametrize("shape", [[172032], [0], [0, 24], [2, 3, 24]])
def test_an_fc_that_is_no_matrix(shape: list[int]) -> None:
    headers = {"fc.weight": ["BF16", shape], "midlayer.input_layernorm.weight": ["BF16", [8]]}
    assert f"fc.weight is {shape}: no matrix" in said({"draft_headers": headers}, "error")


OTHER_METHODS = [
    ("STANDALONE", {"architectures": ["LlamaForCausalLM"]}, {"model.layers.0.self_attn.q_proj.weight": [8, 8]}),
    ("DFLASH", {"architectures": ["DFlashDraftModel"]}, {"fc.weight": [8, 40], "layers.0.mlp.up_proj.weight": [16, 8]}),
    (
        "EAGLE",
        {"architectures": ["LlamaForCausalLMEagle"]},
        {"fc.weight": [8, 16], "layers.0.self_attn.q_proj.weight": [8, 8]},
    ),
]


@pytest.mark.parametrize(("algorithm", "config", "shapes"), OTHER_METHODS, ids=[row[0] for row in OTHER_METHODS])
def test_drafts_of_other_methods_are_not_judged_as_eagle3(algorithm: str, config: dict, shapes: dict) -> None:
    facts = {
        "target": {"blocks": 8, "hidden_size": 8, "vocab_size": 10},
        "draft_config": {"hidden_size": 8, "num_hidden_layers": 1, **config},
        "draft_headers": {name: ["BF16", shape] for name, shape in shapes.items()},
        "launch_args": ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", "D"],
    }
    told = [f.message for f in visit_facts(facts, "sglang").findings if f.severity == "error"]
    assert not [m for m in told if re.search("EAGLE3 is needed|missing key|unknown key|reads [0-9]+ columns", m)], told
    marked = facts["draft_headers"] | {"midlayer.hidden_norm.weight": ["BF16", [8]]}
    assert any("missing key" in f.message for f in visit_facts({**facts, "draft_headers": marked}, "sglang").findings)


def test_a_tied_head_is_not_missing() -> None:
    headers = {"fc.weight": ["BF16", [8, 24]], "midlayer.input_layernorm.weight": ["BF16", [8]]}
    config = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 8, "vocab_size": 10, "draft_vocab_size": 10}
    facts = {"draft_headers": headers, "draft_config": config}

    def missing(**more: Any) -> str:
        found = visit_facts({**facts, "draft_config": {**config, **more}}, "sglang").findings
        return " ".join(str(f.evidence.get("shapes", "")) for f in found if f.code == "weights-missing")

    assert "lm_head.weight" in missing() and "lm_head.weight" not in missing(tie_word_embeddings=True)
    reduced = {"draft_config": {**config, "tie_word_embeddings": True, "draft_vocab_size": 4}}
    assert "come from the first 4 rows of the embedding" in said({**facts, **reduced}, "error", "sglang")


def test_a_capturing_hook_sees_every_chunk() -> None:
    hook = json.dumps([{"name": "capture", "hook_factory": "eagle3lab.capture.sglang_hook:make"}])
    words = ["--model-path", "T", "--disable-radix-cache", "--forward-hooks", hook]
    assert said({"launch_args": words}, "warning", "sglang") == ""
    assert "--disable-radix-cache is missing" in said({"launch_args": [*words[:2], *words[3:]]}, "warning", "sglang")


ROWS = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": " "}]},
    {"prompt": "a"},
    {"question": "a"},
    {"prompt": "a", "reply": "<think>never closed"},
]


def test_corpus_rows_are_counted_by_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\nnot json\n")
    text = " | ".join(f"{f.severity} {f.message}" for f in visit(Inputs(corpus=str(path))).findings)
    assert "warning 1 of 5 rows have no assistant turn, first row 2" in text
    assert "1 of 5 rows have an empty reply, first row 1" in text
    assert "1 of 5 rows have neither messages" in text
    assert "1 of 5 rows have a thinking block that never closes" in text
    assert "error 1 lines are not JSON objects, first line 6" in text
    path.write_text(json.dumps(ROWS[0]))
    assert [f for f in visit(Inputs(corpus=str(path))).findings if f.severity != "info"] == []


def test_text_of_another_template_than_the_tokenizers(tmp_path: Path) -> None:
    path, folder = tmp_path / "c.jsonl", tmp_path / "t"
    folder.mkdir()
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    )
    template += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    path.write_text(
        json.dumps({"text": "<|im_user|>u<|im_middle|>a<|im_end|><|im_assistant|>a<|im_middle|>b<|im_end|>"})
    )
    errors = [
        f.message for f in visit(Inputs(corpus=str(path), tokenizer=str(folder))).findings if f.severity == "error"
    ]
    assert errors == ["the text has kimi delimiters in 1 rows and none of chatml, the tokenizer's template"]


def test_a_list_one_off_the_default_is_asked_about() -> None:
    """Right for the other engine, so no warning; without the states' manifest nobody can know."""
    target = {"blocks": 36, "hidden_size": 4096, "family": "qwen3"}
    for engine, ids, words in (("sglang", [2, 18, 33], "meant as inputs?"), ("vllm", [1, 17, 32], "meant as outputs?")):
        facts = {"target": target, "draft_config_ids": ids}
        assert words in said(facts, "info", engine) and said(facts, "warning", engine) == ""
    assert "meant as" not in said({"target": target, "draft_config_ids": [1, 17, 32]}, "info", "sglang")
