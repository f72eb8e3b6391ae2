"""Capture of 21,504-wide states through SGLang's DeepSeek file, on a CPU: 61 blocks of MLA and routed experts, thin.

This is the language model inside Kimi-K2.5, and the file whose hook arguments differ from Llama's (aux in one packed
tensor). What SGLang 0.5.23 cannot do on a CPU, and what is used instead:

- the multimodal wrapper needs a processor: `OSError: Can't load image processor for '...'`. The text model is served.
- `--attention-backend torch_native` has no MLA: `RuntimeError: Expected size for first two dimensions of batch2 tensor
  to be: [8, 16] but got: [8, 24]`. Triton's kernels run instead, in Triton's interpreter: about 12 s a pass.
- a rotary embedding without scaling: `AssertionError` at `assert rope_scaling is not None`. kimi-thin has the true one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3lab.capture.store import Store
from eagle3lab.corpus.chat import Rendered
from eagle3lab.targets.model import Target, load_target
from eagle3lab.targets.profiles import load_profile
from eagle3lab.targets.random_target import build_random_target
from tests.engines.runner import environment_python
from tests.engines.sglang_server import capture_through_server, row_error
from tests.targets.rank_worker import POINTS, kimi_manifest

SHARDS = [[0, 1], [2]]
CPU = ("--attention-backend", "triton", "--chunked-prefill-size", "16")
TOLERANCE = 2e-5
"""Of every row: length of the difference over length of the row, fp32 on both sides."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """kimi-thin's language model alone, as a DeepSeek-V3 checkpoint."""
    environment_python("sglang")
    whole, text = tmp_path_factory.mktemp("kimi-thin"), tmp_path_factory.mktemp("kimi-thin-text")
    build_random_target(load_profile("kimi-thin"), whole, lambda _: None)
    prefix = "language_model."
    tensors = load_file(whole / "model.safetensors")
    kept = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    save_file(kept, text / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((whole / "config.json").read_text())["text_config"] | {"dtype": "bfloat16"}
    (text / "config.json").write_text(json.dumps(config))
    for path in whole.glob("*tokenizer*"):
        shutil.copy(path, text / path.name)
    shutil.copy(whole / "generation_config.json", text)
    (whole / "model.safetensors").unlink()
    return text


@pytest.fixture(scope="module")
def samples() -> list[Rendered]:
    """Three texts of 5 to 21 bytes; the longest spans two chunks."""
    lengths = (12, 5, 21)
    texts = [[(7 * place + 3 * length) % 256 for place in range(length)] for length in lengths]
    return [Rendered(ids, [place > 2 for place in range(len(ids))]) for ids in texts]


@pytest.fixture(scope="module")
def captured(folder: Path, samples, tmp_path_factory) -> Path:
    manifest = kimi_manifest().model_copy(update={"dtype": "float32", "engine": "sglang"})
    place = tmp_path_factory.mktemp("sglang-kimi")
    environment = {"TRITON_INTERPRET": "1"}
    # /health generates a token, which takes longer here than anybody waits for an answer.
    states, rates = capture_through_server(
        folder, manifest, samples, SHARDS, place, CPU, environment, ready="/server_info"
    )
    assert set(rates) == {0, 1}
    return states


def test_states_are_those_of_transformers(folder: Path, samples, captured: Path) -> None:
    store, target = Store(captured, points=POINTS, verify=True), load_target(folder, dtype="float32")
    assert isinstance(target, Target)
    hidden = target.hidden_size
    worst = dict.fromkeys([*map(str, POINTS), "last"], 0.0)
    wrong = dict.fromkeys(map(str, POINTS), float("inf"))
    for index, sample in enumerate(samples):
        ids, found = torch.tensor([sample.input_ids]), store[index]
        assert found.aux.shape == (len(sample.input_ids), 21_504)
        last, states = target.states(ids, points=POINTS)
        neighbours = [target.states(ids, points=[point + step for point in POINTS])[1] for step in (-1, 1)]
        for place, point in enumerate(POINTS):
            theirs = found.aux[:, place * hidden : (place + 1) * hidden]
            name = str(point)
            worst[name] = max(worst[name], float(row_error(theirs, states[place][0]).max()))
            beside = [float(row_error(theirs, other[place][0]).min()) for other in neighbours]
            wrong[name] = min(wrong[name], *beside)
        worst["last"] = max(worst["last"], float(row_error(found.last, last[0]).max()))
    print("SGLang's DeepSeek file against transformers, fp32, worst row; best row of the nearest other block:")
    for name, value in worst.items():
        print(f"  {name}: {value:.1e}; {wrong[name]:.1e}" if name in wrong else f"  {name}: {value:.1e}")
    assert max(worst.values()) < TOLERANCE
    assert min(wrong.values()) > 100 * TOLERANCE, "the neighbouring block would pass as well"
