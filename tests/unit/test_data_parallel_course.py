"""The course of a data-parallel job: durations, the ring, and what each failure loses."""

from itertools import repeat

import pytest

from dd_lightning.chaos.plan import FaultPlan, RunShape
from dd_lightning.launch.data_parallel import DataParallel
from dd_lightning.network.link import BITS_PER_BYTE
from dd_lightning.network.profiles import WanProfile
from dd_lightning.simulate.data_parallel_faults import FaultTimes
from dd_lightning.simulate.data_parallel_ring import Ring, chunks
from dd_lightning.simulate.data_parallel_time import Course, JobLost

pytestmark = pytest.mark.unit

LEASE_S, RESTART_S, DOWNSCALE_S, UPSCALE_S = 10.0, 5.0, 3.0, 2.0
MAX_STEPS = 100
NONE = {"name": "none", "regions": ["here"], "syncer_region": "here"}
IDEAL = {"tcp": "none", "slow_start": False, "rtt_ms": 40, "mbit_s": 80}


def network(regions="ab", learner_regions=None, pairs=None, **link):
    pairs = pairs or [f"{a}-{b}" for a in regions for b in regions if a < b]
    links = {pair: {**IDEAL, **link} for pair in pairs}
    return WanProfile.from_config(
        {
            "name": "test",
            "regions": list(regions),
            "syncer_region": regions[0],
            "learner_regions": learner_regions,
            "links": links,
        }
    )


class Notes:
    """A witness that keeps everything."""

    def __init__(self):
        self.rows = []
        self.wire = {}

    def joined(self, member, now, state_from, step):
        self.rows.append(("joined", member, round(now, 6), state_from, step))

    def died(self, member, now, cause):
        self.rows.append(("died", member, round(now, 6), cause))

    def stands(self, members, now):
        self.rows.append(("stands", tuple(members), round(now, 6)))

    def goes_on(self, members):
        self.rows.append(("goes on", tuple(members)))

    def sent(self, wire):
        for member, (up, down) in wire.items():
            before = self.wire.get(member, (0, 0))
            self.wire[member] = (before[0] + up, before[1] + down)


def course(*faults, members=3, elastic=False, seconds=1.0, profile=None, elements=3000, **chaos):
    """A job of members that compute one second a step each, by default without a network."""
    shape = RunShape(learners=tuple(str(k) for k in range(members)), max_steps=MAX_STEPS)
    values = {"name": "plan", "faults": list(faults), "not_before": "start", **chaos}
    plan = FaultPlan.load(values, shape)
    seconds = [seconds] * members if isinstance(seconds, float) else seconds
    notes = Notes()
    job = Course(
        DataParallel(elastic, DOWNSCALE_S, UPSCALE_S),
        [repeat(one) for one in seconds],
        Ring(profile or WanProfile.from_config(NONE), 1),
        FaultTimes(plan, MAX_STEPS),
        notes,
        elements,
        LEASE_S,
        RESTART_S,
    )
    job.begin("cold")
    return job, notes


def steps(job, count):
    return [job.next_step() for _ in range(count)]


def test_a_step_lasts_as_long_as_the_slowest_member_computes():
    job, _ = course(seconds=[1.0, 2.5, 1.5])
    made = steps(job, 4)
    assert [step.ended_s for step in made] == [2.5, 5.0, 7.5, 10.0]
    assert made[0].compute_s == {0: 1.0, 1: 2.5, 2: 1.5}
    assert made[0].members == (0, 1, 2) and made[0].reduce_s == 0.0


@pytest.mark.parametrize("members", [2, 3, 5])
def test_the_ring_takes_what_the_closed_form_says_on_an_ideal_link(members):
    # every member in a region of its own, all paths alike: nothing is shared
    regions = "abcde"[:members]
    elements = 60_000
    job, notes = course(members=members, profile=network(regions), elements=elements)
    step = job.next_step()
    num_bytes = 4 * elements
    phase_s = num_bytes / members * BITS_PER_BYTE / 80e6 + 0.040 / 2
    assert step.reduce_s == pytest.approx(2 * (members - 1) * phase_s)
    assert step.ended_s == pytest.approx(1.0 + step.reduce_s)
    sent = 2 * (members - 1) * num_bytes // members
    assert notes.wire == dict.fromkeys(range(members), (sent, sent))


def test_bytes_are_counted_without_a_network_too_and_chunks_hold_the_whole_gradient():
    job, notes = course(members=3, elements=1000)
    assert job.next_step().ended_s == 1.0
    assert chunks(1000, 3) == [1332, 1332, 1336]
    up, down = (sum(way) for way in zip(*notes.wire.values(), strict=True))
    assert up == down == 2 * 2 * 4000
    assert all(up == pytest.approx(2 * 2 / 3 * 4000, rel=0.01) for up, _ in notes.wire.values())


def test_the_ring_goes_by_regions_and_reaches_a_region_without_a_path_by_the_syncers():
    profile = network("sab", learner_regions=["a", "b"], pairs=["a-s", "b-s"])
    ring = Ring(profile, 1)
    assert ring.order([0, 1, 2, 3]) == [0, 2, 1, 3]
    by_hub = ring.all_reduce(0.0, [0, 1], chunks(2000, 2)).ended_s
    direct = Ring(network("ab"), 1).all_reduce(0.0, [0, 1], chunks(2000, 2)).ended_s
    assert by_hub == pytest.approx(2 * direct)


def test_profiles_say_what_an_all_reduce_meets():
    ideal = Ring(network("ab"), 1).all_reduce(0.0, [0, 1], chunks(50_000, 2)).ended_s
    for worse in ({"jitter_ms": 5}, {"loss": 0.05, "tcp": "cubic"}, {"slow_start": True,
                  "tcp": "cubic"}, {"rtt_ms": 80}):  # fmt: skip
        slow = Ring(network("ab", **worse), 1).all_reduce(0.0, [0, 1], chunks(50_000, 2)).ended_s
        assert slow > 1.05 * ideal, worse


# ---------------------------------------------------------------- failures


def test_a_member_killed_costs_all_the_steps_since_the_checkpoint():
    job, notes = course({"kind": "kill", "target": 1, "at_s": 7.5})
    steps(job, 4)
    job.checkpointed()
    steps(job, 3)
    with pytest.raises(JobLost) as lost:
        job.next_step()
    assert lost.value.step == 4
    # step 8 was under way; all stand still until the member's process is back
    assert job.now == 7.5 + RESTART_S
    assert ("died", 1, 7.5, "killed") in notes.rows
    job.begin("checkpoint")
    assert notes.rows[-3:] == [("joined", k, 12.5, "checkpoint", 4) for k in range(3)]
    again = job.next_step()
    assert (again.number, again.began_s, again.members) == (5, 12.5, (0, 1, 2))


def test_elastic_loses_the_step_under_way_and_stands_still_twice():
    job, notes = course({"kind": "kill", "target": 1, "at_s": 7.5}, elastic=True)
    steps(job, 7)
    eighth = job.next_step()
    assert (eighth.number, eighth.began_s, eighth.members) == (8, 7.5 + DOWNSCALE_S, (0, 2))
    made = [eighth, *steps(job, 4)]
    # back after 7.5 + 5 s, when the next step begins
    assert [step.members for step in made[:2]] == [(0, 2)] * 2
    assert (made[2].began_s, made[2].members) == (12.5 + UPSCALE_S, (0, 1, 2))
    assert ("joined", 1, 14.5, "peer", 9) in notes.rows
    assert [step.number for step in made] == [8, 9, 10, 11, 12]


def test_elastic_without_survivors_goes_back_to_the_checkpoint_with_whoever_is_back_first():
    job, notes = course(
        {"kind": "kill", "target": 1, "at_s": 3.5},
        {"kind": "kill", "target": 0, "at_s": 5.5},
        members=2,
        elastic=True,
    )
    steps(job, 2)
    job.checkpointed()
    steps(job, 1)
    with pytest.raises(JobLost) as lost:
        job.next_step()
    assert lost.value.step == 2
    assert job.now == 8.5  # the first one; the other follows at 10.5
    job.begin("checkpoint")
    assert [(step.number, step.members) for step in steps(job, 3)] == [
        (3, (1,)),
        (4, (1,)),
        (5, (0, 1)),
    ]
    assert ("joined", 0, 10.5 + UPSCALE_S, "peer", 4) in notes.rows


def test_a_short_stop_holds_everybody_up_and_loses_nothing():
    job, notes = course({"kind": "pause", "target": 2, "at_s": 3.25, "seconds": 4})
    made = steps(job, 5)
    assert [step.ended_s for step in made] == [1, 2, 3, 8, 9]
    assert not [row for row in notes.rows if row[0] == "died"]


@pytest.mark.parametrize("kind", ["pause", "partition"])
def test_silence_longer_than_the_lease_is_a_loss(kind):
    fault = {"kind": kind, "target": 2, "at_s": 3.25, "seconds": 30}
    job, notes = course(fault, elastic=True)
    made = steps(job, 4)
    assert ("died", 2, 3.25 + LEASE_S, "lease") in notes.rows
    assert made[3].began_s == 3.25 + LEASE_S + DOWNSCALE_S and made[3].members == (0, 1)
    job, _ = course(fault)
    steps(job, 3)
    with pytest.raises(JobLost):
        job.next_step()
    assert job.now == 3.25 + 30 + RESTART_S  # all begin anew once it is reachable


def test_a_short_cut_holds_up_the_all_reduce():
    profile = network("abc")
    undisturbed, _ = course(profile=profile)
    job, notes = course({"kind": "partition", "target": 2, "at_s": 0.5, "seconds": 3},
                        profile=profile)  # fmt: skip
    first, plain = job.next_step(), undisturbed.next_step()
    assert 3.5 < first.ended_s < 3.5 + 2 * 3 + plain.ended_s  # TCP's timeouts double
    assert not [row for row in notes.rows if row[0] == "died"]


def test_a_slow_member_slows_everybody_down():
    job, _ = course({"kind": "slow", "target": 0, "at_s": 0.5, "seconds": 6, "factor": 3})
    assert [step.ended_s for step in steps(job, 4)] == [1, 4, 7, 8]


def test_the_syncers_faults_do_nothing_and_are_told():
    job, _ = course({"kind": "kill_syncer", "at_s": 1.5})
    assert [step.ended_s for step in steps(job, 3)] == [1, 2, 3]
    (row,) = job.faults.rows(3.0)
    assert row["fired"] is None and row["why"] == "there is no syncer"
    assert job.faults.unfired() == []


def test_faults_wait_for_a_checkpoint_and_for_their_step():
    job, _ = course({"kind": "pause", "target": 0, "at_step": 2, "seconds": 1},
                    not_before="first_checkpoint")  # fmt: skip
    steps(job, 4)
    job.checkpointed()
    assert job.next_step().ended_s == 6.0
    job, _ = course({"kind": "pause", "target": 0, "at_step": 2, "seconds": 1})
    assert [step.ended_s for step in steps(job, 3)] == [1, 2, 4]


def test_the_poisson_process_stands_still_while_the_job_does():
    drawn = {"poisson": {"mean_s": 9.0, "faults": [{"kind": "kill"}]}, "faults": []}
    job, notes = course(elastic=True, **drawn)
    steps(job, 60)
    deaths = [row for row in notes.rows if row[0] == "died"]
    stood_s = job.now - 60.0
    assert len(deaths) >= 3
    assert stood_s > 2 * DOWNSCALE_S
    # a death for each draw within the time of the steps, made ones and those broken off
    times = [at_s for at_s, _ in zip(_drawn(drawn), range(40), strict=False)]
    assert sum(at_s < 55 for at_s in times) <= len(deaths) <= sum(at_s < 75 for at_s in times)


def _drawn(values):
    shape = RunShape(learners=("0", "1", "2"), max_steps=MAX_STEPS)
    plan = FaultPlan.load({"name": "plan", "not_before": "start", **values}, shape)
    return (at_s for at_s, _ in plan.poisson.draw(9.0))


@pytest.mark.parametrize("elastic", [True, False])
@pytest.mark.parametrize("again_s", [2.0, 6.5, 7.0])  # away; back, but not taken back yet
def test_a_planned_fault_waits_for_a_member_that_is_away(elastic, again_s):
    kills = [{"kind": "kill", "target": 0, "at_s": at_s} for at_s in (1.5, again_s)]
    kills.append({"kind": "kill", "target": 1, "at_s": 4.0})
    job, notes = course(*kills, elastic=elastic)
    while job.step < 20:
        try:
            job.next_step()
        except JobLost:
            job.begin("checkpoint")
    died = [row[2] for row in notes.rows if row[:2] == ("died", 0)]
    assert died[0] == 1.5 and len(died) == 2 and died[1] >= 1.5 + RESTART_S
    assert job.faults.unfired() == []


def test_a_stop_that_outlasts_a_standing_still_holds_up_the_step_after_it():
    kill = {"kind": "kill", "target": "0", "at_s": 1.5}
    pause = {"kind": "pause", "target": "1", "at_s": 4.0, "seconds": 3.0}
    job, _ = course(kill, pause, elastic=True)
    first, second = steps(job, 2)
    assert first.ended_s == 1.0
    assert second.ended_s == 4.0 + 3.0 + 1.0 > 1.5 + DOWNSCALE_S + 1.0


def test_what_was_sent_in_an_all_reduce_that_was_lost_is_counted():
    profile, elements = network("ab"), 1_000_000
    whole = 4 * elements
    job, notes = course(
        {"kind": "kill", "target": "0", "at_s": 1.1}, members=2, profile=profile, elements=elements
    )
    with pytest.raises(JobLost):
        job.next_step()
    assert all(0 < up < whole for up, _ in notes.wire.values()) and len(notes.wire) == 2
