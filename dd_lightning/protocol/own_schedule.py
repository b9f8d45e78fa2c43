"""The learner's own clock under `wait: overlap`: rounds it snapshots for unasked, and its waits.

Round r is due at the learner's own step with clock·P >= r·H + s; a wait for a round's fragment is
bounded by `round_timeout`, after which it is given up until something arrives again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class OwnSchedule:
    """Clock = own inner steps + `clock_base`; `next_round` is the first whose step is to come."""

    num_fragments: int  # P
    sync_every: int  # H
    round_timeout_s: float
    clock_base: int = 0
    offset: int = 0  # s
    next_round: int | None = None  # None: not admitted yet
    wait_began_s: float | None = None
    patient: bool = True  # False after a wait ran into its bound, until something arrives

    def attach(self, clock: int, step: int, offset: int, next_round: int) -> None:
        """Admitted (again): the clock counts on from the run's."""
        self.clock_base, self.offset, self.next_round = clock - step, offset, next_round
        self.patient = True

    def due(self, step: int) -> Iterator[int]:
        """Numbers of the rounds whose own step has come, each once, in order."""
        while (
            self.next_round is not None
            and (step + self.clock_base) * self.num_fragments
            >= self.next_round * self.sync_every + self.offset
        ):
            self.next_round += 1
            yield self.next_round - 1

    def is_to_come(self, number: int) -> bool:
        """Whether the own step of that round is still to come."""
        return self.next_round is not None and number >= self.next_round

    def keep_waiting(self, now: float) -> bool:
        """Begin or go on with a wait; False once it has run into its bound."""
        if self.wait_began_s is None:
            self.wait_began_s = now
        if self.patient and now - self.wait_began_s < self.round_timeout_s:
            return True
        self.patient, self.wait_began_s = False, None
        return False

    @property
    def wait_deadline(self) -> float | None:
        """When the wait under way is given up."""
        return None if self.wait_began_s is None else self.wait_began_s + self.round_timeout_s
