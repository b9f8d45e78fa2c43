"""When rounds may start, how many may be open, and whether the next one is due."""

from __future__ import annotations

from dd_lightning.protocol.estimates import in_flight_bound
from dd_lightning.protocol.members import median_rho, median_step
from dd_lightning.protocol.run_state import RunState


class Openings:
    """`protocol.md`, "Rounds" and "Start and end"; decides, opens nothing."""

    def __init__(self, run: RunState) -> None:
        self.run = run
        self.first_training_s: float | None = None
        self.epoch_began_s: float | None = None  # `now` goes on over a restart, epochs do not

    @property
    def limit(self) -> int:
        """`max_in_flight` now."""
        run = self.run
        configured = run.config.algorithm.max_in_flight
        fragments = len(run.versions)
        if isinstance(configured, int):
            return min(configured, fragments)
        if run.config.algorithm.wait == "overlap":
            return fragments  # learners bound themselves: none runs more than tau steps ahead
        training = run.training
        transfers = sorted(member.transfer_s for member in training)
        return in_flight_bound(
            median_rho(training),
            median_step(training),
            run.grace.spent.value or 0.0,
            transfers[len(transfers) // 2] if transfers else 0.0,
            run.config.algorithm.sync_every,
            fragments,
        )

    def may_start(self, now: float) -> bool:
        """`min_learners` are training, or `start_timeout` has passed since the first did; in a
        resumed epoch: as many have re-attached as the checkpoint counted; restored from a cut: all
        its learners are back, or given up."""
        run = self.run
        if run.whole_waits is not None:
            return bool(run.live) and not run.whole_waits
        if run.restored_training is not None:
            enough = len(run.live) >= run.restored_training
            return enough or (bool(run.live) and now >= self.reanchor_by(now))
        training = run.training
        if training and self.first_training_s is None:
            self.first_training_s = now
        if len(training) >= run.config.min_learners:
            return True
        began_s = self.first_training_s
        if not training or began_s is None or now < began_s + run.config.timeouts.start:
            return False
        run.warn_once(
            "start",
            f"rounds start with {len(training)} of min_learners="
            f"{run.config.min_learners} learners after timeouts.start",
        )
        return True

    def reanchor_by(self, now: float) -> float:
        """Until when a resumed epoch waits for those who trained; counted from its first event."""
        if self.epoch_began_s is None:
            self.epoch_began_s = now
        return self.epoch_began_s + self.run.config.timeouts.reanchor

    def next_is_due(self, now: float) -> bool:
        """Whether the next round may open now; the first time, rounds start."""
        run, book = self.run, self.run.book
        if not run.initialized:
            return False
        if not run.started:
            if not self.may_start(now):
                return False
            run.started = True
            run.record("start", epoch=run.epoch, training=[m.learner for m in run.training])
        book.skip_lag(run.clock.value)
        training = run.training
        waits = run.config.algorithm.on_lost_quorum == "wait"
        return (
            bool(training)
            and book.due(run.clock.value)
            and not book.busy(book.fragment_of(book.next_round))
            and book.in_flight < self.limit
            and not (waits and len(training) < run.config.quorum)
        )

    def deadlines(self, now: float) -> list[float]:
        """When a start that is waited for is given up."""
        run = self.run
        if run.started or not run.initialized:
            return []
        if run.restored_training is not None:
            return [self.reanchor_by(now)]
        if self.first_training_s is not None:
            return [self.first_training_s + run.config.timeouts.start]
        return []
