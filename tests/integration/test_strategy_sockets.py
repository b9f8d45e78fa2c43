"""Over real sockets: Trainers as threads, the syncer with its own Trainer in the main thread."""

import subprocess
import sys
import threading

import pytest
import torch

from dd_lightning import DecoupledDiLoCoStrategy
from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.syncer.checkpoint import newest_checkpoint, read_checkpoint
from tests.diloco_reference import RECURRENCE, MergeAlone, Ramp, reference
from tests.socket_run import run_over_sockets
from tests.trainers import (
    WAIT_S,
    Regression,
    StartTogether,
    assert_equal,
    fit_plain,
    loader,
    values,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]


def config(learners, **algorithm):
    return SyncerConfig.load({"algorithm": {"preset": "diloco", **algorithm}, "learners": learners})


@pytest.fixture
def run(tmp_path):
    """Runs functions of (address) as learners; returns the tape's events when all is over."""

    def execute(config, *learners):
        return run_over_sockets(tmp_path, config, *learners)

    return execute


def learner(module, batches, steps, index=0, callbacks=(), **options):
    def train(address):
        strategy = DecoupledDiLoCoStrategy(address, learner=str(index), **options)
        fit_plain(module, batches, steps, strategy, callbacks)

    return train


def of(tape, kind):
    return [event for event in tape if event["event"] == kind]


def test_one_learner_is_a_plain_run_that_merges_with_itself(run):
    ours, plain = Regression(1), Regression(1)
    alone = config(1, sync_every=4, outer={"lr": 1.0, "momentum": 0.0})
    tape = run(alone, learner(ours, loader(), 22))
    fit_plain(plain, loader(), 22, "auto", [MergeAlone(4)])
    assert_equal(values(ours), values(plain))
    (ledger,) = of(tape, "ledger")
    assert ledger["fragments"] == [{"processed": 88, "merged": 88, "lost": 0, "pending": 0}]


def test_no_round_due_is_plain_lightning(run):
    ours, plain = Regression(1), Regression(1)
    run(config(1, sync_every=1000, wait="never"), learner(ours, loader(), 20))
    fit_plain(plain, loader(), 20, "auto")
    assert_equal(values(ours), values(plain))


@pytest.mark.parametrize(("fragments", "sync_every", "overlap"), [(1, 5, 0), (4, 8, 0), (4, 8, 1)])
def test_equal_learners_are_bitwise_the_reference_loop(
    run, tmp_path, fragments, sync_every, overlap
):
    # over whole rounds, so that Θ at the end is the reference's too
    steps = {1: 30, 4: 32}[fragments] + overlap
    settings = config(2, fragments=fragments, sync_every=sync_every, overlap=overlap,
                      outer={"lr": 0.7, "momentum": 0.9})  # fmt: skip
    barrier, ours = threading.Barrier(2), [Regression(7), Regression(7)]
    tape = run(
        settings,
        *(
            learner(ours[i], loader(i), steps, i, [StartTogether(barrier)], data="none")
            for i in range(2)
        ),
    )
    copies = [Regression(7), Regression(7)]
    theta = reference(copies, [loader(0), loader(1)], steps, sync_every, fragments, overlap)
    for mine, copy in zip(ours, copies, strict=True):
        assert_equal(values(mine), values(copy))
    if fragments == 1:
        assert len(of(tape, "merge")) == steps // sync_every
        stored = read_checkpoint(newest_checkpoint(tmp_path / "syncer", verify=True)).values
        for name, value in theta.items():
            assert torch.equal(stored[name], value), name


def test_streaming_recurrence(run):
    module = Ramp()
    streaming = config(1, fragments=2, sync_every=6, outer={"lr": 2.0, "momentum": 0.0})
    run(streaming, learner(module, loader(), 10))
    assert module.seen == RECURRENCE


def test_import_registers_the_name_without_importing_lightning():
    code = (
        "import sys, dd_lightning, dd_lightning.network;"
        "assert 'lightning' not in sys.modules, 'lightning was imported';"
        "import lightning.pytorch;"
        "from lightning.pytorch.strategies import StrategyRegistry as registry;"
        "assert 'decoupled_diloco' in registry;"
        "import os; os.environ['DD_SYNCER'] = 'tcp://127.0.0.1:29400';"
        "assert isinstance(registry.get('decoupled_diloco'), dd_lightning.DecoupledDiLoCoStrategy)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)
