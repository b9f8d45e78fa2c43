"""Where a scenario runs: in this process, or alike on every rank of a group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from dd_lightning import DecoupledDiLoCoStrategy
from dd_lightning.algorithm import canonical_name
from dd_lightning.protocol.config import SyncerConfig
from tests.conformance import spawned
from tests.conformance.feature import samples
from tests.conformance.group_runs import SHARDING
from tests.conformance.live_syncer import LiveSyncer
from tests.conformance.plain_groups import plain_strategy
from tests.conformance.ranks import RANKS, leads
from tests.conformance.runs import ADDRESS
from tests.conformance.sharding import in_full, sharded, whole
from tests.memory_syncer import memory_syncers
from tests.trainers import QUIET, loader

WAITING = {"preset": "diloco", "outer": {"lr": 1.0, "momentum": 0.0}}


def config(learners: int = 1, **algorithm: Any) -> SyncerConfig:
    """No round is due, unless `sync_every` is given."""
    algorithm = WAITING | {"sync_every": 1000} | algorithm
    return SyncerConfig.load({"algorithm": algorithm, "learners": learners, "run_id": "run"})


@dataclass(frozen=True, slots=True)
class Place:
    """What a scenario needs of its surroundings.

    Attributes:
        syncer: makes a syncer of a configuration, which the next fits reach. In a group it is in
            rank 0's process; on the others nothing happens to it.
        folder: of all ranks.
        leads: whether this process's syncer is the one that is talked to.
        address: of the newest syncer.
    """

    inner: str
    syncer: Callable[[SyncerConfig], Any]
    folder: Path
    ranks: int = 1
    leads: bool = True
    address: Callable[[], str] = lambda: ADDRESS

    @property
    def spawns(self) -> bool:
        """Whether this process is none of the ranks."""
        return self.inner == "ddp_spawn"

    def trainer(self, learner: str = "0", **options: Any) -> pl.Trainer:
        """A learner's, of one epoch."""
        own = {"ckpt_weights_only": options.pop("ckpt_weights_only", None)}
        own["validate_global"] = options.pop("validate_global", False)
        strategy = DecoupledDiLoCoStrategy(
            self.address(), learner=learner, inner=self.inner, data="none", **own
        )
        return self._trainer(strategy, options)

    def plain(self, **options: Any) -> pl.Trainer:
        """Lightning's own, of the same kind."""
        return self._trainer("auto" if self.ranks == 1 else plain_strategy(self.inner), options)

    def _trainer(self, strategy: Any, options: dict[str, Any]) -> pl.Trainer:
        own = {"devices": self.ranks, "max_epochs": 1, "default_root_dir": self.folder}
        return pl.Trainer(**{**QUIET, **own, **options}, strategy=strategy)

    def kind(self, kind: type[pl.LightningModule]) -> type[pl.LightningModule]:
        """As this inner strategy can train it."""
        return sharded(kind) if self.inner in SHARDING else kind

    def module(self, kind: type[pl.LightningModule], *arguments: Any) -> pl.LightningModule:
        """One of that kind."""
        return self.kind(kind)(*arguments)

    def samples(self, learner: int, batches: int) -> DataLoader:
        """So many batches for each rank."""
        return samples(learner, self.ranks * batches)

    def validation(self) -> DataLoader:
        """The same for all."""
        return loader(7)

    def assert_counted(self, running: Any, steps: int, tokens: int, learner: str = "0") -> None:
        """Steps of a learner, tokens of each rank's, its ledger."""
        if not self.leads:
            return
        ends = [s for s in running.events("state") if s["state"] == "finishing"]
        assert [end["step"] for end in ends if end["learner"] == learner] == [steps]
        (ledger,) = [e for e in running.events("ledger") if e["learner"] == learner]
        for row in ledger["fragments"]:
            assert row["processed"] == row["merged"] + row["lost"] + row["pending"]
            assert row["processed"] == tokens * self.ranks

    def assert_theta(self, running: Any, weights: dict[str, torch.Tensor]) -> None:
        """Θ after one merge: Θ − (Θ − θ) is θ but for the rounding."""
        if not self.leads:
            return
        theta = running.parameters()
        assert theta.keys() == weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(theta[name], tensor, rtol=1e-6, atol=1e-6, msg=name)


def values(module: pl.LightningModule) -> dict[str, torch.Tensor]:
    """Copies of whole tensors by name; every rank asks for them."""
    model = module if module._trainer is None else module.trainer.strategy.model
    with in_full(module if model is None else model):
        named = (*module.named_parameters(), *module.named_buffers())
        return {canonical_name(name): whole(tensor).clone() for name, tensor in named}


def is_finite(module: pl.LightningModule) -> bool:
    """All of it."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in values(module).values())


def run_in_rank(name: str, inner: str, folder: str) -> None:
    """A scenario on one rank of a group, with a syncer in memory."""
    import pytest

    from tests.conformance.scenarios import SCENARIOS

    (scenario,) = [scenario for scenario in SCENARIOS if scenario.name == name]
    with pytest.MonkeyPatch.context() as patch, memory_syncers(patch) as syncer:
        scenario.run(Place(inner, syncer, Path(folder), RANKS, leads()))


def fit_in_rank(kind: type, inner: str, folder: str, address: str, batches: int) -> bool:
    """Learner "0" of a run with a syncer at `address`; whether it ends with finite weights."""
    place = Place(inner, None, Path(folder), RANKS, leads(), lambda: address)
    module = place.module(kind)
    place.trainer().fit(module, place.samples(0, batches))
    return is_finite(module)


def run_spawned(scenario: Any, ranks: Any, folder: Path) -> None:
    """A scenario in this process, whose fits are in the ranks, with a syncer over sockets."""
    import pytest

    with contextlib.ExitStack() as close, pytest.MonkeyPatch.context() as patch:
        patch.setattr(spawned.PLACE, spawned.Spawning(ranks, None))
        started: list[LiveSyncer] = []

        def syncer(of: SyncerConfig) -> LiveSyncer:
            started.append(close.enter_context(LiveSyncer(folder / f"run{len(started)}", of)))
            return started[-1]

        place = Place("ddp_spawn", syncer, folder, RANKS, address=lambda: started[-1].address)
        scenario.run(place)
