"""Steps are padded to the floor, and only to it."""

import time

import pytest

from dd_lightning.launch.step_floor import StepFloor

pytestmark = pytest.mark.unit


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `sleep` and the test move."""

    class Clock:
        now = 100.0

        def sleep(self, seconds):
            assert seconds >= 0
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


def test_fast_steps_end_on_the_grid_and_slow_ones_are_not_caught_up(clock):
    floor = StepFloor(0.05)
    ends = []
    for work_s in (0.01, 0.04, 0.12, 0.01):
        floor.on_train_batch_start(None)
        clock.now += work_s
        floor.on_train_batch_end(None)
        ends.append(round(clock.now - 100, 6))
    assert ends == [0.05, 0.1, 0.22, 0.27]


@pytest.mark.parametrize("floor_s", [0, -1])
def test_a_floor_must_be_positive(floor_s):
    with pytest.raises(ValueError, match="floor_s"):
        StepFloor(floor_s)
