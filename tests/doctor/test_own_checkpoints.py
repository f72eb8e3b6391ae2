"""A drafter that this package writes is healthy in the engine that its layout is for, and says so when it is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from eagle3lab.doctor.findings import Report  # noqa: E402
from eagle3lab.doctor.run import Inputs, visit  # noqa: E402
from eagle3lab.drafter.checkpoint import save_drafter  # noqa: E402
from eagle3lab.drafter.config import DraftConfig  # noqa: E402
from eagle3lab.drafter.model import Eagle3Drafter  # noqa: E402

SIZES = {
    "hidden_size": 16,
    "target_hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 60,
    "draft_vocab_size": 20,
}
MLA = {"q_lora_rank": 6, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
VARIANTS = {
    "llama under llama": ({"target_family": "llama", "target_blocks": 30, "points": [2, 15, 27]}, 30),
    "llama under kimi": ({"target_family": "kimi_k25", "target_blocks": 61, "points": [2, 30, 58]}, 61),
    "other points": ({"target_family": "qwen3", "target_blocks": 36, "points": [4, 11, 30]}, 36),
    "eagle-3.1": (
        {"target_family": "llama", "target_blocks": 30, "points": [2, 15, 27], "fc_norm": True, "norm_output": True},
        30,
    ),
    "norm before fc": (
        {"target_family": "llama", "target_blocks": 30, "points": [2, 15, 27], "norm_before_fc": True},
        30,
    ),
    "whole vocabulary": (
        {"target_family": "llama", "target_blocks": 30, "points": [2, 15, 27], "draft_vocab_size": 60},
        30,
    ),
    "mla": (
        {
            **{"target_family": "kimi_k25", "target_blocks": 61, "points": [2, 30, 58]},
            **{"architecture": "mla", "mla": MLA, "draft_vocab_size": 60, "num_key_value_heads": 4},
        },
        61,
    ),
}
ENGINES = {
    "sglang": ("sglang", "vllm", "vllm-v2", ""),
    "vllm": ("vllm", "vllm-v2"),
    "speculators": ("vllm", "vllm-v2", ""),
}


def write(folder: Path, layout: str | None, variant: str) -> tuple[Path, Path]:
    """(drafter folder, target folder) of a variant."""
    changes, blocks = VARIANTS[variant]
    config = DraftConfig(**{**SIZES, **changes})
    torch.manual_seed(0)
    kept = torch.arange(config.draft_vocab_size) * (config.vocab_size // config.draft_vocab_size)
    embedding = torch.randn(config.vocab_size, config.target_hidden_size)
    drafter = Eagle3Drafter(config, embedding, kept - torch.arange(config.draft_vocab_size))
    save_drafter(drafter, folder / "draft", record={}, layout=layout)
    (folder / "target").mkdir()
    target = {"model_type": config.target_family, "num_hidden_layers": blocks, "hidden_size": 16, "vocab_size": 60}
    (folder / "target" / "config.json").write_text(json.dumps(target))
    return folder / "draft", folder / "target"


def faults(report: Report) -> list[str]:
    return [f"{f.code}: {f.message}" for f in report.findings if f.severity != "info"]


@pytest.mark.parametrize("layout", sorted(ENGINES))
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_written_drafters_are_healthy(variant: str, layout: str, tmp_path: Path) -> None:
    if variant == "mla" and layout == "speculators":
        pytest.skip("the speculators format has no MLA drafter")
    draft, target = write(tmp_path, layout, variant)
    for engine in ENGINES[layout]:
        found = faults(visit(Inputs(draft=str(draft), target=str(target), engine=engine)))
        assert found == [], (engine, found)


def test_shifted_points_are_seen_in_both_places(tmp_path: Path) -> None:
    draft, target = write(tmp_path, "sglang", "other points")
    config = json.loads((draft / "config.json").read_text())
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps({"states_manifest_resid_pre": [4, 11, 30]}))
    where = {"draft": str(draft), "target": str(target), "facts": str(facts)}
    assert faults(visit(Inputs(**where))) == []
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [4, 11, 30]
    (draft / "config.json").write_text(json.dumps(config))
    assert any("points-differ" in line for line in faults(visit(Inputs(**where, engine="sglang"))))
    assert faults(visit(Inputs(**where, engine="vllm"))) == []
