"""Processes of a simulated run that are frozen, killed, told to leave; who comes and goes when."""

from __future__ import annotations

import errno
import signal

import pytest

from dd_lightning.simulate.actors import Actor
from dd_lightning.simulate.faults import VirtualDisk
from dd_lightning.simulate.presence import Move, Presence
from dd_lightning.simulate.processes import Pausable, VirtualChildren
from dd_lightning.simulate.virtual_time import VirtualTime
from dd_lightning.transport.frames import SILENCE_S, Disconnected
from tests.virtual_links import Links, profile

pytestmark = pytest.mark.unit


@pytest.fixture
def time():
    return VirtualTime()


def worker(time, seconds=1.0, steps=5):
    """An actor that makes steps, and the times at which they ended."""
    ends = []

    def run():
        for _ in range(steps):
            actor.work(seconds)
            ends.append(round(time.now, 9))

    actor = Actor("worker", run, time)
    return actor, ends


def test_a_frozen_actor_does_the_rest_of_its_step_afterwards(time):
    actor, ends = worker(time)
    actor.start()
    time.at(1.4, actor.freeze)
    time.at(1.7, actor.thaw)  # within a step
    time.at(3.0, actor.freeze)
    time.at(6.0, actor.thaw)  # beyond its planned end
    time.run(lambda: actor.ended)
    assert ends == [1.0, 2.3, 6.3, 7.3, 8.3]


def test_a_frozen_actor_can_be_killed_and_never_goes_on(time):
    actor, ends = worker(time)
    actor.start()
    time.at(1.4, actor.freeze)
    time.at(2.0, actor.kill)
    time.at(3.0, actor.thaw)
    time.play(20.0)
    assert actor.ended and actor.error is None and ends == [1.0]


def test_who_dies_by_its_own_hand_cannot_wait_any_more(time):
    seen = []

    def run():
        try:
            actor.park(1.0)
            actor.die()
        finally:
            try:
                actor.park(5.0)  # as a closing strategy might
            finally:
                seen.append(time.now)

    actor = Actor("one", run, time)
    actor.start()
    time.run(lambda: actor.ended)
    assert seen == [1.0] and actor.error is None


def test_time_is_played_up_to_a_moment(time):
    seen = []
    for when in (1.0, 2.0, 3.0):
        time.at(when, lambda when=when: seen.append(when))
    time.play(2.0)
    assert seen == [1.0, 2.0] and time.now == 2.0
    time.play(10.0, lambda: len(seen) == 3)
    assert time.now == 3.0  # over before its end
    time.play(10.0)
    assert time.now == 10.0


def test_a_full_disk_refuses_as_the_system_does():
    disk = VirtualDisk()
    disk.check()
    disk.fill()
    with pytest.raises(OSError, match="No space left") as raised:
        disk.check()
    assert raised.value.errno == errno.ENOSPC
    disk.free()
    disk.check()


class Process(Pausable):
    """Notes what is done to it."""

    def __init__(self):
        super().__init__("learner 0", 1)
        self.done, self.code = [], None

    error = None

    def exit_code(self):
        return self.code

    def kill(self):
        self.done.append("kill")

    def terminate(self):
        self.done.append("terminate")

    def pause(self, seconds):
        self.done.append(seconds)

    def resume(self):
        self.done.append("resume")


def test_children_are_found_by_role_and_paused_ones_go_on_at_the_end():
    process, commands = Process(), []
    children = VirtualChildren({"learner 0": process}.get, commands.append)
    assert children.pid("learner 0") == 1 and children.pid("learner 1") is None
    children.pause("learner 0", 3.0)
    children.resume()
    children.resume()
    children.signal("learner 0", signal.SIGKILL)
    assert process.done == [3.0, "resume", "kill"]
    process.code = 0
    assert children.pid("learner 0") is None
    assert children.proxy({"do": "cut"}) and commands == [{"do": "cut"}]


def test_a_stopped_learner_gives_no_sign_of_life_and_hears_of_it_when_it_goes_on():
    for links in (Links(profile()), Links(profile(), controlled=("0", "1", "2"))):
        session = links.connect()
        links.play(1.0)
        session.stop()
        links.play(1.0 + SILENCE_S - 1.5)
        assert session.open_at_syncer
        links.play(1.0 + SILENCE_S + 1.0)
        lost = [event for _, event in links.at_syncer if isinstance(event, Disconnected)]
        assert len(lost) == 1 and "nothing has come" in lost[0].reason
        assert not session.open_at_syncer


def test_a_short_stop_costs_no_connection():
    links = Links(profile(), controlled=("0", "1", "2"))
    session = links.connect()
    session.stop()
    links.play(SILENCE_S - 2.0)
    session.go_on()
    links.play(3 * SILENCE_S)
    assert session.open_at_syncer and session.open_at_learner


def presence(learners=2, slots=4, joins=None, leaves=None, restart_s=4.0):
    return Presence.from_config(
        {
            "learners": learners,
            "algorithm": {"max_learners": slots},
            "simulate": {"restart_s": restart_s, "joins": joins, "leaves": leaves},
        }
    )


def test_learners_come_and_go_in_turn():
    assert presence().first == ("0", "1") and presence().moves == ()
    found = presence(joins={1: 5, 3: [1, 9]}, leaves={3: 4, 0: 2})
    assert found.first == ("0",)
    assert found.moves == (
        Move(1.0, "3", "join"),
        Move(2.0, "0", "leave"),
        Move(4.0, "3", "leave"),
        Move(5.0, "1", "join"),
        Move(9.0, "3", "join"),
    )
    assert presence(leaves={0: 2}, joins={0: 3}).first == ("0", "1")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"joins": {4: 1}}, "simulate.joins has learner '4'; allowed: 0 to 3"),
        ({"joins": {"x": 1}}, "simulate.joins has learner 'x'"),
        ({"leaves": {0: -1}}, "simulate.leaves.0 is -1"),
        ({"leaves": {3: 1}}, "simulate.leaves.3 is 1 s, when the learner is not there"),
        ({"joins": {3: [1, 2]}}, "simulate.joins.3 is 2 s, when the learner is there already"),
        ({"restart_s": float("inf")}, "simulate.restart_s is inf"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change, said):
    with pytest.raises(ValueError, match=said):
        presence(**change)
