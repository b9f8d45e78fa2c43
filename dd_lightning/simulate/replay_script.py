"""What a replay must do, as a tape says it: lives of learners, merges, restarts of the syncer.

Rosters, contributors and steps are the tape's; every value, counter and weight is computed anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dd_lightning.protocol.messages import RoundKey, Version


class CannotReplay(ValueError):
    """The tape lacks something that a replay needs; the text says what."""


class Differs(Exception):
    """The replay is not the run: where, and in what."""

    def __init__(self, what: str, key: RoundKey, fragment: int, learner: str | None = None) -> None:
        super().__init__(what)
        self.where = {
            "epoch": key[0],
            "round": key[1],
            "fragment": fragment,
            "learner": learner,
            "what": what,
        }


@dataclass(frozen=True, slots=True)
class Attach:
    """A join on the tape, first or again. `said`: inner steps done when it was sent; `step`: when
    the answer was heard, at the earliest."""

    generation: int
    epoch: int
    said: int
    step: int
    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ApplyAt:
    """A fragment taken over at the boundary after `step`."""

    generation: int
    step: int
    fragment: int
    version: Version


@dataclass(frozen=True, slots=True)
class Given:
    """A contribution, taken at the boundary after `step`. `row`: the tape's."""

    learner: str
    incarnation: str
    generation: int
    step: int
    key: RoundKey
    fragment: int
    final: bool
    row: Mapping[str, Any]


@dataclass(slots=True)
class LifeScript:
    """One process life of a learner.

    Args:
        applies: by step, and of one step by version.
        given: contributions that a merge takes, by round.
        saves: steps at which it saved a state that a later life goes on from.
        donates: steps whose inner optimizer state it gave to another learner.
        donor: incarnation whose inner state, of the step `first.row["state_step"]`, it began with.
        finishing_at: the step after which it began to hand in; None: it never came so far.
    """

    learner: str
    incarnation: str
    attaches: list[Attach] = field(default_factory=list)
    applies: list[ApplyAt] = field(default_factory=list)
    given: list[Given] = field(default_factory=list)
    saves: set[int] = field(default_factory=set)
    donates: set[int] = field(default_factory=set)
    donor: str | None = None
    finishing_at: int | None = None
    max_steps: int | None = None

    @property
    def told_to_finish_at(self) -> int | None:
        """The step at which it was told to finish, None where it did all its steps."""
        if self.finishing_at is None or self.finishing_at == self.max_steps:
            return None
        return self.finishing_at

    @property
    def first(self) -> Attach:
        """Its first join."""
        return self.attaches[0]

    @property
    def waits_for_state(self) -> bool:
        """Whether it was told that a peer's inner state may come: it had none, and the run was
        further on than its first step."""
        row = self.first.row
        return row["state_from"] in ("peer", "cold") and row.get("start_step", 0) > 0


@dataclass(frozen=True, slots=True)
class MergeStep:
    """One merge.

    Args:
        contributions: in the order of summation.
        missing: contributors that the tape names without a contribution of theirs.
        row: the tape's.
    """

    epoch: int
    round: int
    fragment: int
    version: Version
    contributions: tuple[Given, ...]
    missing: tuple[str, ...]
    row: Mapping[str, Any]

    @property
    def key(self) -> RoundKey:
        """As the tape names a round."""
        return (self.epoch, self.round)

    @property
    def reanchor(self) -> bool:
        """The first of its fragment in a new epoch: an average, no outer step."""
        return bool(self.row.get("reanchor"))


@dataclass(frozen=True, slots=True)
class Restart:
    """The syncer starts again from the checkpoint that had these numbers of merges."""

    epoch: int
    merges: tuple[int, ...]


@dataclass(slots=True)
class Script:
    """A tape, ready to be played: `course` has merges and restarts in order; `late` contributions
    that came when their round was closed, by round."""

    config: dict[str, Any]
    layout: Mapping[str, Any]
    lives: list[LifeScript]
    course: list[MergeStep | Restart]
    late: dict[RoundKey, list[Given]]
    parameters_sha256: str | None
