"""Speed and memory of `eagle3lab inspect` on a full-size fc, as ratios to the naive route.

    python benchmarks/bench_inspect.py [--shape 7168x21504] [--rounds 3] [--spectrum] [--json]

The naive route is what people type: read bfloat16 as float32, `mean()` and `std()` in float64 with numpy. Ours is the
whole battery but the spectrum, on a checkpoint that makes it do all of its work (a moved fc: the second pass counts
entries outside the support). Every run is a process of its own, so that peak memory is its own; both sides of a pair
run in turn. Wall and CPU seconds are both printed: on a busy machine only the second means anything.

The naive route holds the matrix in float32 and in float64 at once: 2.6 GB at full size.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from eagle3lab.inspection.formats import bfloat16_bits
from eagle3lab.inspection.words import parse_shape

LIMITS = {"battery_wall_s": 3.0, "battery_peak_mb": 700.0, "spectrum_wall_s": 60.0}
"""What the project promises at full size on 2 idle cores."""

_RUN = """
import json, resource, sys, time
from pathlib import Path
path, kind = Path(sys.argv[1]), sys.argv[2]
start, cpu = time.perf_counter(), time.process_time()
if kind == "naive":
    import numpy as np
    raw = np.memmap(path / "model.safetensors", dtype="<u2", mode="r", offset=int(sys.argv[3]))
    w = (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    answer = [float(w.mean()), float(w.std())]
else:
    from eagle3lab.inspection import inspect_checkpoint
    found = inspect_checkpoint(path, spectrum="fast" if kind == "spectrum" else "none")
    answer = [found.pooled.mean, found.pooled.std, *found.verdict.labels]
print(json.dumps({
    "wall_s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu, "answer": answer,
    "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}))
"""


def main() -> None:
    """Parse words, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="7168x21504")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spectrum", action="store_true", help="also the spectrum with bounds")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    shape = parse_shape(given.shape)
    with tempfile.TemporaryDirectory(prefix="bench-inspect-") as name:
        folder = Path(name)
        offset = make_moved_fc(folder / "model.safetensors", shape)
        kinds = ["naive", "battery"]
        runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in [*kinds, "spectrum"]}
        for turn in range(given.rounds):
            for kind in kinds if turn % 2 == 0 else kinds[::-1]:
                runs[kind].append(measure(folder, kind, offset))
        if given.spectrum:
            runs["spectrum"].append(measure(folder, "spectrum", offset))
    found = summary(shape, runs)
    print(json.dumps(found, indent=2) if given.json else text(found))


def make_moved_fc(path: Path, shape: tuple[int, int]) -> int:
    """Write a uniform start with a 22.7 % update as bfloat16, in row blocks; returns the offset of the first byte."""
    header = {"fc.weight": {"dtype": "BF16", "shape": list(shape), "data_offsets": [0, 2 * shape[0] * shape[1]]}}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    rng = np.random.default_rng(0)
    bound = 1 / np.sqrt(shape[1])
    with path.open("wb") as handle:
        handle.write(len(head).to_bytes(8, "little") + head)
        for start in range(0, shape[0], 128):
            rows = min(128, shape[0] - start)
            start_weights = (rng.random((rows, shape[1]), dtype=np.float32) * 2 - 1) * np.float32(bound)
            update = rng.standard_normal((rows, shape[1]), dtype=np.float32) * np.float32(0.227 * bound / np.sqrt(3))
            handle.write(bfloat16_bits(start_weights + update).tobytes())
    return 8 + len(head)


def measure(folder: Path, kind: str, offset: int) -> dict[str, Any]:
    """One run in its own process, torch not imported."""
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    command = [sys.executable, "-c", _RUN, str(folder), kind, str(offset)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return json.loads(done.stdout)


def summary(shape: tuple[int, int], runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians, ratios of pairs, and whether the promises hold (only said at full size)."""
    found: dict[str, Any] = {"shape": list(shape), "load_average": os.getloadavg()[0], "cores": os.cpu_count()}
    for kind, results in runs.items():
        for key in ("wall_s", "cpu_s", "peak_mb"):
            found[f"{kind}_{key}"] = statistics.median(r[key] for r in results) if results else "not measured"
    for key in ("cpu_s", "wall_s", "peak_mb"):
        pairs = [n[key] / b[key] for n, b in zip(runs["naive"], runs["battery"], strict=True)]
        found[f"naive_over_battery_{key}"] = {"median": statistics.median(pairs), "range": [min(pairs), max(pairs)]}
    answers = [results[0]["answer"][:2] for results in (runs["naive"], runs["battery"])]
    found["same_mean_and_std"] = bool(np.allclose(answers[0], answers[1], rtol=1e-9, atol=1e-15))
    found["labels"] = runs["battery"][0]["answer"][2:]
    if shape == (7168, 21504):
        found["promises"] = {name: _kept(found, name, limit) for name, limit in LIMITS.items()}
    return found


def _kept(found: dict[str, Any], name: str, limit: float) -> str:
    """Whether a promise holds. Wall time on a machine busy with other work decides nothing against it."""
    if isinstance(found[name], str):
        return found[name]
    busy = found["load_average"] > found["cores"] + 1
    if found[name] > limit and name.endswith("wall_s") and busy:
        cpu = found[name.replace("wall_s", "cpu_s")]
        return f"not decided: load {found['load_average']:.1f} on {found['cores']} cores ({cpu:.2f} s CPU)"
    return "yes" if found[name] <= limit else "NO"


def text(found: dict[str, Any]) -> str:
    """The same for a terminal."""
    lines = [f"fc {found['shape'][0]} x {found['shape'][1]}, {found['cores']} cores, load {found['load_average']:.1f}"]
    for kind, what in (
        ("naive", "mean and std, float64 numpy"),
        ("battery", "whole battery"),
        ("spectrum", "spectrum"),
    ):
        wall, cpu, peak = (found[f"{kind}_{key}"] for key in ("wall_s", "cpu_s", "peak_mb"))
        told = wall if isinstance(wall, str) else f"{wall:.2f} s wall, {cpu:.2f} s CPU, peak {peak:.0f} MB"
        lines.append(f"  {what:<28} {told}")
    for key in ("cpu_s", "wall_s", "peak_mb"):
        ratio = found[f"naive_over_battery_{key}"]
        low, high = ratio["range"]
        lines.append(f"  naive / battery, {key:<12} {ratio['median']:.2f}  ({low:.2f} to {high:.2f})")
    lines.append(f"  same mean and std: {found['same_mean_and_std']}; verdict {', '.join(found['labels'])}")
    for name, good in found.get("promises", {}).items():
        lines.append(f"  {name} <= {LIMITS[name]:g}: {good}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
