"""A run played with another merge rule, outer optimizer or quorum, beside what it was.

Modelled: every learner trains anew on what the other rule makes of Θ, so gradients, counters and
weights follow from it. Kept from the tape: at which step a learner took each snapshot and applied
each version, when each contribution arrived, the order of the merges, and each round's grace.

Another quorum N takes into each round those that had arrived when the N-th did (all, where fewer
came), plus the grace that this round spent; contributions that came too late on the tape are among
the candidates. Not modelled: that rounds would have closed and come back earlier or later, that
learners which were told of a closed round had then answered it, and the guard (max_norm_ratio).
Re-anchors, last rounds and hand-ins of finished learners stay as they were. A late contribution
made after its learner had applied a version that is merged later than the round is left out, and
counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dd_lightning.launch.settings import Settings
from dd_lightning.protocol.actions import HeldContribution, MergeResult
from dd_lightning.protocol.held import Snapshot
from dd_lightning.protocol.messages import Payload
from dd_lightning.simulate.replay import Outcome, Replay
from dd_lightning.simulate.replay_script import (
    CannotReplay,
    Given,
    LifeScript,
    MergeStep,
    Restart,
    Script,
)

ROUNDING_S = 2e-6  # times on a tape have six digits


@dataclass(slots=True)
class Compared:
    """What came of a what-if: `rounds` beside the tape's, `left_out` contributions that could not
    be made (nothing to hand in, or a version that came later)."""

    rounds: list[dict[str, Any]] = field(default_factory=list)
    left_out: int = 0


class WhatIf(Replay):
    """Plays the tape with other settings; nothing is compared, each round is noted.

    Args:
        settings: the run's, with what is changed.
        quorum: another one, None: the tape's contributors.
    """

    def __init__(
        self, script: Script, settings: Settings, folder: Path, quorum: int | None = None
    ) -> None:
        self.compared = Compared()
        if quorum is not None:
            script, self.compared.left_out = with_quorum(script, quorum)
        super().__init__(script, settings, folder)

    def play(self) -> Outcome:
        """To the end. Raises CannotReplay where learners cannot follow the tape any more."""
        outcome = super().play()
        if outcome.first_difference is not None:
            raise CannotReplay(f"this what-if leaves the tape: {outcome.first_difference['what']}")
        return outcome

    def check_contribution(self, given: Given, snapshot: Snapshot, payload: Payload) -> None:
        """Another Θ, other values."""

    def check_merge(
        self, step: MergeStep, held: Sequence[HeldContribution], result: MergeResult | None
    ) -> None:
        """Noted beside the tape's."""
        row = step.row
        self.compared.rounds.append(
            {
                "epoch": step.epoch,
                "round": step.round,
                "fragment": step.fragment,
                "contributors": {
                    "original": row["contributors"],
                    "what_if": [one.learner for one in held],
                },
                "agreement": {
                    "original": row["agreement"],
                    "what_if": None if result is None else result.agreement,
                },
                "outer_norm": {
                    "original": row.get("outer_norm"),
                    "what_if": None if result is None else result.outer_norm,
                },
            }
        )

    def check_end(self) -> None:
        """Another Θ."""

    def no_snapshot(self, given: Given) -> None:
        """It had nothing to hand in: what it had was merged before."""
        self.compared.left_out += 1


def with_quorum(script: Script, quorum: int) -> tuple[Script, int]:
    """The script with the contributors that another quorum would have taken, and how many late
    contributions could not be made (see above)."""
    merged_at = _merged_at(script)
    lives = {life.incarnation: replace(life, given=[]) for life in script.lives}
    course: list[MergeStep | Restart] = []
    left_out = 0
    for index, step in enumerate(script.course):
        if isinstance(step, MergeStep):
            late = script.late.get(step.key, [])
            able = [g for g in late if _in_time(lives[g.incarnation], g, index, merged_at)]
            taken = _taken(step, able, quorum)
            left_out += len(late) - len(able)
            for given in taken:
                lives[given.incarnation].given.append(given)
            step = replace(step, contributions=taken)
        course.append(step)
    return replace(script, lives=list(lives.values()), course=course), left_out


def _taken(step: MergeStep, late: Sequence[Given], quorum: int) -> tuple[Given, ...]:
    if step.reanchor or step.row.get("last"):
        return step.contributions
    taken = [given for given in step.contributions if given.final]  # they count for no quorum
    opened = step.row["opened_s"]  # what came before waited for that
    arrivals = sorted(
        [(max(given.row["t_s"], opened), given) for given in (*step.contributions, *late)
         if not given.final],
        key=lambda arrival: arrival[0],
    )  # fmt: skip
    if arrivals:
        until = arrivals[min(quorum, len(arrivals)) - 1][0] + step.row["grace_s"] + ROUNDING_S
        taken += [given for at_s, given in arrivals if at_s <= until]
    return tuple(sorted(taken, key=lambda given: (given.learner, given.generation)))


def _merged_at(script: Script) -> dict[tuple[int, tuple[int, int]], int]:
    """Where in the course each version of a fragment is made."""
    places: dict[tuple[int, tuple[int, int]], int] = {}
    for index, step in enumerate(script.course):
        if isinstance(step, MergeStep):
            places[step.fragment, step.version] = index
        else:
            for fragment, number in enumerate(step.merges):
                places[fragment, (step.epoch, number)] = index
    return places


def _in_time(
    life: LifeScript, given: Given, index: int, merged_at: dict[tuple[int, tuple[int, int]], int]
) -> bool:
    """Whether all that the learner had applied by then is merged before the round at `index`."""
    return all(
        merged_at.get((apply.fragment, apply.version), -1) < index
        for apply in life.applies
        if apply.step <= given.step
    )
