"""What a row of the conformance table is, and what a learner of a cell leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.utils.data import DataLoader

from tests.trainers import Regression, loader

BATCH = 4  # samples, and tokens where a batch has no tokens of its own


def samples(learner: int, batches: int) -> DataLoader:
    """So many batches of regression data, other ones for each learner."""
    return loader(100 + learner, rows=BATCH * batches, batch_size=BATCH)


@dataclass(frozen=True, slots=True)
class Feature:
    """One thing that Lightning users do, and what has to come out of it.

    The learners train for `epochs` epochs of `batches` micro-batches with a live syncer, and
    plain ones with the reference callback; weights, Θ and `observe` have to be equal, counters and
    tokens what is said here. Everything is a function of modules in files, so that the ranks of a
    group can build it too.

    Attributes:
        options: Trainer options (callbacks among them) of (learner, a folder of its own).
        validates: `fit` gets validation data, the same for all learners.
        learners: 1 where they validate: one that does is left out of the rounds that open then.
        steps: inner steps that count.
        tokens: of each learner.
        observe: plain values and tensors that a user looks at, after fit.
        expected: what some of them have to be.
        wrap: around the module that `fit` is given.
        verify: what the run's events have to show.
        ignore: warnings of Lightning's or torch's that belong to the feature.
    """

    name: str
    title: str
    module: Callable[[], pl.LightningModule] = Regression
    options: Callable[[int, Path], dict[str, Any]] = lambda learner, folder: {}
    data: Callable[[int, int], DataLoader] = samples
    validates: bool = False
    learners: int = 2
    batches: int = 16
    epochs: int = 1
    steps: int = 16
    tokens: int = 64
    sync_every: int = 8
    fragments: int = 2
    observe: Callable[[pl.Trainer, pl.LightningModule, Path], dict[str, Any]] = (
        lambda trainer, module, folder: {}
    )
    expected: Mapping[str, Any] = field(default_factory=dict)
    wrap: Callable[[Any], Any] = lambda module: module
    verify: Callable[[Run], None] = lambda run: None
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """What a learner is left with: `weights` by canonical name, `seen` by the feature."""

    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    seen: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """Learners' ends (of a group, each rank's first), the tape's events of a kind, Θ by name,
    payloads that came, ranks of a learner's micro-batch."""

    ends: tuple[End, ...]
    events: Callable[[str], list[dict[str, Any]]]
    theta: Mapping[str, Tensor]
    uploaded: list[tuple[str, int]]
    ranks: int = 1
