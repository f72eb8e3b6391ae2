"""Runs one command and outlives nobody: when its owner dies or says stop, everything the command started dies too.

`python guard.py FD GRACE -- COMMAND...`, standard library only. FD is the read end of a pipe that only the owner can
write to: end of file means that the owner has gone, however it went (exit, exception, kill -9, a dead notebook kernel).
GRACE is the time in seconds from SIGTERM to SIGKILL. On Linux the kernel also tells the guard of its owner's death, and
lets it adopt orphans, so that a grandchild that left the process group is found. Its exit code is the command's.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def prctl(option: int, value: int) -> None:
    """Linux `prctl`; silently nothing elsewhere, where the pipe alone has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Process ids below `root`, deepest first (Linux; elsewhere empty)."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The command name stands in parentheses and may hold spaces; the parent id is the second field after it.
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just exited
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found: list[int] = []
    level = [root]
    while level:
        level = [child for parent in level for child in children.get(parent, [])]
        found = level + found
    return found


def main() -> int:
    """Run the command until it exits or must stop; returns its exit code."""
    pipe, grace, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[4:]
    owner = os.getppid()
    stop = False

    def asked(signum: int, _: object) -> None:
        nonlocal stop
        # The kernel's death signal also comes when only the owner's starting thread ended; then the owner lives.
        stop = stop or signum != signal.SIGUSR1 or os.getppid() != owner

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signum, asked)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
    try:
        child = subprocess.Popen(command, preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL))
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    while child.poll() is None and not stop:
        reap(child)
        ready, _, _ = select.select([pipe], [], [], 0.2)
        stop = stop or bool(ready) or os.getppid() != owner
    stop_everything(child, grace)
    code = child.returncode
    return 128 - code if code < 0 else code


def stop_everything(child: subprocess.Popen[bytes], grace: float) -> None:
    """SIGTERM to the child and all below this process, SIGKILL to what is left after `grace` seconds."""
    deadline = time.monotonic() + grace
    signum = signal.SIGTERM
    told: set[int] = set()
    while alive := set(descendants(os.getpid())) | ({child.pid} if child.poll() is None else set()):
        if time.monotonic() > deadline and signum is signal.SIGTERM:
            signum, told = signal.SIGKILL, set()
        for pid in alive - told:
            try:
                os.kill(pid, signum)
            except ProcessLookupError:
                continue
        told |= alive
        reap(child)
        time.sleep(0.05)
    reap(child)


def reap(child: subprocess.Popen[bytes]) -> None:
    """Collect adopted orphans that have exited; the child is left to `Popen`, which keeps its exit code."""
    while True:
        child.poll()
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == child.pid:
            return
        os.waitpid(ended.si_pid, 0)


if __name__ == "__main__":
    sys.exit(main())
