"""Writes an arrived fragment into the learner's tensors and counters, by the apply mode.

`protocol.md`, "Apply modes and their counters": overwrite loses the work since the snapshot, mix
the share that is not kept, rebase none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from dd_lightning.protocol.apply_modes import mixed, rebased
from dd_lightning.protocol.held import NOTHING_HELD, FragmentState, Values


@dataclass(frozen=True, slots=True)
class ApplyWriter:
    """`deltas`: the codec encodes deltas, so Θ as applied is kept to anchor them."""

    values: Values
    apply: str
    mix_alpha: float
    deltas: bool
    buffers: frozenset[str]

    def write(
        self,
        index: int,
        state: FragmentState,
        arrived: Mapping[str, Tensor],
        finishing: bool,
    ) -> None:
        """The apply mode: tensors and counters. A first load or a reload always overwrites."""
        fresh = state.version == NOTHING_HELD or state.reload
        if not fresh and self.apply == "rebase" and state.base is not None:
            current = self.values.read(index)
            self._put(index, state, rebased(current, state.base, arrived, self.buffers), finishing)
            if state.snapshot is not None:  # undecided: what comes after it moves with it
                moved = rebased(state.snapshot.reference, state.base, arrived, self.buffers)
                state.snapshot = replace(state.snapshot, reference=moved)
        elif not fresh and self.apply == "mix":
            self._put(
                index, state, mixed(self.values.read(index), arrived, self.mix_alpha), finishing
            )
            state.tokens = int(self.mix_alpha * state.tokens)
            # a token that is kept was trained in some step; without tokens there is no step
            state.steps = -int(-self.mix_alpha * state.steps // 1) if state.tokens else 0
        else:
            self._put(index, state, arrived, finishing)
            state.steps = state.tokens = 0
        if self.apply == "rebase" or self.deltas:
            cast = {name: t.to(self.values.dtype(name)) for name, t in arrived.items()}
            state.base = cast if self.apply == "rebase" else None
            state.anchor = cast if self.deltas else None

    def _put(
        self, index: int, state: FragmentState, tensors: Mapping[str, Tensor], finishing: bool
    ) -> None:
        """Not after the last step, unless a snapshot is still to build on it: training ends with
        what its last step left, whoever finishes first."""
        if not (state.handed_in or (finishing and self.apply == "overwrite")):
            self.values.write(index, tensors)
