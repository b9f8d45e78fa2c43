"""Runs the learners of one cell: with a live syncer, and plain beside it."""

from __future__ import annotations

import threading

import lightning.pytorch as pl
import torch

from dd_lightning import DecoupledDiLoCoStrategy
from dd_lightning.algorithm import canonical_name
from dd_lightning.protocol.config import SyncerConfig
from tests.conformance.feature import End, Run
from tests.conformance.plain_diloco import OUTER, Meeting, PlainDiLoCo
from tests.conformance.sharding import in_full, whole
from tests.trainers import QUIET, StartTogether, loader, run_threads

ADDRESS = "tcp://127.0.0.1:1"  # stands for the syncer in memory


def config(feature):
    """Everyone waits for the merge, so that a run is the same on any machine."""
    algorithm = {
        "preset": "diloco",
        "fragments": feature.fragments,
        "sync_every": feature.sync_every,
        "outer": OUTER,
    }
    return SyncerConfig.load({"algorithm": algorithm, "learners": feature.learners})


def fit(feature, module, learner, folder, strategy, callbacks, data, **own):
    """One learner's fit; its Trainer."""
    folder.mkdir(parents=True, exist_ok=True)  # of all ranks
    given = {"max_epochs": feature.epochs, **feature.options(learner, folder)}
    callbacks = [*callbacks, *given.pop("callbacks", [])]
    options = {**QUIET, "default_root_dir": folder, **given, **own}
    trainer = pl.Trainer(**options, strategy=strategy, callbacks=callbacks)
    validation = loader(7) if feature.validates else None
    trainer.fit(feature.wrap(module), data, validation)
    return trainer


def end(module, model, seen):
    """What it is left with; of a group, every rank asks. `model`: the module, or what wraps it."""
    with in_full(model):
        return End(
            {canonical_name(n): whole(p).clone() for n, p in module.named_parameters()},
            {canonical_name(n): b.detach().clone() for n, b in module.named_buffers()},
            seen,
        )


def train(feature, module, learner, folder, strategy, callback, data=None):
    """One learner of one process."""
    data = data or feature.data(learner, feature.batches)
    trainer = fit(feature, module, learner, folder, strategy, [callback], data)
    return end(module, module, feature.observe(trainer, module, folder))


def live(feature, inner, syncer, folder):
    """Both learners with the syncer that `syncer` makes."""
    running = syncer(config(feature))
    barrier = threading.Barrier(feature.learners)

    def learner(index, module):
        strategy = DecoupledDiLoCoStrategy(ADDRESS, learner=str(index), inner=inner, data="none")
        where = folder / f"live{index}"
        return train(feature, module, index, where, strategy, StartTogether(barrier))

    ends = side_by_side(feature, learner)
    return Run(ends, running.events, running.theta.by_name, running.uploaded)


def plain(feature, folder):
    """(ends, end of the reference)."""
    meeting = Meeting(feature.learners, feature.sync_every, feature.fragments)

    def learner(index, module):
        where = folder / f"plain{index}"
        return train(feature, module, index, where, "auto", PlainDiLoCo(meeting, index))

    return side_by_side(feature, learner), meeting.end


def side_by_side(feature, learner):
    """The learners as threads, each with a module of its own: their ends."""
    ends: list[End] = [None] * feature.learners
    modules = [feature.module() for _ in range(feature.learners)]

    def keep(index):
        ends[index] = learner(index, modules[index])

    try:
        run_threads(*(lambda index=index: keep(index) for index in range(feature.learners)))
    finally:
        # bf16-true sets it around each step, for all threads: whoever is last puts back bfloat16
        torch.set_default_dtype(torch.float32)
    return tuple(ends)


def assert_same(ours, theirs, what):
    """Bit for bit; buffers (whose formula is another) to 1e-6."""
    assert ours.weights.keys() == theirs.weights.keys()
    for name, tensor in theirs.weights.items():
        assert torch.equal(ours.weights[name], tensor), f"{what}: {name}"
    assert ours.buffers.keys() == theirs.buffers.keys()
    for name, tensor in theirs.buffers.items():
        torch.testing.assert_close(ours.buffers[name], tensor, rtol=1e-6, atol=1e-6, msg=name)
    assert ours.seen.keys() == theirs.seen.keys()
    for name, value in theirs.seen.items():
        same = (
            torch.equal(ours.seen[name], value)
            if torch.is_tensor(value)
            else (ours.seen[name] == value)
        )
        assert same, f"{what}: {name} is {ours.seen[name]}, plain Lightning's is {value}"
