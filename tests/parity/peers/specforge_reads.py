"""Runs in SpecForge's environment: load a drafter folder and a states folder with its own classes.

Argument: a folder with `drafter/`, `inputs.safetensors` (ids, aux, embedding) and `states/` (rows_*/data_*.ckpt).
Leaves `outputs.safetensors`: logits of two steps, and what its trainer's reader makes of the second sample.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from specforge.runtime.data_plane.feature_store import load_feature_file
from specforge.runtime.data_plane.offline_reader import OfflineManifestReader, list_feature_files
from transformers import LlamaConfig

root = Path(sys.argv[1])
data = load_file(root / "inputs.safetensors")
config = LlamaConfig.from_pretrained(str(root / "drafter"))
config.pad_token_id = 0
model = LlamaForCausalLMEagle3(config).float().eval()
loaded = model.load_state_dict(load_file(root / "drafter" / "model.safetensors"), strict=False)
assert not loaded.unexpected_keys, loaded.unexpected_keys
assert loaded.missing_keys == ["embed_tokens.weight"], loaded.missing_keys
assert model.norm_output  # its meaning: the final norm before the head
ids, outputs, cache = data["ids"], {}, [[], []]
size = len(ids)
mask = torch.full((size, size), float("-inf")).triu(1)[None, None]
with torch.no_grad():
    model.embed_tokens.weight.copy_(data["embedding"])
    state = model.project_hidden_states(data["aux"][None])
    for step in range(2):
        shifted = torch.cat([ids[step + 1 :], ids.new_zeros(step + 1)])[None]
        state = model.backbone(model.embed_input_ids(shifted), state, cache, mask, torch.arange(size)[None])
        outputs[f"logits_{step}"] = model.compute_logits(state)[0].contiguous()

refs = OfflineManifestReader(str(root / "states"), validate_files=True).read()
assert [ref.num_tokens for ref in refs] == data["lengths"].tolist()
sample = load_feature_file(list_feature_files(str(root / "states"))[1])
outputs |= {f"row_{name}": sample[name].contiguous() for name in ("input_ids", "aux_hidden_state", "hidden_state")}
save_file(outputs, root / "outputs.safetensors")
