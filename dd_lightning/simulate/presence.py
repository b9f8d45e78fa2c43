"""When learners of a simulated run come and go, and how long a killed process is away."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

JOIN, LEAVE = "join", "leave"


@dataclass(frozen=True, slots=True)
class Move:
    """A learner joins, or is told to leave, as SIGTERM tells it."""

    at_s: float
    learner: str
    what: str


@dataclass(frozen=True, slots=True)
class Presence:
    """`simulate.restart_s`, `joins` and `leaves`.

    Args:
        restart_s: virtual seconds from the end of a killed process until its next life begins.
        moves: earliest first.
        first: learners that are there from the start.
    """

    restart_s: float
    moves: tuple[Move, ...]
    first: tuple[str, ...]

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> Presence:
        """From the resolved configuration of the run.

        Raises:
            ValueError: a time that is none, a learner that cannot be, one that would join while it
                is there or leave while it is not.
        """
        given = values["simulate"]
        restart_s = _seconds("simulate.restart_s", given["restart_s"])
        learners = values["learners"]
        slots = values["algorithm"].get("max_learners") or learners
        moves: list[Move] = []
        for what in (JOIN, LEAVE):
            name = f"simulate.{what}s"
            for learner, times in _mapping(name, given[f"{what}s"]).items():
                if not learner.isdecimal() or int(learner) >= slots:
                    raise ValueError(
                        f"{name} has learner {learner!r}; allowed: 0 to {slots - 1} "
                        "(learners, or algorithm.max_learners where that is more, less one)."
                    )
                moves += [
                    Move(_seconds(f"{name}.{learner}", at_s), learner, what) for at_s in times
                ]
        moves.sort(key=lambda move: (move.at_s, int(move.learner)))
        joining = {move.learner for move in reversed(moves) if move.what == JOIN}
        late = {one for one in joining if _first(moves, one).what == JOIN}
        first = tuple(str(index) for index in range(learners) if str(index) not in late)
        _check_order(moves, first)
        return cls(restart_s, tuple(moves), first)


def _first(moves: Sequence[Move], learner: str) -> Move:
    return next(move for move in moves if move.learner == learner)


def _check_order(moves: Sequence[Move], first: Sequence[str]) -> None:
    there = set(first)
    for move in moves:
        if (move.what == JOIN) == (move.learner in there):
            state = "there already" if move.what == JOIN else "not there"
            raise ValueError(
                f"simulate.{move.what}s.{move.learner} is {move.at_s:g} s, when the learner is "
                f"{state}; allowed: joins and leaves of a learner in turn. One below `learners` is "
                "there from the start unless its first move is a join."
            )
        (there.add if move.what == JOIN else there.discard)(move.learner)


def _mapping(name: str, given: Any) -> dict[str, tuple[Any, ...]]:
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(
            f"{name} is {given!r}; allowed: null, or seconds by learner, as {{4: 60}}."
        )
    return {
        str(learner): tuple(times) if isinstance(times, Sequence) else (times,)
        for learner, times in (given or {}).items()
    }


def _seconds(name: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}; allowed: seconds of virtual time from 0 on.")
    return float(value)
