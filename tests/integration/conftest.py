"""Fixtures that several integration tests share."""

import pytest

from tests.memory_syncer import memory_syncers


@pytest.fixture
def syncer(monkeypatch):
    """Makes a syncer of a configuration; every strategy of the test then reaches it."""
    with memory_syncers(monkeypatch) as start:
        yield start
