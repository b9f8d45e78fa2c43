"""The strategy against plain Lightning, a reference DiLoCo loop, and the known recurrence."""

import threading

import lightning.pytorch as pl
import pytest
import torch

from dd_lightning import DecoupledDiLoCoStrategy
from dd_lightning.protocol.config import SyncerConfig
from tests.diloco_reference import RECURRENCE, MergeAlone, Ramp, reference
from tests.trainers import (
    QUIET,
    Regression,
    StartTogether,
    assert_equal,
    loader,
    run_threads,
    values,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.virtual,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]
ADDRESS = "tcp://127.0.0.1:1"


def config(learners, **algorithm):
    algorithm = {"preset": "diloco", **algorithm}
    return SyncerConfig.load({"algorithm": algorithm, "learners": learners})


def fit(module, data, steps, learner="0", callbacks=(), strategy=None, **options):
    strategy = strategy or DecoupledDiLoCoStrategy(ADDRESS, learner=learner)
    trainer = pl.Trainer(
        **QUIET, strategy=strategy, max_steps=steps, callbacks=list(callbacks), **options
    )
    trainer.fit(module, data)
    return trainer


@pytest.mark.parametrize("inner", ["auto", "single_device"])
def test_one_learner_is_a_plain_run_that_merges_with_itself(syncer, inner):
    syncer(config(1, sync_every=4, outer={"lr": 1.0, "momentum": 0.0}))
    ours, plain = Regression(1), Regression(1)
    torch.manual_seed(5)
    strategy = DecoupledDiLoCoStrategy(ADDRESS, learner="0", inner=inner)
    fit(ours, loader(shuffle=True), 22, strategy=strategy)
    random_after = torch.get_rng_state()
    torch.manual_seed(5)
    fit(plain, loader(shuffle=True), 22, strategy="auto", callbacks=[MergeAlone(4)])
    assert torch.equal(random_after, torch.get_rng_state())
    assert_equal(values(ours), values(plain))


@pytest.mark.parametrize("wait", ["never", "overlap"])
def test_no_round_due_is_plain_lightning(syncer, wait):
    running = syncer(config(1, sync_every=1000, wait=wait, merge="rda"))
    ours, plain = Regression(1), Regression(1)
    torch.manual_seed(5)
    fit(ours, loader(shuffle=True), 20)
    random_after = torch.get_rng_state()
    torch.manual_seed(5)
    fit(plain, loader(shuffle=True), 20, strategy="auto")
    assert torch.equal(random_after, torch.get_rng_state())
    assert_equal(values(ours), values(plain))
    (ledger,) = running.events("ledger")
    assert ledger["fragments"] == [{"processed": 80, "merged": 80, "lost": 0, "pending": 0}]


@pytest.mark.parametrize(
    ("fragments", "sync_every", "overlap"), [(1, 5, 0), (4, 8, 0), (4, 8, 1), (4, 2, 0)]
)
def test_equal_learners_are_bitwise_the_reference_loop(syncer, fragments, sync_every, overlap):
    learners, steps = 2, 32 + overlap
    running = syncer(
        config(
            learners, fragments=fragments, sync_every=sync_every, overlap=overlap,
            outer={"lr": 0.7, "momentum": 0.9},
        )
    )  # fmt: skip
    barrier = threading.Barrier(learners)
    ours = [Regression(7) for _ in range(learners)]

    def learner(index):
        def run():
            strategy = DecoupledDiLoCoStrategy(ADDRESS, learner=str(index), data="none")
            fit(ours[index], loader(index), steps, str(index), [StartTogether(barrier)], strategy)

        return run

    run_threads(*(learner(index) for index in range(learners)))
    copies = [Regression(7) for _ in range(learners)]
    theta = reference(
        copies, [loader(i) for i in range(learners)], steps, sync_every, fragments, overlap
    )
    for mine, copy in zip(ours, copies, strict=True):
        assert_equal(values(mine), values(copy))
    count = 32 * fragments // sync_every
    merges = running.events("merge")[:count]
    assert [merge["round"] for merge in merges] == list(range(1, count + 1))
    assert all(len(merge["contributors"]) == learners for merge in merges)
    if overlap == 0 and fragments == 1 and len(running.events("merge")) == count:
        assert_equal(running.parameters(), theta)


def test_streaming_recurrence(syncer):
    syncer(config(1, fragments=2, sync_every=6, outer={"lr": 2.0, "momentum": 0.0}))
    module = Ramp()
    fit(module, loader(), 10)
    assert module.seen == RECURRENCE
