"""Reads the script of a replay from the rows of a tape; what cannot be replayed is refused here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dd_lightning.protocol.messages import RoundKey, Version
from dd_lightning.report.observer import Event
from dd_lightning.simulate.replay_script import (
    ApplyAt,
    Attach,
    CannotReplay,
    Given,
    LifeScript,
    MergeStep,
    Restart,
    Script,
)

NON_FINITE = "non-finite"


class ScriptReader:
    """Reads the events of one tape, in order."""

    def __init__(self) -> None:
        self._config: dict[str, Any] | None = None
        self._layout: Mapping[str, Any] | None = None
        self._epoch = 0
        self._lives: dict[str, LifeScript] = {}
        self._by_generation: dict[tuple[str, int, int], LifeScript] = {}
        self._now: dict[str, LifeScript] = {}  # the life that a learner is in
        self._donors: dict[str, LifeScript] = {}  # of a learner whose join comes next
        self._saved: dict[str, set[int]] = defaultdict(set)  # steps, by incarnation
        self._applied: set[tuple[str, int, Version]] = set()
        self._accepted: dict[RoundKey, list[Given]] = defaultdict(list)
        self._late: dict[RoundKey, list[Given]] = defaultdict(list)
        self._course: list[MergeStep | Restart] = []
        self._sha256: str | None = None

    def read(self, events: Iterable[Event]) -> Script:
        """The whole tape.

        Raises:
            CannotReplay: something is missing, or this version does not replay it.
        """
        try:
            return self._read(list(events))
        except KeyError as error:  # of a row, or of a learner or life that no row introduced
            raise CannotReplay(
                f"the tape has a row that lacks {error}, or names what no earlier row introduced: "
                "it is not as this version writes it"
            ) from error

    def _read(self, events: Sequence[Event]) -> Script:
        # joins first: one that waited for a peer's state stands behind what came after it
        for event in events:
            if event["event"] == "syncer_start":
                self._epoch = event["epoch"]
            elif event["event"] == "join":
                self._on_join(event)
        self._epoch = 0
        for event in events:
            if event["event"] == "join":
                self._on_begin(event)
            elif handler := getattr(self, f"_on_{event['event']}", None):
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
        for life in lives:
            life.applies.sort(key=lambda apply: (apply.step, apply.version))
            self._mark_save(life)
            self._time_attaches(life)
        course, late = self._course, dict(self._late)
        return Script(self._config, self._layout, lives, course, late, self._sha256)

    # ------------------------------------------------------------------ the run, the syncer

    def _on_run(self, event: Event) -> None:
        self._config = dict(event["config"])
        if self._config.get("algorithm", {}).get("preset") == "data_parallel":
            raise CannotReplay(
                "the run is of algorithm=data_parallel, the simulated baseline, which has no "
                "contributions to replay: run it again, the same seed gives the same tape"
            )

    def _on_layout(self, event: Event) -> None:
        self._layout = event

    def _on_syncer_start(self, event: Event) -> None:
        if event.get("restored_from"):
            raise CannotReplay(
                f"the run was gone on with from the consistent cut {event['restored_from']}; only "
                "restarts from ordinary checkpoints are replayed in this version"
            )
        merges = _numbers(event["versions"])
        if self._epoch and (merges or self._course):
            self._course.append(Restart(event["epoch"], merges))
        self._epoch = event["epoch"]

    def _on_run_end(self, event: Event) -> None:
        self._sha256 = event.get("parameters_sha256") or self._sha256

    def _on_fault(self, event: Event) -> None:
        kind = event.get("action") or event["kind"]
        if "poison" in kind and event["fired"] is not None:
            raise CannotReplay(
                f"the chaos plan overwrote parameters of learner {event['target']} "
                f"({kind}), after which it took Θ anew: that is not replayed in this "
                "version"
            )

    # ------------------------------------------------------------------ lives

    def _on_join(self, event: Event) -> None:
        if event.get("ranks", 1) > 1:
            raise CannotReplay(
                f"learner {event['learner']} is a group of {event['ranks']} ranks; only learners "
                "of one process are replayed in this version"
            )
        if event.get("former"):
            raise CannotReplay(
                f"learner {event['learner']} carries on its part of a consistent cut; only "
                "restarts from ordinary checkpoints are replayed in this version"
            )
        name = event["incarnation"]
        life = self._lives.setdefault(name, LifeScript(str(event["learner"]), name))
        step = event.get("step", event["state_step"])
        life.attaches.append(Attach(event["generation"], self._epoch, step, step, event))
        self._by_generation[life.learner, self._epoch, event["generation"]] = life

    def _on_begin(self, event: Event) -> None:
        """A join, in its place among the other rows."""
        life = self._now[str(event["learner"])] = self._lives[event["incarnation"]]
        donor = self._donors.pop(life.learner, None)
        if event is not life.first.row or event["state_from"] != "peer":
            return
        if donor is None:
            raise CannotReplay(
                f"learner {life.learner} took its inner optimizer state from a peer, but the tape "
                "does not say from which"
            )
        life.donor = donor.incarnation
        donor.donates.add(event["state_step"])

    def _on_donation(self, event: Event) -> None:
        if event["outcome"] == "loaded":
            self._donors[str(event["learner"])] = self._now[str(event["donor"])]

    def _life(self, event: Event) -> LifeScript:
        if "incarnation" in event and event["incarnation"] in self._lives:
            return self._lives[event["incarnation"]]
        for epoch in range(self._epoch, 0, -1):
            key = (str(event["learner"]), epoch, event["generation"])
            if key in self._by_generation:
                return self._by_generation[key]
        raise CannotReplay(
            f"learner {event['learner']}, generation {event['generation']}: no join on the tape"
        )

    def _on_apply(self, event: Event) -> None:
        """A join after a restart of the syncer may state what the tape had already."""
        life, version = self._life(event), _version(event)
        apply = ApplyAt(event["generation"], event["step"], event["fragment"], version)
        if (life.incarnation, apply.fragment, version) not in self._applied:
            self._applied.add((life.incarnation, apply.fragment, version))
            life.applies.append(apply)

    def _on_state(self, event: Event) -> None:
        if event["state"] == "finishing" and event.get("step") is not None:
            life = self._life(event)
            life.finishing_at = event["step"]
            life.max_steps = (self._config or {}).get("trainer", {}).get("max_steps")

    def _on_learner_checkpoint(self, event: Event) -> None:
        self._saved[self._life(event).incarnation].add(event["step"])

    def _mark_save(self, life: LifeScript) -> None:
        """The state this life went on from was saved by an earlier one, which may have been killed
        before it could say so."""
        if life.first.row["state_from"] != "checkpoint":
            return
        step = life.first.row["state_step"]
        earlier = [one for one in self._lives.values() if one.learner == life.learner]
        earlier = earlier[: earlier.index(life)]
        said = [one for one in earlier if step in self._saved[one.incarnation]]
        for one in (said or earlier)[-1:]:
            one.saves.add(step)

    def _time_attaches(self, life: LifeScript) -> None:
        """Under `wait: overlap` a learner counts its rounds' own steps from the one at which it
        heard that it was admitted again, some steps after it had asked. The tape has no row of
        that; but a snapshot taken unasked tells it, and one that was asked for is never earlier."""
        algorithm = (self._config or {}).get("algorithm", {})
        if algorithm.get("wait") != "overlap":
            return
        fragments = len((self._layout or {})["fragments"])
        known = [*life.given, *(one for late in self._late.values() for one in late)]
        for index, attach in enumerate(life.attaches[1:], start=1):
            row, heard = attach.row, []
            for given in known:
                is_its = (given.learner, given.key[0]) == (life.learner, attach.epoch)
                is_its = is_its and given.generation == attach.generation and not given.final
                if is_its and given.key[1] >= row["next_round"] and given.step >= attach.step:
                    own = -(-(given.key[1] * algorithm["sync_every"] + row["offset"]) // fragments)
                    heard.append(min(given.step, row["clock"] - own + given.step))
            step = max(attach.step, min(heard, default=attach.step))
            life.attaches[index] = replace(attach, step=step)

    # ------------------------------------------------------------------ rounds

    def _on_contribution(self, event: Event) -> None:
        if event["verdict"] == NON_FINITE:
            raise CannotReplay(
                f"learner {event['learner']} diverged (a contribution was not finite) and may "
                "have been told to take Θ anew: that is not replayed in this version"
            )
        if event["verdict"] not in ("accepted", "late"):
            return
        key, life = (event["epoch"], event["round"]), self._life(event)
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
        (self._accepted if event["verdict"] == "accepted" else self._late)[key].append(given)

    def _on_merge(self, event: Event) -> None:
        key = (event["epoch"], event["round"])
        names = [str(name) for name in event["contributors"]]
        found = {given.learner: given for given in self._accepted.pop(key, ())}
        taken = [found[name] for name in names if name in found]
        for given in taken:
            self._lives[given.incarnation].given.append(given)
        self._course.append(
            MergeStep(
                event["epoch"],
                event["round"],
                event["fragment"],
                (event["epoch"], _number(event["version"])),
                tuple(sorted(taken, key=lambda given: (given.learner, given.generation))),
                tuple(name for name in names if name not in found),
                event,
            )
        )


def _number(version: Any) -> int:
    return int(version[1]) if isinstance(version, list | tuple) else int(version)


def _numbers(versions: Any) -> tuple[int, ...]:
    return tuple(_number(version) for version in versions)


def _version(event: Event) -> Version:
    version = event["version"]
    epoch = version[0] if isinstance(version, list | tuple) else event["epoch"]
    return (int(epoch), _number(version))
