"""When a learner of a simulated run computed, and when bytes of it were on their way."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dd_lightning.network.profiles import WanProfile
from dd_lightning.report.observer import Event, Observer

SPANS = "virtual_steps.csv"  # in a learner's folder; written where launcher.step_log is true
MEGABIT = 1e6


@dataclass(frozen=True, slots=True)
class Span:
    """From one moment of the run to another, s."""

    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Lane:
    """What one learner did; it waited between its first and last step where it did not compute."""

    computing: tuple[Span, ...]
    sending: tuple[Span, ...]


class Lanes(Observer):
    """Reads a tape for lanes.

    A contribution is on its way for half a round trip and as long as its bytes take at the link's
    rate, until it arrives; queues of the link are not in it. Members of a data-parallel job
    compute as long as their median step and send while the all-reduce lasts.
    """

    def __init__(self, config: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
        self._network = WanProfile.from_config(config["network"])
        self._learners = list(summary["per_learner"])
        self._step_s = {
            name: one["step_seconds_p50"] for name, one in summary["per_learner"].items()
        }
        self._computing: dict[str, list[Span]] = {name: [] for name in self._learners}
        self._sending: dict[str, list[Span]] = {name: [] for name in self._learners}

    def on_contribution(self, event: Event) -> None:
        name, at_s = str(event["learner"]), event["t_s"]
        way_s = 0.0
        if self._network.needs_proxy:
            link = self._network.link(self._network.region_of(self._learners.index(name)))
            bits = 8 * (event.get("bytes") or 0)
            way_s = link.rtt_ms / 2e3 + bits / (link.up_mbit_s * MEGABIT)
        self._sending[name].append(Span(at_s - way_s, at_s))

    def on_all_reduce(self, event: Event) -> None:
        ended_s = event["t_s"]
        computed_s = ended_s - event["reduce_s"]
        began_s = computed_s - event["compute_s"]
        for name in event["members"]:
            self._computing[name].append(Span(began_s, began_s + self._step_s[name]))
            self._sending[name].append(Span(computed_s, ended_s))

    def lanes(self, folder: Path) -> dict[str, Lane]:
        """Of each learner of the run in `folder`.

        Raises:
            ValueError: the run kept no record of its steps.
        """
        found = {}
        for name in self._learners:
            computing = self._computing[name] or read_spans(folder / "learners" / name / SPANS)
            found[name] = Lane(tuple(computing), tuple(self._sending[name]))
        return found


def read_spans(path: Path) -> list[Span]:
    """The steps of a learner, all its lives.

    Raises:
        ValueError: there is no record.
    """
    if not path.is_file():
        raise ValueError(
            f"{path} is missing: who computed when is not known. Set launcher.step_log=true."
        )
    with open(path, newline="") as file:
        return [Span(float(began), float(ended)) for began, ended in csv.reader(file)]
