"""Faults of single paths, in virtual time: cut, throttled, corrupted; each ends by itself."""

from random import Random

import pytest

from dd_lightning.network.control import UNSHAPED, PathFaults, unshaped
from dd_lightning.network.link import LinkModel
from dd_lightning.network.profiles import Link, WanProfile

pytestmark = pytest.mark.unit

LINK = Link(rtt_ms=100, up_mbit_s=80, down_mbit_s=160, tcp="none", slow_start=False)
NONE = WanProfile("none", ("local",), {}, "local", ("local",))
START = 1000.0


@pytest.fixture
def faults():
    return PathFaults(LINK, "a", START, Random(1))


def path(faults, direction="up"):
    profile = WanProfile("test", ("a", "b"), {("a", "b"): LINK}, "b", ("a",))
    model = LinkModel(profile, seed=1, start=START)
    return model.path("a", direction, faults)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_cut_path_delivers_nothing_until_it_is_over(faults, direction):
    one = path(faults, direction)
    assert one.send(START, 1000) == pytest.approx(START + 0.05, abs=0.001)
    faults.apply({"do": "cut", "learner": "1", "seconds": 4}, START + 1)
    assert START + 5 <= one.send(START + 2, 1000) <= START + 9  # TCP's next attempt
    late = path(faults, direction)  # a connection made meanwhile is cut too
    assert late.send(START + 2, 0) >= START + 5
    assert late.send(START + 20, 1000) == pytest.approx(START + 20.05, abs=0.001)


def test_a_flapping_path_is_cut_each_time(faults):
    command = {"do": "cut", "learner": "1", "seconds": 1, "times": 3, "every_s": 4}
    faults.apply(command, START)
    arrivals = [
        path(faults).send(START + at_s, 1000) - START for at_s in (2, 4.5, 6, 8.5, 10, 12.5)
    ]
    delayed = [
        arrival - at_s > 0.1
        for arrival, at_s in zip(arrivals, (2, 4.5, 6, 8.5, 10, 12.5), strict=True)
    ]
    assert delayed == [False, True, False, True, False, False]


def test_a_throttled_path_has_its_share_and_then_all_of_it(faults):
    one = path(faults)
    faults.apply({"do": "throttle", "learner": "1", "seconds": 5, "share": 0.01}, START)
    took_s = one.send(START, 100_000) - START - 0.05
    assert took_s == pytest.approx(8 * 100_000 * 1.036 / 0.8e6, rel=0.01)  # of 80 Mbit/s
    assert one.ready_at > START + 1  # others of the region are not held up meanwhile
    assert one.send(START, 10_000_000) <= START + 5.05  # what is queued leaves when it is over
    assert one.send(START + 20, 100_000) - START - 20 == pytest.approx(0.06, abs=0.005)


def test_a_corrupt_path_changes_one_byte_of_each_chunk(faults):
    data = bytes(range(256))
    assert faults.alter(data, START) is data
    faults.apply({"do": "corrupt", "learner": "1", "seconds": 2, "flips": None}, START)
    for _ in range(50):
        changed = faults.alter(data, START + 1)
        assert len(changed) == 256 and sum(a != b for a, b in zip(data, changed, strict=True)) == 1
    assert faults.alter(b"", START + 1) == b""  # a close stays one
    assert faults.alter(data, START + 2) is data


def test_flips_are_counted(faults):
    faults.apply({"do": "corrupt", "learner": "1", "seconds": 9, "flips": 3}, START)
    changed = [faults.alter(b"abc", START) != b"abc" for _ in range(5)]
    assert changed == [True] * 3 + [False] * 2


@pytest.mark.parametrize(
    "command",
    [
        {"do": "drop", "seconds": 1},
        {"do": "cut"},
        {"do": "cut", "seconds": 0},
        {"do": "cut", "seconds": 1, "share": 0.1},
        {"do": "throttle", "seconds": 1, "share": 1},
    ],
)
def test_what_is_no_command_is_refused_and_changes_nothing(faults, command):
    with pytest.raises(ValueError, match=r"no command|share is 1"):
        faults.apply(command, START)
    assert faults.cuts == [] and faults.alter(b"abc", START) == b"abc"
    assert path(faults).send(START, 1000) < START + 0.06


def test_a_profile_that_shapes_nothing_can_be_controlled():
    profile = unshaped(NONE)
    assert profile.needs_proxy and profile.link(profile.region_of(3)) == UNSHAPED
