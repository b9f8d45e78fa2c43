"""The syncer that the learners of a cell reach."""

import pytest

from tests.conformance.ranks import Ranks
from tests.memory_syncer import memory_syncers

for name in ("cells", "group_runs", "place", "runs", "scenarios"):  # where a cell's assertions are
    pytest.register_assert_rewrite(f"tests.conformance.{name}")


@pytest.fixture
def syncer(monkeypatch):
    """Makes a syncer of a configuration; every strategy of the test then reaches it."""
    with memory_syncers(monkeypatch) as start:
        yield start


@pytest.fixture(scope="session")
def two_processes():
    """For all groups of all tests."""
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture
def ranks(two_processes):
    """There: no learner of the test waits for their start."""
    two_processes.start()
    return two_processes
