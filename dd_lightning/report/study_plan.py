"""What a study shows, from the key `study` of its experiment file: axes, columns, targets."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dd_lightning.report.study_measures import MEASURES, find_measure

DEFAULT_MEASURES = ("validation_loss", "goodput", "contributors", "seconds", "bytes", "faults")
MOST_DRAWN = 3
TARGETS = {"seconds_to_loss": "target_loss", "seconds_to_tokens": "target_tokens"}


@dataclass(frozen=True, slots=True)
class StudyPlan:
    """How runs of a sweep are shown together; a sweep without one is shown by defaults.

    Args:
        question: what the study asks, in one sentence, for the head of its page; null: one is made
            of what was swept.
        x: dotted setting on the horizontal axis; null: the first swept one.
        x_label: of that axis, with the unit; null: the setting's own name.
        lines: dotted setting of which each value has a line of its own; null: the others together.
        measures: columns of the table.
        draw: those of them that get a panel each, at most three; null: the first.
        target_loss: validation loss that `seconds_to_loss` waits for.
        target_tokens: merged tokens that `seconds_to_tokens` waits for.
        baseline: a value of `x`; the table then says of every group how far its validation loss
            fell, in nats and in spreads over the seeds, and how far it is behind this one's.
        timeline: draw who computes, waits and sends between these two moments of a run, s; needs
            launcher.step_log; null: not drawn.
        arm, arms: named settings that differ together; the experiment's own interpolations use
            them, the report does not.

    Raises:
        ValueError: an unknown measure, or one that lacks its target.
    """

    question: str | None = None
    x: str | None = None
    x_label: str | None = None
    lines: str | None = None
    measures: tuple[str, ...] = DEFAULT_MEASURES
    draw: tuple[str, ...] = ()
    target_loss: float | None = None
    target_tokens: float | None = None
    baseline: str | None = None
    timeline: tuple[float, float] | None = None
    arm: str | None = None
    arms: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for setting, names in (("measures", self.measures), ("draw", self.draw)):
            for name in names:
                if find_measure(name) is None:
                    raise ValueError(
                        f"study.{setting} has {name!r}; allowed: {', '.join(MEASURES)}, "
                        "metrics.NAME." + hint(name, MEASURES)
                    )
        if not self.measures:
            raise ValueError("study.measures is empty; allowed: at least one of the measures.")
        if len(self.draw) > MOST_DRAWN:
            raise ValueError(f"study.draw is {list(self.draw)}; allowed: at most {MOST_DRAWN}.")
        for measure, target in TARGETS.items():
            asked = measure in (*self.measures, *self.draw)
            if asked and getattr(self, target) is None:
                raise ValueError(
                    f"study.{target} is null, but study.measures has {measure}; give the value "
                    "whose time is asked for."
                )
        if self.baseline is not None and not isinstance(self.baseline, str):
            raise ValueError(
                f"study.baseline is {self.baseline!r}; allowed: null, or text: a value of study.x."
            )
        if self.timeline is not None and not (
            len(self.timeline) == 2 and 0 <= self.timeline[0] < self.timeline[1]
        ):
            raise ValueError(
                f"study.timeline is {list(self.timeline)}; allowed: null, or [from, to] in seconds."
            )
        if self.arms and self.arm not in self.arms:
            raise ValueError(f"study.arm is {self.arm!r}; allowed: {' | '.join(self.arms)}.")

    @classmethod
    def load(cls, values: Mapping[str, Any] | None) -> StudyPlan:
        """From a resolved configuration's `study`; None: the defaults."""
        values = dict(values or {})
        known = [one.name for one in fields(cls)]
        for key in values:
            if key not in known:
                raise ValueError(
                    f"study.{key} is not a setting; allowed: {', '.join(known)}." + hint(key, known)
                )
        for name in ("measures", "draw", "timeline"):
            if values.get(name) is not None:
                given = values[name]
                if not isinstance(given, list | tuple):
                    raise ValueError(f"study.{name} is {given!r}; allowed: a list.")
                values[name] = tuple(given)
        return cls(**values)

    @property
    def drawn(self) -> tuple[str, ...]:
        """Measures with a panel of their own."""
        return self.draw or self.measures[:1]


def hint(name: str, allowed: Iterable[str]) -> str:
    """A sentence that names the nearest of them, if one is near."""
    near = difflib.get_close_matches(name, list(allowed), n=1)
    return f" Did you mean {near[0]}?" if near else ""
