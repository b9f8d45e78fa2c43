"""The heap of events, actors that take turns, random states that follow them, step durations."""

from __future__ import annotations

import itertools
import random
import statistics

import numpy as np
import pytest
import torch

from dd_lightning.simulate.actors import Actor
from dd_lightning.simulate.step_time import StepTimes
from dd_lightning.simulate.virtual_time import (
    BOUNDARIES_LAST,
    MESSAGES_FIRST,
    SYNCER_NEXT,
    Stuck,
    VirtualTime,
)

pytestmark = pytest.mark.unit


def test_events_of_one_instant_happen_by_kind_then_as_asked_for():
    time, seen = VirtualTime(), []
    time.at(1.0, lambda: seen.append("boundary"), BOUNDARIES_LAST)
    time.at(1.0, lambda: seen.append("syncer"), SYNCER_NEXT)
    time.at(1.0, lambda: seen.append("first"), MESSAGES_FIRST)
    time.at(1.0, lambda: seen.append("second"), MESSAGES_FIRST)
    time.at(0.5, lambda: seen.append("earlier"), BOUNDARIES_LAST)
    time.run(lambda: len(seen) == 5)
    assert seen == ["earlier", "first", "second", "syncer", "boundary"]
    assert time.now == 1.0


def test_a_run_that_cannot_end_says_so():
    time = VirtualTime()
    with pytest.raises(Stuck, match="nothing is left"):
        time.run(lambda: False)
    time.at(10.0, lambda: None)
    with pytest.raises(Stuck, match="not over after 5 s"):
        time.run(lambda: False, limit_s=5.0)


def played(*bodies):
    """Actors for functions of (time, park), played until all have ended."""
    time = VirtualTime()
    actors = []
    for index, body in enumerate(bodies):

        def run(body=body, index=index):
            body(time, actors[index].park)

        actors.append(Actor(str(index), run, time))
    for actor in actors:
        actor.start()
    time.run(lambda: all(actor.ended for actor in actors))
    return actors


def test_actors_run_one_at_a_time_in_virtual_time():
    seen = []

    def body(name, step):
        def run(time, park):
            for _ in range(3):
                park(time.now + step)
                seen.append((time.now, name))

        return run

    played(body("slow", 2.0), body("fast", 1.0))
    assert seen == [(1, "fast"), (2, "slow"), (2, "fast"), (3, "fast"), (4, "slow"), (6, "slow")]


def test_a_wake_up_ends_a_wait_once_and_a_stale_one_does_nothing():
    seen = []
    time = VirtualTime()

    def run():
        actor.park(10.0)
        seen.append(time.now)
        actor.park(20.0)
        seen.append(time.now)

    actor = Actor("one", run, time)
    actor.start()
    time.at(3.0, actor.wake)
    time.run(lambda: actor.ended)
    assert seen == [3.0, 20.0]


def test_each_actor_draws_as_if_it_were_alone():
    drawn = {}

    def body(name):
        def run(time, park):
            random.seed(name)
            np.random.seed(name)
            torch.manual_seed(name)
            drawn[name] = []
            for _ in range(4):
                drawn[name].append((random.random(), np.random.rand(), float(torch.rand(()))))
                park(time.now + 1.0)

        return run

    before = random.getstate()
    played(body(1), body(2), body(3))
    together = dict(drawn)
    assert random.getstate() == before  # ours are as they were
    for name in (1, 2, 3):
        drawn.clear()
        body(name)(VirtualTime(), lambda until: None)  # without any actor
        assert drawn[name] == together[name]
    random.setstate(before)


def test_a_killed_actor_runs_no_further_and_an_error_is_kept():
    seen, time = [], VirtualTime()

    def stays():
        try:
            victim.park(100.0)
            seen.append("went on")
        finally:
            seen.append("cleaned up")

    def fails():
        raise KeyError("boom")

    victim, failing = Actor("victim", stays, time), Actor("failing", fails, time)
    victim.start()
    failing.start()
    time.at(1.0, victim.kill)
    time.run(lambda: victim.ended and failing.ended)
    assert seen == ["cleaned up"] and victim.error is None
    assert isinstance(failing.error, KeyError)


def test_durations_have_the_mean_speed_and_spread_that_were_asked():
    for distribution in ("normal", "lognormal", "exponential"):
        times = StepTimes(0.1, distribution, 0.2, (1.0, 0.5))
        for learner, mean in ((0, 0.1), (1, 0.2)):
            drawn = list(itertools.islice(times.of(learner, seed=1), 20_000))
            assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.02)
            assert statistics.stdev(drawn) == pytest.approx(0.2 * mean, rel=0.1)
            assert drawn == list(itertools.islice(times.of(learner, seed=1), 20_000))
    assert set(itertools.islice(StepTimes(0.1).of(0, 1), 5)) == {0.1}


def test_the_least_step_is_known_where_nothing_is_drawn():
    times = StepTimes(0.1, speeds=(0.5, 1.0, 2.0))
    assert [times.least_s(learners) for learners in (1, 2, 3, 4)] == [0.2, 0.1, 0.05, 0.05]
    assert StepTimes(0.1, "normal", 0.2).least_s(2) == 0.0
    assert StepTimes(0.1, trace=(0.1,)).least_s(2) == 0.0


def test_a_measured_trace_goes_round(tmp_path):
    file = tmp_path / "steps.txt"
    file.write_text("0.1\n0.2\n0.3\n")
    values = {"step_s": 0.05, "distribution": "constant", "jitter": 0.0, "trace": str(file)}
    drawn = list(itertools.islice(StepTimes.from_config(values).of(0, 1), 6))
    assert drawn[:3] == drawn[3:] and sorted(drawn[:3]) == [0.1, 0.2, 0.3]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step_s": 0}, "simulate.step_s is 0"),
        ({"distribution": "uniform"}, "simulate.distribution is 'uniform'"),
        ({"jitter": 1.0, "distribution": "normal"}, "simulate.jitter is 1.0"),
        ({"jitter": 0.1}, "has no effect"),
        ({"step_s": None}, "simulate.step_s is None; allowed: a number"),
        ({"jitter": "much"}, "simulate.jitter is 'much'; allowed: a number"),
        ({"jitter": -0.1, "distribution": "normal"}, "simulate.jitter is -0.1"),
        ({"jitter": float("nan"), "distribution": "normal"}, "simulate.jitter is nan"),
        ({"speeds": [0.0]}, "simulate.speeds"),
        ({"speeds": []}, r"simulate.speeds is \[\]; allowed"),
        ({"speeds": "fast"}, "simulate.speeds is 'fast'; allowed"),
        ({"speeds": [1, None]}, "simulate.speeds is .*; allowed: null or a list of numbers"),
        ({"trace": 3}, "simulate.trace is 3; allowed"),
        ({"speeds": 2}, "simulate.speeds is 2"),
        ({"trace": "nowhere.txt"}, "simulate.trace is 'nowhere.txt'"),
    ],
)
def test_wrong_settings_are_refused_by_name(change, said):
    values = {"step_s": 0.05, "distribution": "constant", "jitter": 0.0} | change
    with pytest.raises(ValueError, match=said):
        StepTimes.from_config(values)


def test_the_steps_that_a_run_has_logged_are_played_by_the_learner_that_made_them(tmp_path):
    for learner in ("0", "1", "10", "2"):
        folder = tmp_path / "learners" / learner
        folder.mkdir(parents=True)
        seconds = (0.01 * (int(learner) + 1), 0.5)
        (folder / "steps.csv").write_text("".join(f"7,{value},0.001\n" for value in seconds))
    values = {"step_s": 0.1, "distribution": "constant", "jitter": 0.0, "trace": str(tmp_path)}
    times = StepTimes.from_config(values)
    for index, learner in enumerate((0, 1, 2, 10)):
        first = pytest.approx([0.01 * (learner + 1), 0.5, 0.01 * (learner + 1)])
        assert list(itertools.islice(times.of(index, 1), 3)) == first


def test_a_folder_without_a_step_log_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"without learners/\*/steps.csv; allowed: that of a run"):
        StepTimes.from_config(
            {"step_s": 1, "distribution": "constant", "jitter": 0, "trace": str(tmp_path)}
        )
