"""Faults that were injected, and what followed each: dead → joined → first step, in seconds.

What is said is read from the tape alone, so it holds for faults nobody planned too, as far as
somebody wrote a `fault` row for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dd_lightning.report.observer import Event, Observer, finite

SYNCER = "syncer"
SKEW_S = 0.25  # whoever injects and the syncer, who writes the tape, read clocks of their own


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the tape; `at_s` is None where it did not fire."""

    kind: str
    target: str  # a learner's id, or "syncer"
    planned: str
    at_s: float | None
    followed: tuple[tuple[str, float], ...] = ()  # what, seconds after the fault
    why: str = ""  # it did not fire

    def sentence(self) -> str:
        """In words."""
        who = self.target if self.target == SYNCER else f"learner {self.target}"
        name = f"{self.kind}, {who}" if self.target else self.kind
        if self.at_s is None:
            why = f": {self.why}" if self.why else ""
            return f"{name}: planned ({self.planned}), did not fire{why}"
        after = ", ".join(f"{what} +{seconds:.1f} s" for what, seconds in self.followed)
        return f"{self.at_s:.1f} s: {name}: {after or 'nobody was lost'}"


DEAD, JOINED, STEPPED = range(3)  # for the syncer: joined is restarted, a step is a merge


@dataclass(frozen=True, slots=True)
class _Sign:
    at_s: float
    kind: int
    text: str


@dataclass(slots=True)
class _Lane:
    """What befell one learner (or the syncer), in the order of time."""

    signs: list[_Sign] = field(default_factory=list)

    def after(self, at_s: float, until_s: float) -> tuple[tuple[str, float], ...]:
        """The first sign of each kind, in their order, within a span of time."""
        start = bisect_left(self.signs, at_s - SKEW_S, key=lambda sign: sign.at_s)
        found: dict[int, tuple[str, float]] = {}
        for sign in self.signs[start:]:
            if sign.at_s >= until_s:
                break
            if sign.kind == STEPPED and JOINED not in found:
                continue  # a step before it was lost
            found.setdefault(sign.kind, (sign.text, max(0.0, sign.at_s - at_s)))
        return tuple(found.values())


class Faults(Observer):
    """Collects faults and lives in one pass. Fault rows may come in any order, as at the end."""

    def __init__(self) -> None:
        self.restarts: list[tuple[float, int]] = []  # of the syncer: when, epoch
        self._rows: list[tuple[float, Mapping[str, Any]]] = []
        self._lanes: dict[str, _Lane] = {}
        self._starts = 0

    def list(self) -> list[Fault]:
        """By time, those that did not fire last."""
        found = []
        for at_s, row in self._rows:
            kind, target = str(row.get("action") or row["kind"]), _target(row)
            planned, why = _words(row["planned"]), str(row.get("why") or "")
            if not _fired(row):
                found.append(Fault(kind, target, planned, None, why=why))
                continue
            others = (t for t, other in self._rows if _fired(other) and _target(other) == target)
            later = (t for t in others if t > at_s)
            lane = self._lanes.get(target, _Lane())
            followed = lane.after(at_s, min(later, default=float("inf")))
            found.append(Fault(kind, target, planned, at_s, followed))
        return sorted(found, key=lambda one: (one.at_s is None, one.at_s or 0.0))

    def _sign(self, target: str, at_s: float, kind: int, text: str) -> None:
        self._lanes.setdefault(target, _Lane()).signs.append(_Sign(at_s, kind, text))

    def on_fault(self, event: Event) -> None:
        self._rows.append((finite(event["t_s"]) or 0.0, event))

    def on_syncer_start(self, event: Event) -> None:
        self._starts += 1
        if self._starts > 1:
            self.restarts.append((event["t_s"], event["epoch"]))
            self._sign(SYNCER, event["t_s"], JOINED, f"restarted (epoch {event['epoch']})")

    def on_merge(self, event: Event) -> None:
        lane = self._lanes.get(SYNCER)
        if lane is not None and lane.signs[-1].kind == JOINED:
            self._sign(SYNCER, event["t_s"], STEPPED, "first merge")

    def on_dead(self, event: Event) -> None:
        self._sign(str(event["learner"]), event["t_s"], DEAD, f"dead ({event['cause']})")

    def on_leave(self, event: Event) -> None:
        if event["cause"] != "finished":  # that follows from no fault
            self._sign(str(event["learner"]), event["t_s"], DEAD, f"left ({event['cause']})")

    def on_join(self, event: Event) -> None:
        state = "lived on" if event["continues"] else f"state: {event['state_from']}"
        self._sign(str(event["learner"]), event["t_s"], JOINED, f"joined ({state})")

    def on_state(self, event: Event) -> None:
        if event["state"] == "training":
            self._sign(str(event["learner"]), event["t_s"], STEPPED, "first step")


def _fired(row: Mapping[str, Any]) -> bool:
    """A time (0.0 is one), or whether."""
    return row["fired"] is not None and row["fired"] is not False


def _target(row: Mapping[str, Any]) -> str:
    return str(row["target"] or "").removeprefix("learner ")


def _words(planned: Any) -> str:
    if isinstance(planned, Mapping):
        return ", ".join(f"{name} {value}" for name, value in planned.items())
    return str(planned)
