"""Plays a run again from its tape in one process, and compares Θ after every merge with it.

Who contributed to which round at which step, and when which fragment was applied, is the tape's;
every gradient, counter, weight and merge is computed anew. On one machine, with one dtype and
thread count, the digests are equal bit for bit; where they are not, the first difference is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from dd_lightning.algorithm import CODECS, contribution_weight, resolve
from dd_lightning.launch.learner import train
from dd_lightning.launch.settings import Settings
from dd_lightning.learner.payload import Coder
from dd_lightning.protocol.actions import HeldContribution, Merge
from dd_lightning.protocol.layout import build_layout
from dd_lightning.protocol.link_actions import stamped
from dd_lightning.protocol.messages import (
    Fragment,
    Pull,
    RoundKey,
    TensorInfo,
    Welcome,
)
from dd_lightning.simulate.replay_life import ReplayLife, ReplaySurroundings
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
from dd_lightning.simulate.replay_theta import ReplayTheta
from dd_lightning.syncer.payload import PayloadReader, encode_values

TURNS = 3  # that a learner may take without coming nearer to what is asked of it


class Differs(Exception):
    """The replay is not the run: where, and in what."""

    def __init__(self, what: str, key: RoundKey, fragment: int, learner: str | None = None) -> None:
        super().__init__(what)
        self.where = {
            "epoch": key[0],
            "round": key[1],
            "fragment": fragment,
            "learner": learner,
            "what": what,
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """`first_difference` is None where every merge, and Θ at the end, came out equal."""

    merges: int
    first_difference: dict[str, Any] | None


class Replay:
    """One tape under replay.

    Args:
        settings: of the run, from the tape's configuration.
        folder: for the checkpoints that learners come back from.

    Raises:
        CannotReplay: the tape holds something that this version does not replay.
    """

    def __init__(self, script: Script, settings: Settings, folder: Path) -> None:
        self.script, self.settings = script, settings
        self._folder = folder
        self._algorithm = settings.syncer.algorithm
        self._theta: ReplayTheta | None = None
        self._lives: dict[str, ReplayLife] = {}
        self._scripts = {life.incarnation: life for life in script.lives}
        self._targets = {step.merges for step in script.course if isinstance(step, Restart)}
        self._coder: Coder | None = None
        self._reader: PayloadReader | None = None
        self._tensors: tuple[TensorInfo, ...] = ()
        for life in script.lives:
            if life.first.row["state_from"] == "peer":
                raise CannotReplay(
                    f"learner {life.learner} took its inner optimizer state from a peer; only "
                    "state from its own checkpoint, or none, is replayed in this version"
                )

    def play(self) -> Outcome:
        """All merges in order, then Θ."""
        merges = 0
        try:
            self._begin()
            for step in self.script.course:
                if isinstance(step, MergeStep):
                    self._merge(step)
                    merges += 1
                elif isinstance(step, Restart):
                    self._known.restart(step)
                elif step.merges in self._targets and self._theta is not None:
                    self._theta.keep(step.merges)
            self._compare_end()
        except Differs as difference:
            return Outcome(merges, difference.where)
        finally:
            for life in self._lives.values():
                life.end()
        return Outcome(merges, None)

    # ------------------------------------------------------------------ version 0

    def _begin(self) -> None:
        first = self._life(self.script.lives[0])
        first.go(first.allowed)
        if first.comm is None or self._theta is None:
            raise CannotReplay(f"learner {first.script.learner} did not come as far as its join")

    def _initialize(self, tensors: tuple[TensorInfo, ...]) -> None:
        layout = build_layout(tensors, self._algorithm)
        if layout.fingerprint != self.script.layout["fingerprint"]:
            raise CannotReplay(
                f"the model has layout {layout.fingerprint}, the tape's run had "
                f"{self.script.layout['fingerprint']}: another version of the task or of its data"
            )
        self._tensors = tensors
        self._coder = Coder.of(tensors, self._algorithm.codec)
        self._reader = PayloadReader(layout, resolve("codec", self._algorithm.codec, CODECS))

    @property
    def _known(self) -> ReplayTheta:
        assert self._theta is not None  # made when the first learner has handed in version 0
        return self._theta

    # ------------------------------------------------------------------ the course

    def _merge(self, step: MergeStep) -> None:
        held = tuple(self._contribution(step, given) for given in step.contributions)
        job = Merge(step.epoch, step.round, step.fragment, step.version, held, step.reanchor)
        digest = self._known.merge(job)
        if digest != step.digest:
            raise Differs(
                f"digest {digest} instead of {step.digest}", (step.epoch, step.round), step.fragment
            )

    def _contribution(self, step: MergeStep, given: Given) -> HeldContribution:
        script = self._scripts[given.incarnation]
        snapshot = self._snapshot(script, given)
        assert self._coder is not None and self._reader is not None  # a learner has joined
        payload, data = self._coder.encode(snapshot)
        row = given.row
        for name, found in (
            ("steps", snapshot.steps),
            ("tokens", snapshot.tokens),
            ("digest", payload.digest),
        ):
            if row[name] != found:
                raise Differs(
                    f"contribution: {name} {found} instead of {row[name]}",
                    given.key,
                    given.fragment,
                    given.learner,
                )
        message = stamped(snapshot, payload, given.generation, self._known.layout.fingerprint)
        return HeldContribution(
            given.learner,
            given.generation,
            script.incarnation,
            message,
            self._reader.decode(given.fragment, payload, data),
            script.first.row.get("dtype", "float32"),
            0.0,
            contribution_weight(snapshot.tokens, snapshot.steps, self._algorithm.sync_every),
        )

    def _snapshot(self, script: LifeScript, given: Given) -> Any:
        """Let the learner run until it has taken the snapshot."""
        life = self._life(script)
        for _ in range(TURNS + given.step):
            if life.comm is not None and given.key in life.comm.snapshots:
                return life.comm.snapshots[given.key]
            if life.actor.ended:
                break
            life.go(given.step)
        raise Differs(
            f"the learner took no snapshot for this round by its step {given.step}",
            given.key,
            given.fragment,
            given.learner,
        )

    def _compare_end(self) -> None:
        expected, theta = self.script.parameters_sha256, self._known
        if expected is not None and (found := theta.sha256()) != expected:
            key = theta.made_by[0, theta.versions[0]]
            raise Differs(f"parameters_sha256 {found} instead of {expected}", key, 0)

    # ------------------------------------------------------------------ learners

    def _life(self, script: LifeScript) -> ReplayLife:
        """The life, begun; an earlier one of the learner has ended, its checkpoint saved."""
        if script.incarnation in self._lives:
            return self._lives[script.incarnation]
        self._end_earlier(script)
        life = ReplayLife(
            script,
            self._train,
            self._theta_of,
            self._welcome,
            self._pull,
            self._algorithm.codec,
            self._folder,
        )
        self._lives[script.incarnation] = life
        return life

    def _end_earlier(self, script: LifeScript) -> None:
        for earlier in self.script.lives:
            if earlier is script:
                return
            if earlier.learner != script.learner:
                continue
            life = self._life(earlier)
            wanted = script.first.row["state_step"]
            if script.first.row["state_from"] == "checkpoint" and wanted in life.saves:
                while wanted not in life.saved and not life.actor.ended:
                    before = life.allowed
                    life.go(wanted + 1 if life.allowed >= wanted else wanted)
                    if life.allowed == before == wanted + 1 and wanted not in life.saved:
                        break
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

    # ------------------------------------------------------------------ what the syncer says

    def _welcome(
        self, script: LifeScript, attach: Attach, tensors: tuple[TensorInfo, ...]
    ) -> Welcome:
        if self._coder is None:
            self._initialize(tensors)
        layout = build_layout(tensors, self._algorithm)
        row = attach.row
        upto: list[RoundKey | None] = [None] * layout.num_fragments
        if self._theta is not None:
            upto = list(self._theta.upto(script.incarnation))
        return Welcome(
            learner=script.learner,
            number=0,
            generation=attach.generation,
            epoch=attach.epoch,
            run_id=self.settings.syncer.run_id or "replay",
            config=self.settings.syncer.to_dict(),
            fragments=layout.fragments,
            averaged=tuple(sorted(layout.averaged)),
            fingerprint=layout.fingerprint,
            send_initial=self._theta is None,
            clock=row.get("clock", 0),
            offset=row.get("offset", 0),
            next_round=row.get("next_round", 1),
            merged_upto=tuple(upto),
            data_slot=row["data_slot"],
            num_data_slots=self.settings.syncer.num_data_slots,
            data_position=row["data_position"],
            start_step=row.get("start_step", 0),
            peer_address="",
        )

    def _theta_of(
        self, script: LifeScript, apply: ApplyAt
    ) -> tuple[Fragment, dict[str, Any]] | None:
        if self._theta is None and not self._take_initial():
            return None
        theta, place = self._known, (apply.fragment, apply.version)
        published = theta.published.get(place)
        if published is None:
            return None
        theta.upto(script.incarnation)  # from now on its merges are followed
        message = Fragment(
            generation=apply.generation,
            fragment=apply.fragment,
            version=apply.version,
            round=theta.made_by[place],
            merged_upto=theta.upto_of(script.incarnation, *place),
            payload=published.payload,
        )
        return message, published.tensors(self._shapes)

    def _take_initial(self) -> bool:
        """Version 0, once a learner has handed in all of it."""
        for life in self._lives.values():
            if life.comm is None or not self._tensors:
                continue
            layout = build_layout(self._tensors, self._algorithm)
            if len(life.comm.initial) == layout.num_fragments:
                values: dict[str, Any] = {}
                for fragment in range(layout.num_fragments):
                    values |= encode_values(life.comm.initial[fragment]).tensors(self._shapes)
                epoch = life.script.first.epoch
                self._theta = ReplayTheta(self._algorithm, layout, values, epoch)
                return True
        return False

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {tensor.name: tensor.shape for tensor in self._tensors}

    def _pull(self, script: LifeScript, given: Given) -> Pull:
        base = given.row["base_version"]
        return Pull(
            generation=given.generation,
            epoch=given.key[0],
            round=given.key[1],
            fragment=given.fragment,
            base=(int(base[0]), int(base[1])),
            merged_upto=self._known.upto(script.incarnation)[given.fragment],
            final=given.final,
            values=given.row.get("kind", "values") == "values",
        )
