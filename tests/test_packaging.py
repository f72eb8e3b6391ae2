"""environment.yml, constraints and the Makefile agree with pyproject.toml, the single source."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from eagle3lab.core.paths import repository

ROOT = repository()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
TESTED = ("lab", "dev", "docs", "browser")
"""Extras whose exact versions constraints/lab.txt holds."""


def canonical(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", requirement).group()).lower()


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints/lab.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all("==" in line for line in lines), "constraints hold exact pins only"
    return {canonical(line): line.partition("==")[2] for line in lines}


def test_environment_installs_the_extras_and_nothing_else() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    conda = [one for one in environment["dependencies"] if isinstance(one, str)]
    assert conda == ["python=3.11", "pip"], "torch from conda beside torch from pip would be two CUDAs"
    (pip,) = [one["pip"] for one in environment["dependencies"] if isinstance(one, dict)]
    assert len(pip) == 1
    extras = re.fullmatch(r"-e \.\[([a-z,]+)\]", pip[0]).group(1).split(",")
    assert extras == ["lab", "dev", "sglang"] and set(extras) <= set(EXTRAS)


def test_metadata_has_lower_bounds_only() -> None:
    for requirement in [*PROJECT["dependencies"], *(one for extra in EXTRAS.values() for one in extra)]:
        assert ">=" in requirement and "==" not in requirement and "<" not in requirement, requirement


def test_every_requirement_is_pinned_and_its_pin_is_allowed() -> None:
    found = pins()
    for requirement in [*PROJECT["dependencies"], *(one for extra in TESTED for one in EXTRAS[extra])]:
        name, bound = canonical(requirement), requirement.partition(">=")[2]
        assert name in found, f"{name} is not pinned in constraints/lab.txt"
        assert version(found[name]) >= version(bound), requirement
    assert found["torch"] == "2.13.0" and not any("+" in pin for pin in found.values())


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def test_a_wrong_python_is_one_line_and_exit_2(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\ncase "$2" in *platform*) echo 3.9.2;; *) echo False;; esac\n')
    old.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(old), "VENV": str(tmp_path / "venv")}
    done = subprocess.run(["scripts/install.sh"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "venv").exists()
    assert len(done.stderr.splitlines()) == 1 and "3.9.2" in done.stderr and "next: make install" in done.stderr


@pytest.mark.parametrize(
    "target",
    ["install", "run", "test", "test-browser", "test-engines", "test-all", "lint", "docs", "figures"],
)
def test_the_makefile_has_its_targets(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "scripts/install.sh" in done.stdout


def test_downloads_are_tried_three_times(tmp_path: Path) -> None:
    """A pip that always fails is called three times, then the script gives up with its last command named."""
    calls = tmp_path / "calls"
    fake = tmp_path / "python3.11"
    fake.write_text(
        f'#!/bin/sh\ncase "$*" in *version_info*) echo True;; *--version*) echo Python 3.11.9;; '
        f'*"-m venv"*) mkdir -p "$4/bin"; cp "$0" "$4/bin/python";; *pip*) echo x >> {calls}; exit 1;; esac\n'
    )
    fake.chmod(0o755)
    sleep = tmp_path / "sleep"
    sleep.write_text("#!/bin/sh\n")
    sleep.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": str(fake), "VENV": str(tmp_path / "venv")}
    done = subprocess.run(["scripts/install.sh"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and calls.read_text().count("x") == 3
    assert "failed three times" in done.stderr.splitlines()[-1]
