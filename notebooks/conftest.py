"""Makes `pytest --nbmake notebooks` strict: see `eagle3lab.runs.nbmake_guard`."""

from eagle3lab.runs.nbmake_guard import pytest_configure

__all__ = ["pytest_configure"]
