"""A mutation corpus: healthy artefacts and facts, and ways to damage them. Everything follows from one seed."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from cases.artefacts import build, header_contents, write_safetensors

from .healthy import SERVE, headers

TINY = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 16,
    "vocab_size": 40,
    "draft_vocab_size": 10,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32], "use_aux_hidden_state": True},
}
VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        3,
        2**31,
        2**63,
        10**40,
        -(10**40),
        1e308,
        -1e-320,
        0.5,
        "",
        "x",
        "7168",
        "\x00\x1b[31m",
    ),
    *("<script>alert(1)</script>", "../../etc/passwd", "\ud800", "é" * 500, [], {}, [[]], [None], [1, 2, 3], [2, "a"]),
    *(
        {"": ""},
        {"dtype": 1},
        ["BF16", [-1, 8]],
        ["BF16", [10**30, 8]],
        ["F99", []],
        ["I64", "8"],
        float("nan"),
        float("inf"),
    ),
]
"""Put in the place of any value. Every one can stand in YAML or Python facts; JSON writes NaN as `NaN`."""


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def damage_value(value: Any, rng: random.Random) -> Any:
    """A copy of a nested value with one to three places replaced, removed, renamed or repeated."""
    changed = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        place, key = _pick(changed, rng)
        if place is None:
            return rng.choice(VALUES)
        kind = rng.randrange(6)
        if kind == 0 and isinstance(place, dict):
            place[str(key) + rng.choice(["s", "_", "2", "<b>"])] = place.pop(key)
        elif kind == 1:
            del place[key]
        elif kind == 2 and isinstance(place, list):
            place.extend(copy.deepcopy(place[: rng.randint(0, 8)]))
        elif kind == 3:
            place[key] = nested(rng.choice([3, 30, 150]))
        else:
            place[key] = copy.deepcopy(rng.choice(VALUES))
    return changed


def _pick(value: Any, rng: random.Random) -> tuple[Any, Any]:
    """A random container inside `value` and a key of it."""
    places: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        item = stack.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else []
        for key in keys:
            places.append((item, key))
            stack.append(item[key])
    return rng.choice(places) if places else (None, None)


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flip, cut, repeat, insert or overwrite bytes."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(6)
        if kind == 0 and data:
            flipped = bytearray(data)
            flipped[at % len(data)] ^= 1 << rng.randrange(8)
            data = bytes(flipped)
        elif kind == 1:
            data = data[:at]
        elif kind == 2:
            data = data[:at] + data[at // 2 : at // 2 + 64] + data[at:]
        elif kind == 3:
            data = (
                data[:at]
                + rng.choice([b"\x00" * 8, b"\xff" * 8, b'"', b"{", b"NaN", b"1e999", b"\xed\xa0\x80"])
                + data[at:]
            )
        elif kind == 4:
            length = rng.choice([0, 1, 7, 2**31, 10**11, 2**63, 2**64 - 1])
            data = length.to_bytes(8, "little") + data[8:]
        else:
            data = data[at:]
    return data


def write_artefacts(folder: Path) -> dict[str, Path]:
    """Healthy artefacts, one of each kind, flag -> path."""
    draft, target = folder / "draft", folder / "target"
    for place in (draft, target):
        place.mkdir(parents=True)
    (draft / "config.json").write_text(json.dumps(TINY))
    write_safetensors(draft / "model.safetensors", header_contents(headers({**TINY})))
    (target / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 36, "hidden_size": 8}))
    (folder / "serve.sh").write_text("FOO=1 python3 -m sglang.launch_server \\\n " + " ".join(SERVE) + "\n")
    (folder / "env").write_text("SGLANG_SIMULATE_ACC_LEN=-1\nexport A='b'\n")
    np.save(draft / "d2t.npy", np.arange(4))
    return {"draft": draft, "target": target, "launch": folder / "serve.sh", "env": folder / "env"}


__all__ = ["TINY", "VALUES", "build", "damage_bytes", "damage_value", "nested", "write_artefacts"]
