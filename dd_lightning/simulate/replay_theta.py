"""The syncer's side of a replay: Θ, its versions, and what lives were told of their merges."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from torch import Tensor

from dd_lightning.algorithm import build_outer_optimizer
from dd_lightning.protocol.actions import Merge, MergeResult
from dd_lightning.protocol.config import AlgorithmConfig
from dd_lightning.protocol.layout import Layout
from dd_lightning.protocol.messages import RoundKey, Version
from dd_lightning.simulate.replay_script import CannotReplay, Restart, Script
from dd_lightning.syncer.checkpoint import parameters_sha256
from dd_lightning.syncer.merger import Merger
from dd_lightning.syncer.payload import Encoded
from dd_lightning.syncer.theta import Theta

Place = tuple[int, Version]


@dataclass(slots=True)
class _Kept:
    """Everything that a restart of the syncer brings back."""

    values: dict[str, Tensor]
    optimizer: dict[str, Any]
    upto: dict[str, list[RoundKey | None]]


class ReplayTheta:
    """Θ under the run's own merge rule and outer optimizer. The guard is off: whom it refused is
    not among the tape's contributors.

    A version's bytes are kept as long as an apply is to come that takes it.

    Args:
        values: version 0 by canonical name.
    """

    def __init__(
        self, algorithm: AlgorithmConfig, layout: Layout, values: Mapping[str, Tensor], run: Script
    ) -> None:
        self._algorithm = replace(algorithm, max_norm_ratio=None)
        self.layout = layout
        self.epoch = run.lives[0].first.epoch
        self.made_by: dict[Place, RoundKey] = {}
        self.versions: list[Version] = []
        self._published: dict[Place, Encoded] = {}
        self._to_come = Counter((a.fragment, a.version) for life in run.lives for a in life.applies)
        self._upto: dict[str, list[RoundKey | None]] = {}  # by incarnation
        self._upto_of: dict[tuple[str, int, Version], RoundKey | None] = {}
        # a checkpoint is a state between two merges; the last that fits is the one gone back to
        self._targets = {step.merges for step in run.course if isinstance(step, Restart)}
        self._kept: dict[tuple[int, ...], _Kept] = {}
        self._set(values, [(self.epoch, 0)] * layout.num_fragments)
        self._keep()

    def _set(self, values: Mapping[str, Tensor], versions: list[Version]) -> None:
        theta = Theta(self.layout, values)
        self.versions = list(versions)
        self._merger = Merger(theta, self._algorithm, versions, lambda: True)
        self._optimizer = build_outer_optimizer(theta.root.parameters(), self._algorithm.outer)
        for fragment, version in enumerate(versions):
            self._publish(fragment, version, (version[0], 0))

    def _publish(self, fragment: int, version: Version, key: RoundKey) -> None:
        self.versions[fragment] = version
        self.made_by[fragment, version] = key
        if self._to_come[fragment, version]:
            self._published[fragment, version] = self._merger.published(fragment)
        for incarnation, upto in self._upto.items():
            self._upto_of[incarnation, fragment, version] = upto[fragment]

    # ------------------------------------------------------------------ what lives are told

    def taken(self, fragment: int, version: Version) -> Encoded | None:
        """The bytes of a version, for one of the applies that take it; None: not merged yet."""
        place = (fragment, version)
        found = self._published.get(place)
        if found is not None:
            self._to_come[place] -= 1
            if not self._to_come[place]:
                del self._published[place]
        return found

    def upto(self, incarnation: str) -> list[RoundKey | None]:
        """Per fragment, the last round that merged a contribution of this life."""
        return self._upto.setdefault(incarnation, [None] * self.layout.num_fragments)

    def upto_of(self, incarnation: str, fragment: int, version: Version) -> RoundKey | None:
        """The same, as it was when `version` was published."""
        return self._upto_of.get((incarnation, fragment, version))

    # ------------------------------------------------------------------ the course

    def merge(self, job: Merge) -> MergeResult | None:
        """Do it; None where nobody contributed: Θ stays as it is, under the new version."""
        result = None
        if job.contributions:
            result = self._merger.merge(job, self._optimizer).result
        for held in job.contributions:
            self.upto(held.incarnation)[job.fragment] = (job.epoch, job.round)
        self._publish(job.fragment, job.version, (job.epoch, job.round))
        self._keep()
        return result

    def _keep(self) -> None:
        """The state that a checkpoint has which is gone back to."""
        merges = tuple(number for _, number in self.versions)
        if merges not in self._targets:
            return
        self._kept[merges] = _Kept(
            {name: tensor.detach().clone() for name, tensor in self._merger.theta.by_name.items()},
            copy.deepcopy(self._optimizer.state_dict()),
            copy.deepcopy(self._upto),
        )

    def restart(self, restart: Restart) -> None:
        """Go back to the checkpoint with these merges, in a new epoch.

        Raises:
            CannotReplay: the run was never in such a state.
        """
        kept = self._kept.get(restart.merges)
        if kept is None:
            raise CannotReplay(
                f"epoch {restart.epoch} went on from a checkpoint with merges {restart.merges}, "
                "at which the tape's merges never were"
            )
        self.epoch = restart.epoch
        self._upto = copy.deepcopy(kept.upto)
        self._set(kept.values, [(restart.epoch, n) for n in restart.merges])
        self._optimizer.load_state_dict(copy.deepcopy(kept.optimizer))

    @property
    def values(self) -> dict[str, Tensor]:
        """Θ now, by canonical name, buffers too."""
        return {name: tensor.detach() for name, tensor in self._merger.theta.by_name.items()}

    def sha256(self) -> str:
        """Of Θ's parameters, as the summary has it."""
        return parameters_sha256(dict(self._merger.theta.root.named_parameters()))
