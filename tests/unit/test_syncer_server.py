"""The server thread's loop on a scripted channel and core."""

from __future__ import annotations

import types

import pytest

from dd_lightning.protocol.actions import Done
from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.protocol.messages import Goodbye
from dd_lightning.protocol.tape import TapeWriter
from dd_lightning.syncer.server import SyncerServer
from dd_lightning.syncer.stream import RoundStream
from dd_lightning.syncer.telemetry import TapeFeed
from dd_lightning.transport.frames import Arrival

pytestmark = pytest.mark.unit
SLOW_S = 6.0  # that the core takes for each message here


class SlowCore:
    """Notes when it is told of what; every message takes it long."""

    def __init__(self, clock: list[float]) -> None:
        self.config = SyncerConfig()
        self.run = types.SimpleNamespace(
            merges=0, initialized=False, sessions={"s": ("0", 1)}, layout=None
        )
        self.told: list[tuple[str, float]] = []
        self._clock = clock
        self._done = False

    def receive(self, session, message, now, payload, peer) -> None:
        self.told.append(("message", now))
        self._clock[0] += SLOW_S

    def tick(self, now) -> None:
        self.told.append(("tick", now))

    def next_deadline(self, now) -> None:
        return None

    def take(self) -> list:
        if len(self.told) < 5 or self._done:
            return []
        self._done = True
        return [Done("finished", "")]

    def status(self, now) -> dict:
        return {"learners": {}}


class Script:
    """Two messages at the first poll, one at each later one."""

    def __init__(self) -> None:
        self.polls = 0

    def poll(self, timeout_s) -> list:
        self.polls += 1
        message = Arrival("s", Goodbye(generation=1, reason=""), None, 1)
        return [message] * (2 if self.polls == 1 else 1)


def test_leases_are_looked_at_only_as_of_the_last_time_the_channel_was_read(tmp_path) -> None:
    clock = [100.0]
    core = SlowCore(clock)
    tape = TapeWriter(tmp_path / "tape.jsonl")
    server = SyncerServer(
        core, Script(), RoundStream(1), TapeFeed(tape), lambda: clock[0], tmp_path
    )
    server.start()
    assert server.join(10.0)
    tape.close()
    assert server.error is None
    # by the first tick 12 s have gone by, more than a lease, but no later report was read yet
    assert core.told[:3] == [("message", 100.0), ("message", 100.0), ("tick", 100.0)]
    assert core.told[3:5] == [("message", 112.0), ("tick", 112.0)]
