"""What a run was made with: code, versions, machine. Facts only; nothing here changes what a run does."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from eagle3lab.core.errors import FetchError, ProfileError
from eagle3lab.core.hashes import sha256_bytes, sha256_file, sha256_json
from eagle3lab.core.paths import notebooks_folder, repository
from eagle3lab.targets.fetch import fetched_folder, weight_hash
from eagle3lab.targets.profiles import load_profile

PACKAGES = (
    "eagle3lab",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "numpy",
    "papermill",
    "nbclient",
    "ipykernel",
    "matplotlib",
    "sglang",
    "vllm",
)


def target_hash(profile: str) -> str | None:
    """Hash of the weights that a run of `profile` would work on now; None when there are none, or they are damaged."""
    try:
        return weight_hash(fetched_folder(load_profile(profile)))
    except (FetchError, ProfileError):
        return None


def git_state(folder: Path | None = None) -> dict[str, Any]:
    """Commit and a hash of everything that differs from it; `unknown` outside a git checkout, never a guess.

    The dirty hash covers the diff of tracked files and the contents of untracked, not ignored ones.
    """
    root = folder or repository()
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return {"commit": "unknown", "dirty": "unknown"}
    diff = _git(root, "diff", "HEAD", "--binary") or ""
    others = sorted((_git(root, "ls-files", "--others", "--exclude-standard") or "").splitlines())
    untracked = [[name, sha256_file(root / name)] for name in others if (root / name).is_file()]
    if not diff and not untracked:
        return {"commit": commit.strip(), "dirty": False}
    return {
        "commit": commit.strip(),
        "dirty": True,
        "diff_sha256": sha256_bytes(diff.encode()),
        "untracked_sha256": sha256_json(untracked),
        "untracked_files": len(untracked),
    }


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, errors="replace", timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


@functools.cache
def code_hash() -> str:
    """sha256 over the package's sources and the notebooks: two runs of one code have one hash, git or not."""
    package = Path(__file__).resolve().parents[1]
    files = [path for path in sorted(package.rglob("*")) if path.suffix in {".py", ".toml", ".yaml", ".json"}]
    files += sorted(notebooks_folder().glob("*.ipynb"))
    return sha256_json([[path.relative_to(package.parent).as_posix(), sha256_file(path)] for path in files])


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a result; one that is not installed says so."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine() -> dict[str, Any]:
    """Processor, cores, memory and GPUs. What cannot be read is `unknown`."""
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        usable = os.cpu_count() or 0
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": usable or "unknown",
        "memory_bytes": _memory() or "unknown",
        "gpus": _gpus(),
        "interpreter": Path(sys.executable).name,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: the platform module knows what there is to know
    return platform.processor() or platform.machine() or "unknown"


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _gpus() -> list[str] | str:
    """Names of the GPUs as their driver tells them, without importing torch."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except FileNotFoundError:
        return []
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else "unknown"
