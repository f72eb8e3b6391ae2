"""Reading a model's config.json without any model library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import ProfileError


def read_config(target: Path) -> dict[str, Any]:
    """The object in `target`/config.json (or in the file `target`). `ProfileError` names what is wrong with it."""
    path = target / "config.json" if target.is_dir() else target
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(
            f"{path} cannot be read ({error.strerror})", rule="a model folder has a config.json"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path} is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ProfileError(f"{path} holds a {type(config).__name__}", rule="config.json is an object")
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a multimodal config, or the config itself."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config
