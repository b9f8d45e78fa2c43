"""Attempts at a channel: short, where the syncer was; patience with a silent path."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dd_lightning.learner.dialing import (
    FIRST_S,
    GENEROUS_EVERY,
    LISTEN_S,
    LONGEST_S,
    MOST_PATIENCE_S,
    MOST_S,
    SHORTEST_S,
    Bounds,
    Dialer,
)
from dd_lightning.protocol.config import Timeouts

pytestmark = pytest.mark.unit


class World:
    """A rendezvous and a syncer; `answers` says what happens at the next attempts."""

    def __init__(self, handshake_s: float = 0.2) -> None:
        self.now, self.handshake_s = 0.0, handshake_s
        self.looked: list[float] = []  # listened so long first
        self.bounds: list[Bounds] = []
        self.where: list[str] = []
        self.at = "here"
        self.error: OSError | None = None
        self.dialer = Dialer(self._look_up, self._open, lambda: self.now)

    def _look_up(self, timeout_s, listen_s):
        self.looked.append(listen_s)
        return self.at

    def _open(self, found, silence_s, bounds):
        self.where.append(found)
        self.bounds.append(bounds)
        if self.error is not None:
            raise self.error
        if found != self.at:
            raise ConnectionRefusedError
        self.now += self.handshake_s
        return SimpleNamespace(was_silent=False)

    def attempts(self, count: int, error: OSError) -> None:
        self.error = error
        for _ in range(count):
            with pytest.raises(type(error)):
                self.dialer()
        self.error = None


def test_the_first_attempt_is_patient_and_later_ones_are_short() -> None:
    world = World(0.1)
    world.dialer()
    world.attempts(5, TimeoutError())
    assert world.bounds[0] == Bounds(FIRST_S, FIRST_S)
    assert world.looked == [0.0]  # not again: the rendezvous may be as dead as the path
    assert world.bounds[1] == Bounds(SHORTEST_S, SHORTEST_S)
    assert [one.dial_s for one in world.bounds[1:]] == [SHORTEST_S, *[LONGEST_S] * 4]
    assert [one.whole_s for one in world.bounds[1:]] == [SHORTEST_S, LONGEST_S, *[MOST_S] * 3]


def test_a_long_way_gets_the_time_its_handshake_takes_but_no_longer_for_tcp() -> None:
    world = World(0.9)
    world.dialer()
    world.attempts(1, TimeoutError())
    assert world.bounds[1] == Bounds(LONGEST_S, pytest.approx(2.7))


def test_whoever_closes_is_not_the_syncer_any_more() -> None:
    world = World()
    world.dialer()
    world.at = "there"
    world.dialer()
    assert world.where == ["here", "here", "there"]
    assert world.looked == [0.0, LISTEN_S]


def test_after_many_attempts_without_an_answer_the_rendezvous_is_asked() -> None:
    world = World()
    world.dialer()
    world.attempts(GENEROUS_EVERY - 1, TimeoutError())
    assert len(world.looked) == 1
    world.at = "there"
    world.dialer()
    assert len(world.looked) == 2 and world.where[-1] == "there"
    assert world.bounds[-1] == Bounds(FIRST_S, FIRST_S)


def test_a_refused_key_is_not_looked_up_again() -> None:
    world = World()
    world.dialer()
    world.attempts(1, PermissionError())
    assert len(world.looked) == 1


def test_patience_doubles_with_each_false_alarm_until_an_alarm_was_true() -> None:
    world = World()
    world.dialer.follow(lambda: Timeouts(silence=3.0))
    seen = []
    for _ in range(4):
        channel = world.dialer()
        seen.append(world.dialer.patience_s())
        channel.was_silent = True  # the path answers the next attempt at once
    assert seen == [3.0, 6.0, MOST_PATIENCE_S, MOST_PATIENCE_S]
    world.attempts(1, TimeoutError())
    world.dialer()
    assert world.dialer.patience_s() == 3.0


def test_a_connection_that_ended_otherwise_is_no_false_alarm() -> None:
    world = World()
    world.dialer()
    world.dialer()
    assert world.dialer.patience_s() == Timeouts().silence
