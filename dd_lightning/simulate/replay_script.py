"""What a tape says that a replay must do: lives of learners, merges, restarts, checkpoints.

Rosters, contributors and steps are the tape's; every value, counter and weight is computed anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dd_lightning.protocol.messages import RoundKey, Version
from dd_lightning.report.observer import Event


class CannotReplay(ValueError):
    """The tape lacks something that a replay needs; the text says what."""


@dataclass(frozen=True, slots=True)
class Attach:
    """A join on the tape, first or again."""

    generation: int
    epoch: int
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
    """A contribution that was accepted: taken at the boundary after `step`."""

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
    """One process life of a learner."""

    learner: str
    incarnation: str
    attaches: list[Attach] = field(default_factory=list)
    applies: list[ApplyAt] = field(default_factory=list)
    given: list[Given] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)  # steps at which it saved its state
    finishing_at: int | None = None  # the step after which it began to hand in
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
    def generations(self) -> set[tuple[int, int]]:
        """(epoch, generation) of every join."""
        return {(attach.epoch, attach.generation) for attach in self.attaches}


@dataclass(frozen=True, slots=True)
class MergeStep:
    """One merge, with its contributions in the order of summation."""

    epoch: int
    round: int
    fragment: int
    version: Version
    contributions: tuple[Given, ...]
    reanchor: bool
    digest: str


@dataclass(frozen=True, slots=True)
class Restart:
    """The syncer starts again from the checkpoint that had these numbers of merges."""

    epoch: int
    merges: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """The syncer wrote a checkpoint: a later restart may go back to here."""

    merges: tuple[int, ...]


@dataclass(slots=True)
class Script:
    """A tape, ready to be played: `course` has merges, checkpoints and restarts in order."""

    config: dict[str, Any]
    layout: Mapping[str, Any]
    lives: list[LifeScript]
    course: list[MergeStep | Saved | Restart]
    parameters_sha256: str | None


class ScriptReader:
    """Reads the events of one tape, in order."""

    def __init__(self) -> None:
        self._config: dict[str, Any] | None = None
        self._layout: Mapping[str, Any] | None = None
        self._epoch = 0
        self._lives: dict[str, LifeScript] = {}
        self._by_generation: dict[tuple[str, int, int], LifeScript] = {}
        self._accepted: dict[tuple[int, int], list[Given]] = defaultdict(list)
        self._course: list[MergeStep | Saved | Restart] = []
        self._sha256: str | None = None

    def read(self, events: Iterable[Event]) -> Script:
        """The whole tape.

        Raises:
            CannotReplay: something is missing.
        """
        events = list(events)
        # joins first: one that waited for a peer's state stands behind what came after it
        for event in events:
            if event["event"] == "syncer_start":
                self._epoch = event["epoch"]
            elif event["event"] == "join":
                self._on_join(event)
        self._epoch = 0
        for event in events:
            handler = getattr(self, f"_on_{event['event']}", None)
            if handler is not None and event["event"] != "join":
                handler(event)
        if self._config is None:
            raise CannotReplay("the tape has no `run` row with the run's configuration")
        if "task" not in self._config:
            raise CannotReplay(
                "the tape is of a syncer that was started alone: it does not know the learners' "
                "model and data. Replay runs of `dd-lightning launch`."
            )
        if self._layout is None:
            raise CannotReplay("the tape has no layout: no learner had joined")
        lives = list(self._lives.values())
        return Script(self._config, self._layout, lives, self._course, self._sha256)

    def _on_run(self, event: Event) -> None:
        self._config = dict(event["config"])

    def _on_layout(self, event: Event) -> None:
        self._layout = event

    def _on_syncer_start(self, event: Event) -> None:
        if self._epoch:
            self._course.append(Restart(event["epoch"], _numbers(event["versions"])))
        self._epoch = event["epoch"]

    def _on_checkpoint(self, event: Event) -> None:
        self._course.append(Saved(_numbers(event["versions"])))

    def _on_join(self, event: Event) -> None:
        if event.get("ranks", 1) > 1:
            raise CannotReplay(
                f"learner {event['learner']} is a group of {event['ranks']} ranks; only learners "
                "of one process are replayed in this version"
            )
        name = event["incarnation"]
        life = self._lives.setdefault(name, LifeScript(str(event["learner"]), name))
        step = event.get("step", event["state_step"])
        life.attaches.append(Attach(event["generation"], self._epoch, step, event))
        self._by_generation[life.learner, self._epoch, event["generation"]] = life

    def _life(self, event: Event) -> LifeScript:
        for epoch in range(self._epoch, 0, -1):
            key = (str(event["learner"]), epoch, event["generation"])
            if key in self._by_generation:
                return self._by_generation[key]
        raise CannotReplay(
            f"learner {event['learner']}, generation {event['generation']}: no join on the tape"
        )

    def _on_apply(self, event: Event) -> None:
        version = _version(event)
        apply = ApplyAt(event["generation"], event["step"], event["fragment"], version)
        self._life(event).applies.append(apply)

    def _on_state(self, event: Event) -> None:
        if event["state"] == "finishing" and event.get("step") is not None:
            life = self._life(event)
            life.finishing_at = event["step"]
            life.max_steps = (self._config or {}).get("trainer", {}).get("max_steps")

    def _on_learner_checkpoint(self, event: Event) -> None:
        self._life(event).checkpoints.append(event["step"])

    def _on_contribution(self, event: Event) -> None:
        if event["verdict"] != "accepted":
            return
        key = (event["epoch"], event["round"])
        life = self._life(event)
        given = Given(
            life.learner,
            life.incarnation,
            event["generation"],
            event["step"],
            key,
            event["fragment"],
            bool(event.get("final")),
            event,
        )
        life.given.append(given)
        self._accepted[key].append(given)

    def _on_merge(self, event: Event) -> None:
        key = (event["epoch"], event["round"])
        names = [str(name) for name in event["contributors"]]
        found = {given.learner: given for given in self._accepted.pop(key, ())}
        if missing := [name for name in names if name not in found]:
            raise CannotReplay(
                f"round {key} merged contributions of learners {', '.join(missing)} that are not "
                "on the tape"
            )
        given = sorted((found[name] for name in names), key=lambda g: (g.learner, g.generation))
        self._course.append(
            MergeStep(
                event["epoch"],
                event["round"],
                event["fragment"],
                (event["epoch"], _number(event["version"])),
                tuple(given),
                bool(event.get("reanchor")),
                event["digest"],
            )
        )

    def _on_run_end(self, event: Event) -> None:
        self._sha256 = event.get("parameters_sha256") or self._sha256


def _number(version: Any) -> int:
    return int(version[1]) if isinstance(version, list | tuple) else int(version)


def _numbers(versions: Any) -> tuple[int, ...]:
    return tuple(_number(version) for version in versions)


def _version(event: Event) -> Version:
    version = event["version"]
    epoch = version[0] if isinstance(version, list | tuple) else event["epoch"]
    return (int(epoch), _number(version))
