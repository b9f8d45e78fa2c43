"""What a learner holds of one fragment: counters, the unsettled snapshot, what is to be done.

The pieces of `ledger.py`. Tensors of a snapshot, base or anchor are never changed in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from dd_lightning.protocol.messages import HELD, Fragment, Pull, RoundKey, Version

NOTHING_HELD: Version = (-1, -1)
NO_ROUND: RoundKey = (-1, -1)


class Values(Protocol):
    """The learner's tensors, by fragment (those that travel: parameters, changed buffers)."""

    def read(self, fragment: int) -> dict[str, Tensor]:
        """Copies in host memory that nobody else changes."""
        ...

    def write(self, fragment: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors` into place, cast to each tensor's own dtype."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Dtype in which the learner holds that tensor."""
        ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A contribution before it is encoded. Never changed once taken; sent again if asked again."""

    fragment: int
    round: RoundKey
    step: int
    steps: int  # c_steps
    tokens: int  # c_tokens
    odometer: int
    base: Version
    values: Mapping[str, Tensor]
    anchor: Mapping[str, Tensor] | None  # values of `base`: send anchor − values; None: values
    reference: Mapping[str, Tensor]  # what rebase takes the later work from, once merged
    boundary_wait_s: float = 0.0
    final: bool = False
    unasked: bool = False
    cut: str = ""  # the last consistent cut that was recorded before


@dataclass(frozen=True, slots=True)
class Held:
    """What a (re)joining learner states about itself; immutable, so threads may share it."""

    step: int
    odometer: int
    versions: tuple[Version, ...]
    pending: tuple[tuple[int, int], ...]
    data_position: int = 0  # micro-batches drawn, over all lives


NON_FINITE = "non-finite"  # reason of a verdict: a value that is not a finite number


@dataclass(frozen=True, slots=True)
class Asked:
    """A pull that waits for a boundary."""

    pull: Pull
    arrived_s: float
    put_off: bool = False  # until we hear what became of an earlier snapshot, which was sent again

    @property
    def key(self) -> RoundKey:
        """(epoch, round) it asks for."""
        return (self.pull.epoch, self.pull.round)


@dataclass(slots=True)
class FragmentState:
    """Counters and versions of one fragment."""

    version: Version = NOTHING_HELD
    steps: int = 0
    tokens: int = 0
    snapshot: Snapshot | None = None  # unsettled; at most one, ever
    settled: RoundKey | None = None  # merged snapshot settled since the last apply
    closed: RoundKey = NO_ROUND  # rounds up to here are closed, as far as we know
    base: Mapping[str, Tensor] | None = None  # of rebase
    anchor: Mapping[str, Tensor] | None = None  # Θ of `version` as this learner holds it
    arrived: tuple[Fragment, Mapping[str, Tensor]] | None = None
    asked: Asked | None = None
    awaited: tuple[RoundKey, int] | None = None  # wait: overlap: round, step of its snapshot
    handed_in: bool = False  # asked after the last step: the values stay as it left them
    reload: bool = False  # the next fragment is taken as it is, newer or not

    @property
    def holds_work(self) -> bool:
        """Whether there is something to contribute (tokens of weight above 0)."""
        return self.steps > 0 and self.tokens > 0

    def settle(self, merged_upto: RoundKey | None, step: int, odometer: int) -> None:
        """If `merged_upto` names the unsettled snapshot s: c ← c − s.c, base ← s.θ."""
        if merged_upto is None:
            return
        self.closed = max(self.closed, merged_upto)
        snapshot = self.snapshot
        if snapshot is None or snapshot.round != merged_upto:
            return
        # c − s.c is what came after s; an overwrite or mix in between may have left less
        self.tokens = min(self.tokens, odometer - snapshot.odometer)
        self.steps = min(self.steps, step - snapshot.step)
        if self.base is not None:
            self.base = snapshot.reference
        self.snapshot, self.settled = None, snapshot.round

    def refused(self, round_: RoundKey) -> None:
        """The unsettled snapshot is no more, if it is of that round: what became of it is known."""
        if self.snapshot is not None and self.snapshot.round == round_:
            self.snapshot = None

    def pull_is_void(self, asked: Asked) -> bool:
        """Its round is closed, or overtaken by a later one, or its base by a newer apply."""
        base = asked.pull.base
        return (
            self.closed >= asked.key
            or (self.snapshot is not None and self.snapshot.round > asked.key)
            or (base != HELD and self.version > base)
        )

    def may_be_merged(self, asked: RoundKey) -> bool:
        """Whether the unsettled snapshot is of an earlier round of this epoch that may be open."""
        snapshot = self.snapshot
        if snapshot is None or snapshot.round[0] != asked[0]:
            return False
        return self.closed < snapshot.round < asked

    def snapshot_again(self, pull: Pull) -> Snapshot:
        """The unsettled snapshot, of this very round, once more."""
        assert self.snapshot is not None
        self.snapshot = replace(
            self.snapshot,
            final=self.snapshot.final or pull.final,
            anchor=None if pull.values else self.snapshot.anchor,
        )
        return self.snapshot

    def enter_epoch(self, epoch: int) -> None:
        """Drop what lower epochs sent and is neither answered nor applied."""
        self.asked = self.awaited = None
        if self.arrived is not None and self.arrived[0].version[0] < epoch:
            self.arrived = None
