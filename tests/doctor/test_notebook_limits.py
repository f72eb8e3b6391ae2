"""Limits of a notebook: which one holds, which cell runs past it; values that are printed; types that a hint takes."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import visit_facts
from .pairs_runs import notebook, tagged

FIVE = "import time; time.sleep(5)"


def told(code: str, *cells: str | dict[str, Any], execution: dict[str, Any] | None = None, **facts: Any) -> list[Any]:
    metadata = {} if execution is None else {"execution": execution}
    return [f for f in visit_facts({**notebook(*cells, **metadata), **facts}).findings if f.code == code]


def limits(*cells: str | dict[str, Any], **facts: Any) -> list[tuple[str, Any]]:
    found = told("notebook-limits", *cells, **facts)
    return [(f.severity, f.evidence.get("effective_limit_s", f.evidence.get("limit_s"))) for f in found]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"execution": {"timeout": -1}, "limit_s": 1, "runner": "nbmake 1.5.5"}, [("warning", None)]),
        ({"execution": {"timeout": 0}, "limit_s": 1}, [("warning", None)]),
        ({"execution": {"timeout": None}, "limit_s": 1, "runner": "nbmake"}, [("warning", None)]),
        ({"execution": {"timeout": -1}, "limit_s": 0, "runner": "nbmake"}, [("info", None)]),
        ({"limit_s": -1}, []),
        ({"limit_s": 0, "runner": "papermill 2.7.0"}, [("info", None)]),
        ({"limit_s": 1}, [("error", 1)]),
        ({"execution": {"timeout": 2}, "limit_s": -1}, [("error", 2), ("warning", 2)]),
        ({"execution": {"timeout": 3600}, "limit_s": 600, "runner": "papermill 2.7.0"}, [("info", 600)]),
        ({"execution": {"timeout": 3600}, "runner": "papermill"}, [("info", None)]),
        ({"execution": {"timeout": 3600}, "limit_s": 600, "runner": "nbmake 1.5.5"}, [("warning", 3600)]),
        ({"execution": {"timeout": 1}, "limit_s": 600, "runner": "papermill"}, [("info", 600)]),
        ({"limit_s": 600, "runner": "nbmake 1.5.5"}, [("info", 600)]),
        ({"execution": {"timeout": 600}, "limit_s": 600, "runner": "nbmake 1.5.5"}, [("info", 600)]),
        ({"runner": "nbmake 1.5.5"}, [("info", 300)]),
    ],
)
def test_the_limit_that_holds(facts: dict[str, Any], expected: list[tuple[str, Any]]) -> None:
    assert limits(FIVE, **facts) == expected


def test_where_the_limit_comes_from() -> None:
    [found] = told("notebook-limits", "x = 1", limit_s=600, runner="nbmake 1.5.5")
    assert found.evidence["origin"] == "command line" and "600 s comes from the command line" in found.message


@pytest.mark.parametrize(
    ("runner", "used_as", "severity"),
    [
        ("papermill 2.7.0", "", "info"),
        ("papermill", "test", "info"),
        ("nbmake", "", "warning"),
        ("", "test", "error"),
    ],
)
def test_allow_errors_counts_where_it_is_read(runner: str, used_as: str, severity: str) -> None:
    found = told("notebook-limits", "x = 1", execution={"allow_errors": True}, runner=runner, used_as=used_as)
    assert [f.severity for f in found if f.subject == "allow_errors"] == [severity]


def test_a_skipped_cell_takes_no_time_and_excuses_nothing() -> None:
    assert limits({"source": FIVE, "tags": ["hide-input"]}, limit_s=1) == [("error", 1)]
    assert not limits({"source": FIVE, "tags": ["skip-execution"]}, limit_s=1)
    assert not limits({"source": "1/0", "tags": ["skip-execution", "raises-exception"]}, used_as="test")


@pytest.mark.parametrize(
    "cells",
    [
        ["import time\ntime.sleep(60 * 10)"],
        ["import time\nwait = 600", "time.sleep(wait)"],
        ["import time as t", "t.sleep(600)"],
        ["from time import sleep as nap\nnap(600)"],
        ["import time\npause = time.sleep\npause(600)"],
        ["import time\nfor i in range(0, 100): time.sleep(6)"],
        ["import time\nfor i in range(5000): time.sleep(0.1)"],
        ["import time\nfor x in [1, 2, 3]: time.sleep(200)"],
        ["import time\nfor x in (a, b, c): time.sleep(200)"],
        ["import time\nfor s in [10, 20, 40]: time.sleep(s)"],
        ["import time\nfrom tqdm import tqdm\nfor i, s in enumerate(tqdm([30, 40])):\n    time.sleep(50)"],
        ["import time\nif True:\n    time.sleep(600)"],
        ["import time\nquick = False\nif quick:\n    n = 1\nelse:\n    time.sleep(600)"],
        ["import time\nwith open('x') as f:\n    time.sleep(600)"],
        ["import time\ntry:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    pass"],
        ["try:\n    import time\n    time.sleep(600)\nfinally:\n    stop()"],
        ["import time\ntry:\n    run()\nexcept OSError:\n    pass\ntime.sleep(600)"],
        ["import asyncio\nawait asyncio.sleep(600)"],
        ["!sleep 600"],
        ["%matplotlib inline\n!sleep 10m && echo done"],
        ["%%bash\necho start\nsleep 600"],
        ["%%time\nimport time\ntime.sleep(600)"],
        ["import os\nos.system('sleep 600')"],
        ["while True: pass"],
        ["import time\nn = 0\nwhile n < 10:\n    time.sleep(10)\n    n += 1"],
        [tagged("wait = 1"), "import time\ntime.sleep(wait * 60)"],
    ],
)
def test_a_cell_that_is_too_long(cells: list[str | dict[str, Any]]) -> None:
    facts = {"parameters": {"wait": 10}} if len(cells) == 2 and isinstance(cells[0], dict) else {}
    assert limits(*cells, limit_s=60, **facts) == [("error", 60)]


@pytest.mark.parametrize(
    "cells",
    [
        ["import time\nwait = 600\nif quick():\n    wait = 1\ntime.sleep(wait)"],
        ["import time\nwait = 600\nwait //= 100\ntime.sleep(wait)"],
        ["import time\nwait = 600", "from settings import *", "time.sleep(wait)"],
        ["import time\nwait = 600", "%run settings.py", "time.sleep(wait)"],
        ["from lab import sleep\nsleep(600)"],
        ["import time\ntime.sleep = print\ntime.sleep(600)"],
        ["import time\nfor i in range(100):\n    time.sleep(6)\n    if ready():\n        break"],
        ["import time\nfor i in range(100):\n    if cached(i):\n        continue\n    time.sleep(6)"],
        ["import time\nfor i in range(100):\n    if i == 3:\n        break\n    time.sleep(6)"],
        ["import time\nfor i in range(0):\n    time.sleep(600)"],
        ["import time\nif quick:\n    time.sleep(600)"],
        ["import time\ntry:\n    import google.colab\n    time.sleep(600)\nexcept ImportError:\n    pass"],
        ["import asyncio\nasync with asyncio.timeout(5):\n    await asyncio.sleep(600)"],
        ["import asyncio\ntask = asyncio.sleep(600)"],
        ["while True:\n    if ready():\n        break"],
        ["while True:\n    step()"],
        ["import time\nwhile not ready():\n    time.sleep(600)"],
        ["!sleep 600 &"],
        ["!test -f x && sleep 600"],
        ["%%bash\nif true; then\nsleep 600\nfi"],
        ["%%writefile x.py\nimport time\ntime.sleep(600)"],
        ["text = '''\n!sleep 600\n'''"],
        ["import time\nasync def f():\n    time.sleep(600)"],
        [tagged("wait = 600"), "import time\ntime.sleep(wait)"],
    ],
)
def test_a_cell_that_may_be_short(cells: list[str | dict[str, Any]]) -> None:
    facts = {"parameters": {"wait": 10}} if isinstance(cells[0], dict) else {}
    assert not limits(*cells, limit_s=60, **facts)


JOB = """import time
class Job:
    def __init__(self, s):
        self.s = s
    def run(self):
        time.sleep(self.s)
"""
EVENT = "import threading\nevent = threading.Event()\n"


@pytest.mark.parametrize(
    "cells",
    [
        ["import time\ndef main():\n    time.sleep(60)\nmain()"],
        ["import time\ndef wait(s):\n    time.sleep(s)", "wait(60)"],
        ["import time\nPAUSE = 60\ndef wait(s=PAUSE):\n    time.sleep(s)", "PAUSE = 1\nwait()"],
        ["import time\ndef main():\n    time.sleep(60)\nif __name__ == '__main__': main()"],
        ["import time\ndef main():\n    time.sleep(60)\ntry:\n    main()\nexcept KeyboardInterrupt:\n    pass"],
        ["import time\ndef f(n):\n    if n == 0: return\n    time.sleep(3)\n    f(n - 1)\nf(3)"],
        ["import time\ndef main():\n def inner(s):\n  time.sleep(s * k)\n k = 10\n inner(6)\nprint(main())"],
        ["import time\ndef f(a): return a * 3\nx = f(5) + 2\ntime.sleep(x)"],
        ["import time\nwait = lambda s: time.sleep(s)\nwait(30)"],
        ["import asyncio\nasync def main():\n    await asyncio.sleep(30)\nawait main()"],
        ["import time\ndef step(): time.sleep(1)\nfor x in load():\n    if x: break\nfor i in range(500): step()"],
        ["import time\nclass Job:\n    def run(self):\n        time.sleep(60)\nJob().run()"],
        [JOB + "job = Job(60)", "job.run()"],
        [JOB + "class Two(Job): pass\nTwo(60).run()"],
        ["import time\nclass Job:\n    @staticmethod\n    def run(s):\n        time.sleep(s)\nJob.run(60)"],
        ["import time\n[time.sleep(5) for _ in range(4)]"],
        ["import time\nlist(time.sleep(5) for _ in range(4))"],
        ["import time\nt0 = time.time()\nwhile time.time() - t0 < 100: pass"],
        ["import time\nend = time.monotonic() + 100\nwhile time.monotonic() < end:\n    time.sleep(0.1)"],
        ["import threading\nthreading.Event().wait(30)"],
        [EVENT + "event.wait(timeout=30)"],
        ["import time\n%time time.sleep(30)"],
        ["import time\n%timeit -n 1 -r 1 time.sleep(30)"],
    ],
)
def test_a_cell_that_waits_in_what_it_calls(cells: list[str]) -> None:
    assert limits(*cells, limit_s=8) == [("error", 8)]


@pytest.mark.parametrize(
    "cells",
    [
        ["import time\ndef main():\n    if quick(): return\n    time.sleep(60)\nmain()"],
        ["import time\ndef main():\n    for x in range(9):\n        if quick(): return\n    time.sleep(60)\nmain()"],
        ["import time\ndef wait(s=60):\n    time.sleep(s)\nwait(1)\nwait(unknown)"],
        ["import time\ndef steps():\n    time.sleep(60)\n    yield 1\nsteps()"],
        ["import time\nasync def main():\n    time.sleep(60)\ntask = main()"],
        ["import time\n@skip\ndef main():\n    time.sleep(60)\nmain()"],
        ["import threading, time\ndef main():\n    time.sleep(60)\nthreading.Thread(target=main).start()"],
        ["import time\ndef main():\n    time.sleep(60)", "from fast import main\nmain()"],
        ["import time\ns = 60\ndef main():\n    s = f()\n    time.sleep(s)\nmain()"],
        ["import time\ns = 60\ndef short():\n    global s\n    s = 1\nshort()\ntime.sleep(s)"],
        ["import time\ns = 60\ndef short():\n    global s\n    s = 1\nif x: short()\ntime.sleep(s)"],
        ["import time\nwaits = [60]\ndef clear(): waits.clear()\nclear()\nfor s in waits: time.sleep(s)"],
        ["import time\ndef main():\n    load()\n    time.sleep(60)\ntry:\n    main()\nexcept OSError:\n    pass"],
        ["import time\nt0 = time.time()", "train()\nwhile time.time() - t0 < 100: pass"],
        ["import time\nt0 = time.time()\nwhile time.time() - t0 < 100:\n    if ready(): break"],
        ["import time\nt0 = time.time()\nwhile time.time() - t0 < 100:\n    t0 -= 9"],
        ["import time\nt0 = time.time()\nwhile time.time() - t0 < 1: pass"],
        [EVENT + "threading.Timer(1, lambda: event.set()).start()\nevent.wait(30)"],
        ["import time\n(time.sleep(5) for _ in range(4))"],
        ["import time\n[time.sleep(5) for _ in range(4) if ok()]"],
        ["import time\nquick() or time.sleep(30)\ntime.sleep(30) if slow() else None"],
        [JOB + "job, two = Job(60), Job(1)\ntwo.run()"],
        [JOB + "job = Job(60)\njob.s = 1\njob.run()"],
        [JOB + "job = Job(60)\njob.run = print\njob.run()"],
        ["raise SystemExit('no processor')", "import time\ntime.sleep(60)"],
        ["f = lambda: " + "+".join(["f()"] * 99), "f()"],
        ["%time train()\n%timeit x = 1"],
    ],
)
def test_a_cell_that_may_not_wait_in_what_it_calls(cells: list[str]) -> None:
    assert not limits(*cells, limit_s=8)


def timed(start: Any, end: Any, **more: Any) -> dict[str, Any]:
    times = {"iopub.execute_input": start, "shell.execute_reply": end}
    return {"source": "x = 1", "metadata": {"execution": times, **more}}


def test_the_times_that_nbclient_notes() -> None:
    assert limits(timed("2026-01-01T00:00:00.5Z", "2026-01-01T00:01:40.5Z"), limit_s=10) == [("error", 10)]


@pytest.mark.parametrize(
    "cell",
    [
        timed("2026-01-01T00:00:00Z", "2026-01-01T00:00:09Z"),
        timed("2026-01-01T00:00:00", "2026-01-01T00:09:00Z"),
        timed("2026-01-01T00:09:00Z", "2026-01-01T00:00:00Z"),
        timed("2026-01-01T00:00:00Z", "2026-01-01T00:09:00Z", papermill={"duration": 2.0}),
        timed(3, "soon"),
    ],
)
def test_times_within_the_limit_or_no_times(cell: dict[str, Any]) -> None:
    assert not limits(cell, limit_s=10)


@pytest.mark.parametrize("runner", ["nbconvert", "jupyter nbconvert --execute", "nbclient 0.11", "jupyter-execute"])
def test_only_nbmake_reads_the_metadata(runner: str) -> None:
    found = told("notebook-limits", FIVE, execution={"timeout": 60, "allow_errors": True}, limit_s=1, runner=runner)
    assert [f.severity for f in found] == ["error", "info", "info"]
    assert found[0].evidence["timed_out_cell"] == 1 and "does not read execution.timeout" in found[2].message
    assert limits("x = 1", execution={"timeout": 60}, runner=runner) == [("info", None)]
    assert limits(FIVE, execution={"timeout": 60}, limit_s=1, runner="nbval") == [("error", 1)]


def test_a_runner_that_injects_nothing_keeps_the_default() -> None:
    cells = (tagged("wait = 600"), "import time\ntime.sleep(wait)")
    assert ("error", 60) in limits(*cells, limit_s=60, parameters={"wait": 10}, runner="nbmake")
    assert limits(*cells, limit_s=60, parameters={"wait": 10}, runner="papermill") == [("info", 60)]


@pytest.mark.parametrize(
    ("cells", "given", "expected"),
    [
        ([tagged("n = 10"), "n = n + 1\nprint(n)"], {"n": 5}, "6"),
        ([tagged("lr = 1e-4"), "lr = lr * 2\nprint(lr)"], {"lr": 5e-5}, "0.0001"),
        ([tagged("lr = 1e-4"), "lr *= 2\nprint(lr)"], {"lr": 5e-5}, "0.0001"),
        ([tagged("n = 10\nsteps = n * 2"), "print(steps)"], {"n": 100}, "200"),
        ([tagged("n = 10"), "print(n * 2)\nm = n\nn = 3\nprint(n)"], {"n": 5}, "10\n3"),
        ([tagged("n = 10"), "n = 3\nprint(n)"], {"n": 5}, "5"),
        (["n = 10", "n = n + 1\nprint(n)"], {"n": 5}, "6"),
        ([tagged("base = '/data'"), "out = base + '/out'; print(out)"], {"base": "/tmp"}, "/tmp/out"),
        ([tagged("n = 2"), "print('-' * n)"], {"n": 3}, "---"),
        ([tagged("n = 2"), "for i in range(n): print(i)"], {"n": 3}, "0\n1\n2"),
        ([tagged("n = 2"), "if n > 2:\n    n = 9\nprint(n)"], {"n": 3}, "9"),
        ([tagged("n = 2"), "k = n\nif k > f():\n    k = 9\nprint(k)"], {"n": 3}, ""),
        ([tagged("n = 2"), "def f():\n    n = 7\nx = [n for n in (1, 2)]\nprint(n)"], {"n": 3}, "3"),
        ([tagged("n = 2"), "s = 'xx'\nfor i in range(90): s = f'{s}{s}'\nprint(s)"], {"n": 3}, ""),
    ],
)
def test_what_is_printed(cells: list[str | dict[str, Any]], given: dict[str, Any], expected: str) -> None:
    found = told("notebook-parameters", *cells, parameters=given)
    assert {f.evidence["wanted_output"] for f in found} == {expected}


@pytest.mark.parametrize(
    ("hint", "right", "wrong", "needed"),
    [
        ("Optional[int]", 3, "3", "int"),
        ("typing.Optional[int]", None, 2.5, "int"),
        ("Union[float, int]", 1e-4, "1e-4", "float | int"),
        ("Union[int, None]", None, "3", "int"),
        ("'Optional[int]'", 3, "3", "int"),
        ("Annotated[int, 'rows']", 3, "3", "int"),
        ("Optional[List[int]]", [1], "1", "list"),
        ("list[int] | None", [1], 1, "list"),
        ("dict[str, int | str]", {"a": 1}, "a", "dict"),
    ],
)
def test_the_types_inside_a_hint(hint: str, right: Any, wrong: Any, needed: str) -> None:
    def found(value: Any) -> list[Any]:
        cell = tagged(f"k: {hint} = None")
        return [f for f in told("notebook-parameters", cell, parameters={"k": value}) if f.severity == "error"]

    [error] = found(wrong)
    assert error.evidence["given"] == type(wrong).__name__ and error.evidence["needed"] == needed
    assert not found(right)


@pytest.mark.parametrize("hint", ["Optional[Path]", "Union[Path, str]", "Literal['a', 'b']", "Float", "Optional"])
def test_a_hint_that_says_nothing_is_not_judged(hint: str) -> None:
    found = told("notebook-parameters", tagged(f"k: {hint} = None"), parameters={"k": "3"})
    assert [f.severity for f in found] == ["info"]
