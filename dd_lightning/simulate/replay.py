"""Plays a run again from its tape in one process, and compares Θ after every merge with it.

Who contributed to which round at which step, and when which fragment was applied, is the tape's;
every gradient, counter, weight and merge is computed anew. On one machine, with one dtype and
thread count, the digests are equal bit for bit; where they are not, the first difference is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from torch import Tensor

from dd_lightning.algorithm import CODECS, resolve
from dd_lightning.launch.learner import train
from dd_lightning.launch.settings import Settings
from dd_lightning.protocol.actions import HeldContribution, MergeResult
from dd_lightning.protocol.held import Snapshot
from dd_lightning.protocol.messages import Payload
from dd_lightning.protocol.transfer import StateSource
from dd_lightning.simulate.replay_life import ReplayLife, ReplaySurroundings
from dd_lightning.simulate.replay_script import (
    CannotReplay,
    Differs,
    Given,
    LifeScript,
    MergeStep,
    Restart,
    Script,
)
from dd_lightning.simulate.replay_syncer import ReplaySyncer


@dataclass(frozen=True, slots=True)
class Outcome:
    """`first_difference` is None where every merge, and Θ at the end, came out equal. `theta`: at
    the end, by canonical name, buffers too."""

    merges: int
    first_difference: dict[str, Any] | None
    theta: Mapping[str, Tensor]


class Replay:
    """One tape under replay.

    Args:
        settings: of the run, from the tape's configuration.
        folder: for the checkpoints that learners come back from.
    """

    def __init__(self, script: Script, settings: Settings, folder: Path) -> None:
        self.script, self.settings = script, settings
        self._folder = folder
        self._lives: dict[str, ReplayLife] = {}
        self._states: dict[str, StateSource] = {}  # donated, by the receiver's incarnation
        self._scripts = {life.incarnation: life for life in script.lives}
        self.syncer = ReplaySyncer(script, settings, self._initial, self._donated)
        self._codec = resolve("codec", settings.syncer.algorithm.codec, CODECS)

    def play(self) -> Outcome:
        """All merges in order, then Θ.

        Raises:
            CannotReplay: the tape holds something that this version does not replay.
        """
        merges, difference = 0, None
        try:
            self._begin()
            for step in self.script.course:
                if isinstance(step, MergeStep):
                    self._merge(step)
                    merges += 1
                else:
                    self._restart(step)
            self.check_end()
        except Differs as found:
            difference = found.where
        finally:
            for life in self._lives.values():
                life.end()
        return Outcome(merges, difference, self.syncer.theta.values if self.syncer.begun else {})

    # ------------------------------------------------------------------ what is compared

    def check_contribution(self, given: Given, snapshot: Snapshot, payload: Payload) -> None:
        """Raises Differs where it is not the tape's."""
        row = given.row
        for name, found in (
            ("base_version", list(snapshot.base)),
            ("steps", snapshot.steps),
            ("tokens", snapshot.tokens),
            ("step", snapshot.step),
            ("digest", payload.digest),
        ):
            if row[name] != found:
                raise Differs(
                    f"contribution: {name} {found} instead of {row[name]}",
                    given.key,
                    given.fragment,
                    given.learner,
                )

    def check_merge(
        self, step: MergeStep, held: Sequence[HeldContribution], result: MergeResult | None
    ) -> None:
        """Raises Differs where it is not the tape's."""
        weights = {one.learner: one.weight for one in held}
        names = [str(name) for name in step.row["contributors"]]
        for name, expected in zip(names, step.row.get("weights", []), strict=False):
            if weights[name] != expected:
                what = f"merge: weight {weights[name]} instead of {expected}"
                raise Differs(what, step.key, step.fragment, name)
        digest, expected = result.digest if result is not None else None, step.row["digest"]
        if digest != expected:
            raise Differs(f"merge: digest {digest} instead of {expected}", step.key, step.fragment)

    def check_end(self) -> None:
        """Raises Differs where Θ is not the one that the run ended with."""
        expected, theta = self.script.parameters_sha256, self.syncer.theta
        if expected is not None and (found := theta.sha256()) != expected:
            key = theta.made_by[0, theta.versions[0]]
            raise Differs(f"parameters_sha256 {found} instead of {expected}", key, 0)

    def no_snapshot(self, given: Given) -> None:
        """The learner contributed nothing to that round. Raises Differs."""
        base = tuple(given.row["base_version"])
        applies = self._scripts[given.incarnation].applies
        why = ""
        if not any(a.version == base and a.step <= given.step for a in applies if
                   a.fragment == given.fragment):  # fmt: skip
            why = f": its base {list(base)} is not applied by then"
        raise Differs(
            f"the learner takes no snapshot for this round by its step {given.step}{why}",
            given.key,
            given.fragment,
            given.learner,
        )

    # ------------------------------------------------------------------ the course

    def _begin(self) -> None:
        """The first learner hands in version 0."""
        first = self._life(self.script.lives[0])
        first.go(first.allowed)
        if not self.syncer.begun:
            raise CannotReplay(f"learner {first.script.learner} did not come as far as its join")

    def _merge(self, step: MergeStep) -> None:
        for learner in step.missing:
            what = "a contributor without a contribution on the tape"
            raise Differs(what, step.key, step.fragment, learner)
        held = [self._contribution(given) for given in step.contributions]
        taken = tuple(one for one in held if one is not None)
        self.check_merge(step, taken, self.syncer.merge(step, taken))

    def _contribution(self, given: Given) -> HeldContribution | None:
        """Let the learner run until it has taken the snapshot."""
        script = self._scripts[given.incarnation]
        snapshot = self._life(script).snapshot(given.key, given.step)
        if snapshot is None:
            self.no_snapshot(given)
            return None
        payload, data = self.syncer.encode(snapshot)
        self.check_contribution(given, snapshot, payload)
        return self.syncer.held(script, given, snapshot, payload, data)

    def _restart(self, step: Restart) -> None:
        self.syncer.restart(step)

    # ------------------------------------------------------------------ learners

    def _life(self, script: LifeScript) -> ReplayLife:
        """The life, begun; an earlier one of the learner has ended, its checkpoint saved."""
        if script.incarnation in self._lives:
            return self._lives[script.incarnation]
        self._end_earlier(script)
        if script.donor is not None:
            self._states[script.incarnation] = self._state_of(script, script.donor)
        life = ReplayLife(script, self._train, self.syncer, self._codec, self._folder)
        self._lives[script.incarnation] = life
        return life

    def _end_earlier(self, script: LifeScript) -> None:
        for earlier in self.script.lives:
            if earlier is script:
                return
            if earlier.learner != script.learner:
                continue
            life = self._life(earlier)
            for step in sorted(earlier.saves | earlier.donates):
                life.go_until(lambda life=life, step=step: life.kept(step), step)
            life.end()

    def _train(self, life: ReplayLife, callbacks: Sequence[Callback]) -> None:
        script = life.script
        train(
            self.settings.values,
            script.learner,
            self._folder / script.learner,
            "tcp://127.0.0.1:1",
            surroundings=ReplaySurroundings(life),
            callbacks=callbacks,
            checkpoint=self._checkpoint_of(script),
        )

    def _checkpoint_of(self, script: LifeScript) -> Path | None:
        row = script.first.row
        if row["state_from"] != "checkpoint":
            return None
        for earlier in reversed(self.script.lives):
            life = self._lives.get(earlier.incarnation)
            if earlier.learner == script.learner and life and row["state_step"] in life.saved:
                return life.checkpoint_file(row["state_step"])
        raise CannotReplay(
            f"learner {script.learner} went on from a checkpoint of step {row['state_step']}, "
            "which no earlier life on the tape has saved"
        )

    def _state_of(self, script: LifeScript, donor: str) -> StateSource:
        """What the donor held after the step that it gave its state of."""
        life, step = self._life(self._scripts[donor]), script.first.row["state_step"]
        if not life.go_until(lambda: life.kept(step), step):
            raise CannotReplay(
                f"learner {script.learner} took its inner optimizer state from learner "
                f"{life.script.learner}, which did not come to step {step} in this replay"
            )
        return life.donated[step]

    def _donated(self, script: LifeScript) -> StateSource | None:
        """The inner state that its donor had, made before the receiver began."""
        return None if script.donor is None else self._states.pop(script.incarnation)

    def _initial(self, fragments: int) -> Mapping[int, Mapping[str, Any]] | None:
        for life in self._lives.values():
            if life.comm is not None and len(life.comm.initial) == fragments:
                return life.comm.initial
        return None
