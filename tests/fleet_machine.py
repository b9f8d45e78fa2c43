"""Any order of faults on a fleet in virtual time, as a hypothesis state machine.

The real SyncerCore, LearnerLinks and LearnerLedgers. `tests/fleet_checks.py` holds after every
event, `tests/fleet_bounds.py` after every rule, and when the faults stop, whoever is alive merges
and the run ends with an exact ledger.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dd_lightning.protocol import messages as msg
from tests.fleet import Fleet, MessageFault
from tests.fleet_bounds import check_bounds
from tests.fleet_checks import check_progress
from tests.fleet_learner import Life, Spec

SPARE_SLOTS = 2  # for learners that nobody planned
LONGEST_S = 3000.0  # from the last fault to the end of a run: all timeouts and 60 steps of 2 s
KINDS = [kind.__name__ for kind in (*msg.TO_SYNCER.__args__, *msg.TO_LEARNER.__args__)]

SPECS = st.builds(
    Spec,
    start=st.sampled_from([0.0, 5.0]),
    step_s=st.sampled_from([1.0, 1.3, 2.0]),
    steps=st.sampled_from([60, 20, 40]),
    tokens=st.sampled_from([10, 1, 7]),
    latency=st.sampled_from([0.5, 0.0, 3.0]),
    transfer=st.sampled_from([0.0, 0.3, 1.5]),
    loss=st.sampled_from([0.0, 0.1]),
    repeat=st.sampled_from([0.0, 0.2]),
)
SETTINGS = st.fixed_dictionaries(
    {
        "fragments": st.sampled_from([2, 1, 4]),
        "sync_every": st.sampled_from([4, 2, 8]),
        "overlap": st.integers(0, 2),
        "wait": st.sampled_from(["never", "never", "overlap"]),
        "apply": st.sampled_from(["overwrite", "rebase", "mix"]),
        "grace_rule": st.sampled_from(["lateness", "none", "paper"]),
        "on_lost_quorum": st.sampled_from(["degrade", "wait"]),
        "max_stale": st.sampled_from([20, 2]),
    }
)
WHO = st.integers(0, 5)
SECONDS = st.sampled_from([1.0, 3.0, 12.0, 30.0])  # within and beyond a lease


class FleetMachine(RuleBasedStateMachine):
    """Rules are faults; between them time passes."""

    fleet: Fleet

    @initialize(
        specs=st.lists(SPECS, min_size=1, max_size=4),
        settings=SETTINGS,
        quorum=st.integers(1, 4),
        seed=st.integers(0, 3),
        jobs_s=st.sampled_from([(0.0, 0.0), (0.4, 2.0)]),
        deltas=st.booleans(),
        budget=st.sampled_from([None, None, 300]),
    )
    def begin(self, specs, settings, quorum, seed, jobs_s, deltas, budget) -> None:
        algorithm = {
            **settings,
            "quorum": min(quorum, len(specs)),
            "max_learners": len(specs) + SPARE_SLOTS,
        }
        timeouts = {"rejoin": 20.0}
        self.fleet = Fleet(
            specs, seed, algorithm=algorithm, timeouts=timeouts, budget_tokens=budget
        )
        self.fleet.merge_s, self.fleet.checkpoint_s = jobs_s
        self.fleet.deltas = deltas
        self.fleet.hooks.append(check_progress)

    def life(self, who: int) -> Life | None:
        """A living process, the newest of its id."""
        name = str(who % len(self.fleet.specs))
        alive = [li for li in self.fleet.lives if li.name == name and li.alive and not li.ended]
        return alive[-1] if alive else None

    def strikes(self) -> bool:
        """Whether the run still goes on; from now on it is disturbed."""
        self.fleet.disturbed_s = self.fleet.now
        return self.fleet.done is None

    # ------------------------------------------------------------------ time and messages

    @rule(seconds=st.sampled_from([5.0, 1.0, 20.0]))
    def time_passes(self, seconds) -> None:
        self.fleet.advance(seconds)

    @rule(
        kind=st.sampled_from(KINDS),
        what=st.sampled_from(["lose", "repeat", "delay"]),
        left=st.integers(1, 3),
        seconds=SECONDS,
    )
    def messages_go_wrong(self, kind, what, left, seconds) -> None:
        self.fleet.message_faults.append(MessageFault(kind, what, left, seconds))

    # ------------------------------------------------------------------ learners

    @rule(who=WHO, back_after=st.sampled_from([None, 1.0, 8.0]), keeps_steps=st.booleans())
    def killed(self, who, back_after, keeps_steps) -> None:
        life = self.life(who)
        if life is not None and self.strikes():
            step = life.ledger.step if life.ledger and keeps_steps else 0
            life.kill(self.fleet.now)
            if back_after is not None:
                self.later(back_after, life.name, step)

    def later(self, seconds: float, name: str, step: int) -> None:
        fleet = self.fleet
        fleet.at(fleet.now + seconds, lambda t: fleet.start(name, t, step, may_fail=True))

    @rule(who=WHO, seconds=SECONDS, silent=st.booleans())
    def cut_off(self, who, seconds, silent) -> None:
        life = self.life(who)
        if life is not None and self.strikes():
            self.fleet.cut_life(life, seconds, silent)

    @rule(who=WHO, seconds=SECONDS)
    def paused(self, who, seconds) -> None:
        life = self.life(who)
        if life is not None and self.strikes():
            life.paused_until = self.fleet.now + seconds

    @rule(who=WHO)
    def leaves(self, who) -> None:
        life = self.life(who)
        if life is not None and self.strikes():
            life.goodbye(self.fleet.now)

    @rule(who=WHO, takeover=st.booleans())
    def another_process_takes_the_id(self, who, takeover) -> None:
        life = self.life(who)
        if life is not None and self.strikes():
            life.may_fail = True
            step = life.ledger.step if life.ledger else 0
            self.fleet.start(life.name, self.fleet.now, step, takeover=takeover, may_fail=True)

    @precondition(lambda self: len(self.fleet.specs) < self.fleet.config.num_data_slots)
    @rule(spec=SPECS)
    def a_newcomer_joins(self, spec) -> None:
        if self.strikes():
            name = str(len(self.fleet.specs))
            self.fleet.specs[name] = spec
            self.fleet.start(name, self.fleet.now)

    # ------------------------------------------------------------------ the syncer

    @rule()
    def a_checkpoint_is_asked_for(self) -> None:
        if self.fleet.syncer_up and self.fleet.done is None:
            self.fleet.core.request_checkpoint(self.fleet.now)

    @precondition(lambda self: self.fleet.syncer_up)
    @rule(back_after=st.sampled_from([1.0, 6.0, 15.0]), older=st.integers(0, 2))
    def the_syncer_is_killed(self, back_after, older) -> None:
        if self.strikes():
            self.fleet.kill_syncer(back_after, older)

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def nothing_grows(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.carry_out()
            check_bounds(self.fleet)

    def teardown(self) -> None:
        """The faults stop: the run goes on and ends."""
        if not hasattr(self, "fleet"):
            return
        fleet = self.fleet
        fleet.message_faults.clear()
        fleet.advance(40.0)  # whatever was to come back has come back
        if fleet.done is None and not any(li.alive and not li.ended for li in fleet.lives):
            fleet.start("0", fleet.now)
        fleet.run(fleet.now + LONGEST_S)
        fleet.finish()
