"""Speed and memory of a training step against SpecForge 0.2.0 and speculators 0.9.0: the same batch, the same loss.

    python benchmarks/bench_training.py [--cases 1x512,4x512,2x2048] [--steps 3,7] [--rounds 5] [--threads 2]
        [--precisions fp32,bf16] [--no-scaling] [--no-memory] [--json benchmarks/results/training-cpu.json]

Each arm is a process of its own in its environment (`.venvs/PEER`, installed by scripts/install_peers.sh); a missing
peer is said and left out. Every round asks every arm for one step in turn, in an order that changes, so that a busy
moment falls on all; a ratio is one of medians over rounds. Before timing, each peer's loss must equal ours under that
peer's own mask convention: to 1e-5 in fp32, to 5 % in bf16, where the peers round in other places. A step is forward,
loss, backward, clipping and AdamW with learning rate 0; lm_head is trained in all arms. Memory is measured in fresh
processes: the most of two steps above the level with model, optimiser and batch loaded; once as it is, and once without
the pages of the libraries' code, which every arm reads in at its first step (about 110 MB of PyTorch). "Share" is
(operations that have to be computed / seconds) over the rate of a 2048-square matrix product timed in the same rounds;
the operations are those of `eagle3lab.training.estimate.step_flops` over trained pairs only. Where the processor has no
instructions for bf16 its arms are left out: a step would take minutes in every one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from training_batches import CASES, make_case

from eagle3lab.core.precision import slow_here

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PEERS = {"specforge": ("full", "compact"), "speculators": ("sdpa",)}
PRECISIONS = ("fp32", "bf16")
SETTLE_SECONDS = 0.3
"""Before a step: threads of the arm before spin a while for more work, and would take a core from this one."""
CLOSE = {"fp32": 1e-5, "bf16": 5e-2}
LARGE_TOKENS = 4096
"""From here on arms give freed memory back between steps. All of them pay for it in the next step, the largest most."""
SCALING = (512, 1024, 2048, 4096)
BARS = {  # name -> (fp32 over their fp32, bf16 over their fp32, bf16 over their bf16, peak share)
    "1x512": (1.3, 3.5, 1.8, 0.5),
    "4x512": (1.3, 3.5, 1.8, 0.5),
    "2x2048": (3.0, 7.0, None, 0.35),
}
MEMORY = {"peak memory": "above_level", "peak without code pages": "above_level_without_code"}
SHARE_BARS = {"fp32": 0.8, "bf16": 0.5}


@dataclass
class Arm:
    """One process. who: `ours` or a peer; path: its variant, for ours the convention."""

    who: str
    path: str
    precision: str
    process: subprocess.Popen[str] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Printed name."""
        return f"{self.who} {self.path} {self.precision}"

    def start(self, folder: Path, threads: int) -> None:
        """Start the process and wait until it is loaded."""
        python = sys.executable if self.who == "ours" else str(peer_python(self.who))
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(threads),
        }
        script = HERE / f"training_{self.who}.py"
        self.process = subprocess.Popen(
            [python, str(script), str(folder), self.path, self.precision, str(threads)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(folder / f"{self.name}.log", "w"),  # noqa: SIM115  (closed with the process)
            text=True,
        )
        self.facts = self._answer(folder)

    def ask(self, word: str, folder: Path) -> dict[str, Any]:
        """One word, one answer."""
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self._answer(folder)

    def _answer(self, folder: Path) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended:\n{(folder / f'{self.name}.log').read_text()[-2000:]}")
        return json.loads(line)

    def stop(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.stdin.write("quit\n")
            self.process.stdin.close()
            self.process.wait(60)
            self.process = None


def peer_python(peer: str) -> Path:
    """Interpreter of a peer's environment."""
    return ROOT / os.environ.get("VENVS", ".venvs") / peer / "bin" / "python"


def arms_for(peers: list[str], precisions: list[str]) -> list[Arm]:
    """Every peer's paths, and ours under every peer's convention, in these precisions."""
    arms = [Arm("ours", peer, precision) for peer in peers or ["specforge"] for precision in precisions]
    return arms + [Arm(peer, path, p) for peer in peers for path in PEERS[peer] for p in precisions]


def time_arms(arms: list[Arm], folder: Path, threads: int, rounds: int, large: bool) -> None:
    """Start all, compare losses, then `rounds` rounds in turn.

    large: what all arms have freed and kept does not fit side by side; each gives it back after its step.
    """
    try:
        losses = {}
        for arm in arms:
            arm.start(folder, threads)
            losses[arm.name] = arm.ask("step", folder)["loss"]
            if large:
                arm.ask("release", folder)
        for arm in arms:
            ours = losses[f"ours {arm.path if arm.who == 'ours' else arm.who} {arm.precision}"]
            off = abs(losses[arm.name] - ours) / abs(ours)
            arm.facts["loss"], arm.facts["loss_difference"] = losses[arm.name], off
            if off > CLOSE[arm.precision]:
                raise SystemExit(f"{arm.name}: loss {losses[arm.name]}, ours {ours}: not the same training")
        for turn in range(rounds):
            for arm in arms[turn % len(arms) :] + arms[: turn % len(arms)]:
                time.sleep(SETTLE_SECONDS)
                arm.seconds.append(arm.ask("step", folder)["seconds"])
                if arm.who == "ours":
                    arm.rates.append(arm.ask("rate", folder)["rate"])
                if large:
                    arm.ask("release", folder)
    finally:
        for arm in arms:
            arm.stop()


def measure_memory(arms: list[Arm], folder: Path, threads: int) -> None:
    """Each arm alone in a fresh process."""
    for arm in arms:
        fresh = Arm(arm.who, arm.path, arm.precision)
        try:
            fresh.start(folder, threads)
            arm.facts |= fresh.ask("peak", folder)
        finally:
            fresh.stop()


def row(arm: Arm) -> dict[str, Any]:
    """Numbers of one arm."""
    found = {"arm": arm.name, **arm.facts}
    if arm.seconds:
        found |= {
            "rounds": len(arm.seconds),
            "median_seconds": statistics.median(arm.seconds),
            "fastest_seconds": min(arm.seconds),
            "slowest_seconds": max(arm.seconds),
        }
    if "peak" in found:
        found["above_level"] = found["peak"] - found["level"]
        found["above_level_without_code"] = found["above_level"] - found["code"]
    if arm.rates:
        found["matrix_rate"] = statistics.median(arm.rates)
        found["share"] = found["flops"] / found["median_seconds"] / found["matrix_rate"]
    return found


def best(rows: list[dict[str, Any]], precision: str, key: str) -> dict[str, Any]:
    """The peers' best row of a precision."""
    return min(
        (r for r in rows if not r["arm"].startswith("ours") and r["arm"].endswith(precision)), key=itemgetter(key)
    )


def compare(case: str, rows: list[dict[str, Any]], precisions: list[str], memory: bool) -> list[dict[str, Any]]:
    """Ratios against the best peer, ours under that peer's convention; with the bar of each."""
    found = []

    def ours(peer_row: dict[str, Any], precision: str) -> dict[str, Any]:
        return next(r for r in rows if r["arm"] == f"ours {peer_row['arm'].split()[0]} {precision}")

    def add(what: str, value: float, bar: float | None, against: str, at_least: bool = True) -> None:
        met = None if bar is None else (value >= bar if at_least else value <= bar)
        found.append({"what": what, "value": value, "bar": bar, "met": met, "against": against})

    bars = BARS.get(case, (None,) * 4)
    for mine, theirs, bar in (("fp32", "fp32", bars[0]), ("bf16", "fp32", bars[1]), ("bf16", "bf16", bars[2])):
        if not {mine, theirs} <= set(precisions):
            continue
        peer = best(rows, theirs, "median_seconds")
        value = peer["median_seconds"] / ours(peer, mine)["median_seconds"]
        add(f"our {mine} over their {theirs}", value, bar, peer["arm"])
    for precision in precisions:
        own = (r for r in rows if r["arm"].startswith("ours") and r["arm"].endswith(precision))
        mine = max(own, key=itemgetter("share"))
        add(f"share of the matrix rate, {precision}", mine["share"], SHARE_BARS[precision], mine["arm"])
        for what, key in MEMORY.items() if memory else ():
            peer = best(rows, precision, key)
            value = ours(peer, precision)[key] / peer[key]
            add(f"{what}, {precision}", value, bars[3], peer["arm"], at_least=False)
    return found


def show(rows: list[dict[str, Any]]) -> None:
    """The table of one case."""
    for r in rows:
        text = f"  {r['arm']:28s}"
        if "median_seconds" in r:
            text += f" {r['median_seconds']:7.3f} s  [{r['fastest_seconds']:.3f}, {r['slowest_seconds']:.3f}]"
            text += f" in {r['rounds']} rounds"
        if "share" in r:
            text += f", {r['share']:.0%} of {r['matrix_rate'] / 1e9:.0f} GFLOP/s"
        if "above_level" in r:
            text += f", peak +{r['above_level'] / 1e6:.0f} MB (total {r['peak'] / 1e6:.0f}, code {r['code'] / 1e6:.0f})"
        if r.get("loss_difference"):
            text += f", loss off by {r['loss_difference']:.1e}"
        print(text, flush=True)


def main() -> None:
    """Parse words, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--steps", default="3,7", help="TTT steps K")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precisions", help="default: both, or fp32 where the processor has no bf16")
    parser.add_argument("--no-scaling", action="store_true")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "training-cpu.json")
    words = parser.parse_args()
    cases = [case for case in words.cases.split(",") if case]
    if unknown := [case for case in cases if case not in CASES]:
        parser.error(f"unknown case {unknown[0]!r}: one of {', '.join(CASES)}")
    precisions = words.precisions.split(",") if words.precisions else list(PRECISIONS)
    if unknown := [one for one in precisions if one not in PRECISIONS]:
        parser.error(f"unknown precision {unknown[0]!r}: one of {', '.join(PRECISIONS)}")
    if not words.precisions and (slow := slow_here("bfloat16")):
        precisions.remove("bf16")
        print(f"bf16 not measured: {slow}")
    peers = [peer for peer in PEERS if peer_python(peer).exists()]
    for peer in PEERS.keys() - set(peers):
        print(f"{peer} is not installed and left out: scripts/install_peers.sh {peer}")
    found = json.loads(words.json.read_text()) if words.json.exists() else {}
    for case in cases:
        for steps in map(int, words.steps.split(",")):
            with tempfile.TemporaryDirectory() as made:
                samples, length, share = CASES[case]
                make_case(Path(made), samples, length, share, steps)
                arms = arms_for(peers, precisions)
                time_arms(arms, Path(made), words.threads, words.rounds, samples * length >= LARGE_TOKENS)
                if not words.no_memory:
                    measure_memory(arms, Path(made), words.threads)
            rows = [row(arm) for arm in arms]
            ratios = compare(case, rows, precisions, not words.no_memory) if peers else []
            print(f"{case}, {share:.0%} supervised, K {steps}")
            show(rows)
            for r in ratios:
                verdict = "" if r["met"] is None else f"bar {r['bar']}: {'met' if r['met'] else 'MISSED'}"
                print(f"    {r['what']:32s} {r['value']:6.2f}  {verdict}  ({r['against']})", flush=True)
            found[f"{case} K{steps}"] = {"machine": machine(words.threads), "arms": rows, "ratios": ratios}
            write(words.json, found)
    if not words.no_scaling:
        found["scaling K7"] = {
            "machine": machine(words.threads),
            "rows": scaling(words.threads, words.rounds, precisions),
        }
        write(words.json, found)


def scaling(threads: int, rounds: int, precisions: list[str]) -> list[dict[str, Any]]:
    """Ours alone over T at K 7, one sample, 73 % supervised: seconds and memory as multiples of the first over T's."""
    found: list[dict[str, Any]] = []
    for precision in precisions:
        rows = []
        for length in SCALING:
            with tempfile.TemporaryDirectory() as made:
                make_case(Path(made), 1, length, 0.73, 7)
                arm = Arm("ours", "specforge", precision)
                try:
                    arm.start(Path(made), threads)
                    arm.facts |= arm.ask("peak", Path(made))
                    arm.seconds = [arm.ask("step", Path(made))["seconds"] for _ in range(rounds)]
                    attention = statistics.median(arm.ask("attention", Path(made))["seconds"] for _ in range(rounds))
                finally:
                    arm.stop()
                rows.append({**row(arm), "tokens": length, "attention_seconds": attention})
        first = rows[0]
        for r in rows:
            times = r["tokens"] / first["tokens"]
            rest = [x["median_seconds"] - x["attention_seconds"] for x in (r, first)]
            r["time_over_linear"] = r["median_seconds"] / first["median_seconds"] / times
            r["time_over_linear_beyond_attention"] = rest[0] / rest[1] / times
            r["memory_over_linear"] = r["above_level_without_code"] / first["above_level_without_code"] / times
            megabytes = r["above_level_without_code"] / 1e6
            print(
                f"  T {r['tokens']:5d} {precision}: {r['median_seconds']:.2f} s ({r['time_over_linear']:.2f}x linear, "
                f"{r['time_over_linear_beyond_attention']:.2f}x without attention), "
                f"+{megabytes:.0f} MB ({r['memory_over_linear']:.2f}x linear), {rounds} rounds",
                flush=True,
            )
        found += rows
    return found


def machine(threads: int) -> dict[str, Any]:
    """What it ran on, and how busy that was."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((ln.split(":")[1].strip() for ln in lines if ln.startswith("model name")), "unknown")
    return {
        "processor": name,
        "cores": os.cpu_count(),
        "threads": threads,
        "load_after": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def write(path: Path, found: dict[str, Any]) -> None:
    """Write after every case, so that a stopped run keeps what it measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
