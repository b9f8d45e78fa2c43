"""The syncer under replay: what it would say to each life, and its merges, computed anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dd_lightning.algorithm import CODECS, contribution_weight, resolve
from dd_lightning.launch.settings import Settings
from dd_lightning.learner.payload import Coder
from dd_lightning.protocol.actions import HeldContribution, Merge, MergeResult
from dd_lightning.protocol.held import Snapshot
from dd_lightning.protocol.layout import Layout, build_layout
from dd_lightning.protocol.link_actions import stamped
from dd_lightning.protocol.messages import (
    Fragment,
    Payload,
    Pull,
    RoundKey,
    TensorInfo,
    Version,
    Welcome,
)
from dd_lightning.protocol.transfer import StateSource
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

InitialOf = Callable[[int], Mapping[int, Mapping[str, Any]] | None]
"""Version 0 by fragment, once a learner has handed in as many as asked for."""


class ReplaySyncer:
    """Answers lives (`replay_comm.Answers`) and merges what they contribute.

    Args:
        initial: where version 0 comes from.
        state: the inner state that a life was donated.
    """

    def __init__(
        self,
        script: Script,
        settings: Settings,
        initial: InitialOf,
        state: Callable[[LifeScript], StateSource | None],
    ) -> None:
        self._script, self._settings = script, settings
        self._algorithm = settings.syncer.algorithm
        self._initial, self.state = initial, state
        self._theta: ReplayTheta | None = None
        self._layout: Layout | None = None
        self._tensors: tuple[TensorInfo, ...] = ()
        self._coder: Coder | None = None
        self._reader: PayloadReader | None = None

    @property
    def theta(self) -> ReplayTheta:
        """Θ; the first learner has handed in version 0."""
        assert self._theta is not None
        return self._theta

    @property
    def begun(self) -> bool:
        """Whether there is a Θ."""
        return self._theta is not None or self._take_initial()

    # ------------------------------------------------------------------ what it says

    def welcome(
        self, script: LifeScript, attach: Attach, tensors: tuple[TensorInfo, ...]
    ) -> Welcome | None:
        """The answer to a join; None while the syncer has not been started for it."""
        layout = self._layout or self._initialize(tensors)
        if self._theta is not None and self._theta.epoch < attach.epoch:
            return None
        row = attach.row
        upto: list[RoundKey | None] = [None] * layout.num_fragments
        if self._theta is not None:
            upto = list(self._theta.upto(script.incarnation))
        return Welcome(
            learner=script.learner,
            number=0,
            generation=attach.generation,
            epoch=attach.epoch,
            run_id=self._settings.syncer.run_id or "replay",
            config=self._settings.syncer.to_dict(),
            fragments=layout.fragments,
            averaged=tuple(sorted(layout.averaged)),
            fingerprint=layout.fingerprint,
            send_initial=self._theta is None,
            clock=row.get("clock", 0),
            offset=row.get("offset", 0),
            next_round=row.get("next_round", 1),
            merged_upto=tuple(upto),
            data_slot=row["data_slot"],
            num_data_slots=self._settings.syncer.num_data_slots,
            data_position=row["data_position"],
            start_step=row.get("start_step", 0),
            peer_address="",
            donated=attach is script.first and script.waits_for_state,
        )

    def fragment(
        self, script: LifeScript, apply: ApplyAt
    ) -> tuple[Fragment, Mapping[str, Any]] | None:
        """A version of a fragment; None while it is not merged."""
        if not self.begun:
            return None
        theta, place = self.theta, (apply.fragment, apply.version)
        published = theta.taken(*place)
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

    def pull(self, script: LifeScript, given: Given) -> Pull:
        """The question that a contribution answered."""
        base = given.row["base_version"]
        return Pull(
            generation=given.generation,
            epoch=given.key[0],
            round=given.key[1],
            fragment=given.fragment,
            base=(int(base[0]), int(base[1])),
            merged_upto=self.theta.upto(script.incarnation)[given.fragment],
            final=given.final,
            values=given.row.get("kind", "values") == "values",
        )

    def made_by(self, fragment: int, version: Version) -> RoundKey:
        """The round that a version is of."""
        return self.theta.made_by.get((fragment, version), (version[0], 0))

    # ------------------------------------------------------------------ what it does

    def encode(self, snapshot: Snapshot) -> tuple[Payload, Any]:
        """As the learner's comm thread does it."""
        assert self._coder is not None  # a learner has joined
        return self._coder.encode(snapshot)

    def held(
        self, script: LifeScript, given: Given, snapshot: Snapshot, payload: Payload, data: Any
    ) -> HeldContribution:
        """A contribution as it has arrived, with the weight that it has here."""
        assert self._reader is not None  # a learner has joined
        rule = self._algorithm
        return HeldContribution(
            given.learner,
            given.generation,
            script.incarnation,
            stamped(snapshot, payload, given.generation, self.theta.layout.fingerprint),
            self._reader.decode(given.fragment, payload, data),
            script.first.row.get("dtype", "float32"),
            0.0,
            contribution_weight(snapshot.tokens, snapshot.steps, rule.sync_every, rule.weights),
        )

    def merge(self, step: MergeStep, held: tuple[HeldContribution, ...]) -> MergeResult | None:
        """One merge; None where nobody contributed: Θ stays, under its new version."""
        job = Merge(step.epoch, step.round, step.fragment, step.version, held, step.reanchor)
        return self.theta.merge(job)

    def restart(self, step: Restart) -> None:
        """It starts again from its checkpoint."""
        self.theta.restart(step)

    # ------------------------------------------------------------------ version 0

    def _initialize(self, tensors: tuple[TensorInfo, ...]) -> Layout:
        layout = build_layout(tensors, self._algorithm)
        expected = self._script.layout["fingerprint"]
        if layout.fingerprint != expected:
            raise CannotReplay(
                f"the model has layout {layout.fingerprint}, the tape's run had {expected}: "
                "another version of the task or of its data"
            )
        self._layout, self._tensors = layout, tensors
        self._coder = Coder.of(tensors, self._algorithm.codec)
        self._reader = PayloadReader(layout, resolve("codec", self._algorithm.codec, CODECS))
        return layout

    def _take_initial(self) -> bool:
        """Version 0, once a learner has handed in all of it."""
        layout = self._layout
        found = None if layout is None else self._initial(layout.num_fragments)
        if layout is None or found is None:
            return False
        values: dict[str, Any] = {}
        for fragment in range(layout.num_fragments):
            values |= encode_values(found[fragment]).tensors(self._shapes)
        self._theta = ReplayTheta(self._algorithm, layout, values, self._script)
        return True

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {tensor.name: tensor.shape for tensor in self._tensors}
