"""The syncer that the learners of a cell reach."""

import pytest

from tests.memory_syncer import memory_syncers

for name in ("cells", "runs", "scenarios"):  # where a cell's assertions are
    pytest.register_assert_rewrite(f"tests.conformance.{name}")


@pytest.fixture
def syncer(monkeypatch):
    """Makes a syncer of a configuration; every strategy of the test then reaches it."""
    with memory_syncers(monkeypatch) as start:
        yield start
