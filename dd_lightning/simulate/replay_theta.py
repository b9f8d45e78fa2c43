"""The syncer's side of a replay: Θ, its versions, and what lives were told of their merges."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dd_lightning.algorithm import build_outer_optimizer
from dd_lightning.protocol.actions import Merge
from dd_lightning.protocol.config import AlgorithmConfig
from dd_lightning.protocol.layout import Layout
from dd_lightning.protocol.messages import RoundKey, Version
from dd_lightning.simulate.replay_script import CannotReplay, Restart
from dd_lightning.syncer.checkpoint import parameters_sha256
from dd_lightning.syncer.merger import Merger
from dd_lightning.syncer.payload import Encoded
from dd_lightning.syncer.theta import Theta


@dataclass(slots=True)
class _Kept:
    """Everything that a restart of the syncer brings back."""

    values: dict[str, Tensor]
    optimizer: dict[str, Any]
    upto: dict[str, list[RoundKey | None]]


class ReplayTheta:
    """Θ under the run's own merger and outer optimizer.

    Args:
        values: version 0 by canonical name.
        epoch: of the run's first start.
    """

    def __init__(
        self, algorithm: AlgorithmConfig, layout: Layout, values: Mapping[str, Tensor], epoch: int
    ) -> None:
        self._algorithm = algorithm
        self.layout = layout
        self.published: dict[tuple[int, Version], Encoded] = {}
        self.made_by: dict[tuple[int, Version], RoundKey] = {}
        self.versions: list[Version] = []
        self._upto: dict[str, list[RoundKey | None]] = {}  # by incarnation
        self._upto_of: dict[tuple[str, int, Version], RoundKey | None] = {}
        self._kept: dict[tuple[int, ...], _Kept] = {}
        self._set(values, [(epoch, 0)] * layout.num_fragments)

    def _set(self, values: Mapping[str, Tensor], versions: list[Version]) -> None:
        theta = Theta(self.layout, values)
        self.versions = list(versions)
        self._merger = Merger(theta, self._algorithm, versions, lambda: True)
        self._optimizer = build_outer_optimizer(theta.root.parameters(), self._algorithm.outer)
        for fragment, version in enumerate(versions):
            self._publish(fragment, version, (version[0], 0))

    def _publish(self, fragment: int, version: Version, key: RoundKey) -> None:
        self.versions[fragment] = version
        self.published[fragment, version] = self._merger.published(fragment)
        self.made_by[fragment, version] = key
        for incarnation, upto in self._upto.items():
            self._upto_of[incarnation, fragment, version] = upto[fragment]

    # ------------------------------------------------------------------ what lives are told

    def upto(self, incarnation: str) -> list[RoundKey | None]:
        """Per fragment, the last round that merged a contribution of this life."""
        return self._upto.setdefault(incarnation, [None] * self.layout.num_fragments)

    def upto_of(self, incarnation: str, fragment: int, version: Version) -> RoundKey | None:
        """The same, as it was when `version` was published."""
        return self._upto_of.get((incarnation, fragment, version))

    # ------------------------------------------------------------------ the course

    def merge(self, job: Merge) -> str:
        """Do it; the digest of the new version."""
        merged = self._merger.merge(job, self._optimizer)
        for held in job.contributions:
            self.upto(held.incarnation)[job.fragment] = (job.epoch, job.round)
        self._publish(job.fragment, job.version, (job.epoch, job.round))
        return merged.result.digest

    def keep(self, merges: tuple[int, ...]) -> None:
        """The syncer wrote a checkpoint that it will go back to."""
        self._kept[merges] = _Kept(
            {name: tensor.detach().clone() for name, tensor in self._merger.theta.by_name.items()},
            copy.deepcopy(self._optimizer.state_dict()),
            copy.deepcopy(self._upto),
        )

    def restart(self, restart: Restart) -> None:
        """Go back to the checkpoint with these merges, in a new epoch.

        Raises:
            CannotReplay: the tape has no such checkpoint.
        """
        kept = self._kept.get(restart.merges)
        if kept is None:
            raise CannotReplay(
                f"epoch {restart.epoch} went on from a checkpoint with merges {restart.merges}, "
                "which is not on the tape"
            )
        self._upto = copy.deepcopy(kept.upto)
        self._set(kept.values, [(restart.epoch, n) for n in restart.merges])
        self._optimizer.load_state_dict(copy.deepcopy(kept.optimizer))

    def sha256(self) -> str:
        """Of Θ's parameters, as the summary has it."""
        return parameters_sha256(dict(self._merger.theta.root.named_parameters()))
