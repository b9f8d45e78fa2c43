"""Runs a cell whose learner 0 is a group of two ranks, and learner 1 one process as ever.

The group trains in `ranks.py`'s processes with a live syncer over sockets; then the same ranks,
under plain Lightning's strategy of that kind, with the reference of `plain_diloco.py`. Each rank
has a micro-batch of 4 samples where learner 1 has one of 8, so that learners weigh the same.
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from dd_lightning import DecoupledDiLoCoStrategy
from tests.conformance import spawned
from tests.conformance.feature import Run
from tests.conformance.live_syncer import LiveSyncer
from tests.conformance.plain_diloco import Meeting, PlainDiLoCo
from tests.conformance.plain_groups import plain_strategy
from tests.conformance.ranks import RANKS, ask, leads
from tests.conformance.runs import config, end, fit, side_by_side, train
from tests.conformance.sharding import sharded
from tests.trainers import WAIT_S, StartTogether

SHARDING = ("fsdp2",)  # where the module does it itself
GROUPS = ("ddp", "ddp_spawn", "fsdp", "fsdp2")


def live(feature, inner, ranks, folder):
    """Both learners' run; `ends` has both ranks' and then learner 1's."""
    barrier = threading.Barrier(feature.learners)
    with LiveSyncer(folder / "run", config(feature)) as syncer:
        group = Group(feature, inner, ranks, folder / "live0", syncer.address)

        def learner(index, module):
            if index == 0:
                with aborting(barrier):
                    return group.train(module, lambda kind, value: barrier.wait(WAIT_S))
            strategy = DecoupledDiLoCoStrategy(syncer.address, learner=str(index), data="none")
            where, callback = folder / f"live{index}", StartTogether(barrier)
            return train(feature, module, index, where, strategy, callback, partner_data(feature))

        ends = flat(side_by_side(feature, learner))
    return Run(ends, syncer.events, syncer.theta, syncer.uploaded, RANKS)


def plain(feature, inner, ranks, folder):
    """(ends, end of the reference)."""
    meeting = Meeting(feature.learners, feature.sync_every, feature.fragments)
    group = Group(feature, inner, ranks, folder / "plain0", "")

    def answer(kind, value):
        return meeting.exchange(0, value) if kind == "exchange" else meeting.ended(value)

    def learner(index, module):
        if index == 0:
            with aborting(meeting.barrier):
                return group.train(module, answer)
        where, callback = folder / f"plain{index}", PlainDiLoCo(meeting, index)
        return train(feature, module, index, where, "auto", callback, partner_data(feature))

    return flat(side_by_side(feature, learner)), meeting.end


def flat(ends):
    """The ranks' and learner 1's, if there is one."""
    return (*ends[0], *ends[1:])


class aborting:
    """Nobody waits any longer at a barrier where another has failed."""

    def __init__(self, barrier):
        self._barrier = barrier

    def __enter__(self):
        pass

    def __exit__(self, kind, *_):
        if kind is not None:
            self._barrier.abort()


def partner_data(feature):
    """Of learner 1: as many tokens in each batch as all ranks of learner 0 have."""
    given = feature.data(1, RANKS * feature.batches)
    return DataLoader(given.dataset, batch_size=RANKS * given.batch_size)


class Group:
    """Learner 0 of a cell, with a syncer or (no address) plain."""

    def __init__(self, feature, inner, ranks, folder, address):
        self.feature, self.inner, self.ranks = feature, inner, ranks
        self.folder, self.address = folder, address
        self._seen = {}

    def train(self, module, answer):
        """Its end, of each rank; `answer(kind, value)` of what they ask on the way."""

        def answered(question):
            kind, value = question
            if kind == "seen":
                self._seen = value
                return None
            return answer(kind, value)

        if self.inner != "ddp_spawn":
            given = (self.feature.name, self.inner, str(self.folder), self.address)
            return self.ranks.run(fit_in_rank, *given, answer=answered)
        callbacks = [Seen(self.feature.name, self.folder)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spawned.PLACE, spawned.Spawning(self.ranks, answered))
            fit_group(self.feature, module, self.inner, self.folder, self.address, callbacks)
        return [end(module, module, self._seen)]  # the weights that came back


def fit_in_rank(name, inner, folder, address):
    """Of a group whose ranks are started before the Trainer."""
    from tests.conformance.cells import FEATURES

    (feature,) = [feature for feature in FEATURES if feature.name == name]
    module = (sharded(feature.module) if inner in SHARDING else feature.module)()
    trainer = fit_group(feature, module, inner, Path(folder), address, [])
    seen = feature.observe(trainer, module, Path(folder)) if leads() else {}
    return end(module, trainer.strategy.model, seen)


def fit_group(feature, module, inner, folder, address, callbacks):
    """The group's fit, on each rank (under spawn: on the host, for all of them)."""
    data = feature.data(0, RANKS * feature.batches)
    if address:
        strategy = DecoupledDiLoCoStrategy(address, learner="0", inner=inner, data="none")
        callbacks = [StartTogether(HostBarrier()), *callbacks]
        callbacks += [RanksAreEqual()] if inner in ("ddp", "ddp_spawn") else []
    else:
        strategy = plain_strategy(inner)
        meeting = HostMeeting(feature.sync_every, feature.fragments)
        callbacks = [PlainDiLoCo(meeting, 0), *callbacks]
    return fit(feature, module, 0, folder, strategy, callbacks, data, devices=RANKS)


class HostBarrier:
    """The host's, for all ranks."""

    def wait(self, timeout_s):
        ask("start")


class HostMeeting:
    """The host's, where rank 0's values are put down for all ranks."""

    def __init__(self, sync_every, fragments):
        self.sync_every, self.fragments = sync_every, fragments

    def sum(self, number):
        total = torch.tensor(number)
        dist.all_reduce(total)
        return int(total)

    def exchange(self, learner, values):
        return ask("exchange", values)

    def ended(self, end):
        ask("ended", end)


class RanksAreEqual(pl.Callback):
    """After every batch, what its step applied included: the same bits on all ranks."""

    def on_train_batch_end(self, trainer, module, *_):
        found = hashlib.sha256()
        for tensor in module.parameters():
            found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
        mine = torch.frombuffer(bytearray(found.digest()), dtype=torch.uint8)
        theirs = [torch.empty_like(mine) for _ in range(RANKS)]
        dist.all_gather(theirs, mine)
        assert all(torch.equal(mine, other) for other in theirs), trainer.global_step


class Seen(pl.Callback):
    """What the feature's user looks at, on rank 0: Lightning's spawn takes little of it back."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder

    def teardown(self, trainer, module, stage):
        from tests.conformance.cells import FEATURES

        (feature,) = [feature for feature in FEATURES if feature.name == self.name]
        for logger in trainer.loggers:
            logger.finalize("success")  # which Lightning does next
        ask("seen", feature.observe(trainer, module, self.folder) if leads() else {})
