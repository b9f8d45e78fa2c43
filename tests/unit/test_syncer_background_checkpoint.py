"""Checkpoints beside the merges: what they hold, their memory, what a full disk does to them."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from dd_lightning.protocol.actions import Merge, WriteCheckpoint
from dd_lightning.syncer.checkpoint import checkpoints, parameters_sha256, read_checkpoint
from dd_lightning.syncer.checkpoint_io import AtomicCheckpointIO, InBackground
from dd_lightning.syncer.checkpoint_writer import CheckpointWriter, NotSaved, Saved
from dd_lightning.syncer.stream import RoundStream
from dd_lightning.syncer.trainer import make_trainer
from tests.file_limits import limiter
from tests.syncer_jobs import config_of, contribution, job, layout_of, module_of, values_of

pytestmark = pytest.mark.unit
WAIT_S = 60.0
MIB = 1 << 20


def merges(config, *versions: int) -> list[Merge]:
    """One of each of these versions, fragments in turn."""
    jobs = []
    for version in versions:
        names = layout_of(config).fragments[version % 2]
        values = {n: v for n, v in values_of(version).items() if n in names}
        jobs.append(job(version % 2, (1, version), contribution("0", version % 2, values)))
    return jobs


def write(number: int) -> WriteCheckpoint:
    return WriteCheckpoint({"epoch": 1, "merges": number})


def stream_of(*jobs) -> RoundStream:
    stream = RoundStream(len(jobs))
    for one in jobs:
        stream.put(one)
    stream.end()
    return stream


@pytest.fixture
def small_files(request):
    """No file of this process may grow beyond so many bytes, as on a disk with so many left."""
    return limiter(request)


def test_merges_go_on_while_a_slow_disk_takes_theta_as_it_was(tmp_path) -> None:
    module = module_of(config_of(outer={"lr": 0.7, "momentum": 0.9}))
    digests, told = {}, SimpleQueue()
    disk_is_done = threading.Event()

    def merged(one) -> None:
        digests[one.job.version[1]] = parameters_sha256(dict(module.theta.named_parameters()))

    module._deliver = merged
    writer = CheckpointWriter(
        tmp_path, 3, lambda: None, told.put, before_rename=lambda: disk_is_done.wait(WAIT_S)
    )
    jobs = [*merges(module.config, 1, 2), write(2), *merges(module.config, 3, 4)]
    # `fit` returns: it did the merges after the checkpoint although the disk has not
    make_trainer(tmp_path, [writer]).fit(module, stream_of(*jobs))
    assert sorted(digests) == [1, 2, 3, 4] and told.empty() and checkpoints(tmp_path) == []
    disk_is_done.set()
    saved = told.get(timeout=WAIT_S)
    assert saved == Saved(jobs[2], "step-1-2.ckpt")
    found = read_checkpoint(tmp_path / saved.file)
    assert parameters_sha256(found.parameters) == digests[2] != digests[4]
    momentum = torch.load(tmp_path / saved.file, weights_only=True)["optimizer_states"]
    assert momentum[0]["state"]


def test_a_write_in_the_background_takes_one_copy_of_the_tensors(tmp_path) -> None:
    state = {f"w{i}": torch.full((6 * MIB,), float(i)) for i in range(2)}  # 48 MiB
    size = sum(tensor.nbytes for tensor in state.values())
    told: SimpleQueue = SimpleQueue()
    Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts anew
    before = resident()
    AtomicCheckpointIO().save_checkpoint(
        {"state_dict": state},
        tmp_path / "a.ckpt",
        InBackground(lambda: None, lambda *a: told.put(a)),
    )
    assert told.get(timeout=WAIT_S) == (None, size)
    grown = resident("VmHWM") - before
    assert 0.9 * size < grown < 1.3 * size
    assert torch.equal(torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]["w1"],
                       state["w1"])  # fmt: skip


def resident(field: str = "VmRSS") -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def test_a_full_disk_leaves_nothing_behind_and_says_what_is_needed(tmp_path, small_files) -> None:
    module, told = module_of(config_of()), SimpleQueue()
    writer = CheckpointWriter(tmp_path, 3, lambda: None, told.put)
    small_files(4096)
    make_trainer(tmp_path, [writer]).fit(module, stream_of(write(7)))
    refused = told.get(timeout=WAIT_S)
    assert isinstance(refused, NotSaved) and refused.error.errno == errno.EFBIG
    assert list(tmp_path.glob("step-*")) == []
    size = sum(value.nbytes for value in module.state_dict().values())
    assert refused.num_bytes == size
    said = refused.reason(tmp_path)
    assert said.startswith("step-1-7.ckpt was refused by the disk (File too large); it needs 0.0")
    assert str(tmp_path) not in said


def test_what_forbids_the_rename_keeps_the_file_from_coming_to_be(tmp_path) -> None:
    calls, told = [], SimpleQueue()

    def taken_over_meanwhile() -> None:
        calls.append(threading.current_thread().name)
        if len(calls) == 2:
            raise RuntimeError("epoch 2 of this run has started")

    writer = CheckpointWriter(tmp_path, 3, taken_over_meanwhile, told.put)
    make_trainer(tmp_path, [writer]).fit(module_of(config_of()), stream_of(write(3)))
    assert isinstance(told.get(timeout=WAIT_S).error, RuntimeError)
    assert list(tmp_path.glob("step-*")) == [] and calls[1] == "syncer-checkpoint"
