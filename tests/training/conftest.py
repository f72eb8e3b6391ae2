"""What several tests of the training start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training import jobs


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """States of the tiny target, in a folder."""
    return jobs.tiny_store(tmp_path_factory.mktemp("states") / "states")
