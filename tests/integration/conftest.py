"""Fixtures that several integration tests share."""

import contextlib

import pytest

from tests.memory_syncer import MemorySyncer


@pytest.fixture
def syncer(monkeypatch):
    """Makes a syncer of a configuration; every strategy of the test then reaches it."""
    with contextlib.ExitStack() as stack:

        def start(config, **options):
            running = MemorySyncer(config, **options)
            dialer = "dd_lightning.learner.beginning.dialer"
            monkeypatch.setattr(dialer, lambda *_, key: running.dial)
            return stack.enter_context(running.running())

        yield start
