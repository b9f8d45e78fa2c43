"""Syncer checkpoints: resuming is exact, torn files are passed over, the digest is as defined."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule

from dd_lightning.protocol.actions import WriteCheckpoint
from dd_lightning.syncer.checkpoint import (
    checkpoints,
    load_parameters,
    newest_checkpoint,
    parameters_sha256,
    read_checkpoint,
)
from dd_lightning.syncer.checkpoint_writer import CheckpointWriter
from dd_lightning.syncer.lock import RunLock, RunLocked
from dd_lightning.syncer.module import STATE_KEY, SyncerModule
from dd_lightning.syncer.stream import RoundStream
from dd_lightning.syncer.trainer import make_trainer
from tests.syncer_jobs import config_of, contribution, job, layout_of, module_of, values_of

pytestmark = pytest.mark.unit
WAIT_S = 60.0
OUTER = {"lr": 0.7, "momentum": 0.9}


def merge_job(module, version):
    """A merge of every second fragment, whose values do not depend on Θ."""
    fragment = version % 2
    names = layout_of(module.config).fragments[fragment]
    values = {n: v for n, v in values_of(version).items() if n in names}
    held = contribution("0", fragment, values, base=(1, 0))
    return job(fragment, (1, version), held)


def write_job(merges):
    return WriteCheckpoint({"epoch": 1, "merges": merges, "tokens_merged": 10.0 * merges})


def run(folder: Path, module: SyncerModule, jobs, ckpt=None, keep=3, check=lambda: None):
    """Fit on these jobs; returns the trainer and the files that were reported. Like the core, it
    hands out no checkpoint before the one before it is there."""
    told: SimpleQueue = SimpleQueue()
    writer = CheckpointWriter(folder, keep, check, told.put)
    stream, saved = RoundStream(len(jobs)), []

    def feed() -> None:
        for one in jobs:
            stream.put(one)
            if isinstance(one, WriteCheckpoint) and (result := told.get(timeout=WAIT_S)):
                saved.append(result.file)
        stream.end()

    feeder = threading.Thread(target=feed)
    feeder.start()
    trainer = make_trainer(folder, [writer])
    try:
        trainer.fit(module, stream, ckpt_path=ckpt, weights_only=True)
    finally:
        told.put(None)  # for a feeder that waits for what training did not come to
        feeder.join(WAIT_S)
    return trainer, saved


def fresh() -> SyncerModule:
    return module_of(config_of(outer=OUTER))


def test_resumed_equals_uninterrupted_bitwise(tmp_path) -> None:
    whole = fresh()
    run(tmp_path / "a", whole, [merge_job(whole, v) for v in range(1, 9)])
    first = fresh()
    (tmp_path / "b").mkdir()
    jobs = [merge_job(first, v) for v in range(1, 5)]
    _, saved = run(tmp_path / "b", first, [*jobs, write_job(4), merge_job(first, 5)])
    assert saved == ["step-1-4.ckpt"]
    path = newest_checkpoint(tmp_path / "b", verify=True)
    found = read_checkpoint(path)
    versions = [tuple(version) for version in found.state["versions"]]
    second = SyncerModule(found.layout, found.values, fresh().config, versions)
    jobs = [merge_job(second, v) for v in range(5, 9)]
    trainer, _ = run(tmp_path / "b", second, jobs, ckpt=path)
    assert trainer.global_step == 8
    for name, value in whole.state_dict().items():
        assert torch.equal(second.state_dict()[name], value)


def test_a_checkpoint_holds_plain_values_and_the_learners_names(tmp_path) -> None:
    module = fresh()
    run(tmp_path, module, [write_job(0)])
    loaded = torch.load(tmp_path / "step-1-0.ckpt", weights_only=True)
    assert set(loaded["state_dict"]) == set(values_of(0))
    assert loaded[STATE_KEY]["core"]["merges"] == 0
    found = read_checkpoint(tmp_path / "step-1-0.ckpt")
    assert found.layout == layout_of(module.config)
    assert sorted(found.buffers) == ["norm.running_mean", "norm.running_var"]
    for name, value in load_parameters(tmp_path / "step-1-0.ckpt").items():
        assert torch.equal(value, values_of(0)[name])


def test_a_learners_module_loads_a_checkpoint(tmp_path) -> None:
    class Task(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.ModuleList([torch.nn.Linear(6, 8)])
            self.net.embed = torch.nn.Embedding(7, 3)
            self.half = torch.nn.Linear(4, 5, bias=False)
            self.norm = torch.nn.Module()
            self.norm.register_buffer("running_mean", torch.zeros(3))
            self.norm.register_buffer("running_var", torch.ones(3))

    run(tmp_path, fresh(), [write_job(0)])
    task = Task.load_from_checkpoint(tmp_path / "step-1-0.ckpt")
    assert torch.equal(task.net[0].weight, values_of(0)["net.0.weight"])


def test_the_newest_few_and_version_0_are_kept(tmp_path) -> None:
    module = fresh()
    jobs = [write_job(0)]
    for version in range(1, 6):
        jobs += [merge_job(module, version), write_job(version)]
    run(tmp_path, module, jobs, keep=2)
    names = [path.name for path in checkpoints(tmp_path)]
    assert names == ["step-1-5.ckpt", "step-1-4.ckpt", "step-1-0.ckpt"]


def test_a_torn_checkpoint_is_passed_over(tmp_path) -> None:
    module = fresh()
    run(tmp_path, module, [write_job(0), merge_job(module, 1), write_job(1)])
    newest = tmp_path / "step-1-1.ckpt"
    whole = newest.read_bytes()
    newest.write_bytes(whole[: len(whole) // 2])
    assert newest_checkpoint(tmp_path).name == "step-1-0.ckpt"
    place = whole.index(module.state_dict()["net.0.weight"].numpy().tobytes())
    newest.write_bytes(whole[:place] + bytes(8) + whole[place + 8 :])
    assert newest_checkpoint(tmp_path, verify=True).name == "step-1-0.ckpt"
    with pytest.raises(ValueError, match="a file that a syncer wrote"):
        read_checkpoint(tmp_path / "step-1-7.ckpt")


def test_a_user_callbacks_checkpoint_is_nothing_to_resume_from(tmp_path) -> None:
    module = fresh()
    trainer, _ = run(tmp_path, module, [merge_job(module, 1)])
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    with pytest.raises(ValueError, match="a file that a syncer wrote"):
        read_checkpoint(tmp_path / "own.ckpt")


def test_epochs_sort_before_merges(tmp_path) -> None:
    for name in ("step-2-3.ckpt", "step-1-40.ckpt", "step-2-10.ckpt", "other.ckpt"):
        (tmp_path / name).touch()
    names = [path.name for path in checkpoints(tmp_path)]
    assert names == ["step-2-10.ckpt", "step-2-3.ckpt", "step-1-40.ckpt"]


def test_sha256_is_over_the_raw_float32_in_name_order() -> None:
    tensors = {"b.w": torch.arange(6.0).view(2, 3).t(), "a": torch.tensor(1.5), "c": torch.empty(0)}
    raw = np.float32(1.5).tobytes() + np.arange(6, dtype="<f4").reshape(2, 3).T.tobytes(order="C")
    assert parameters_sha256(tensors) == hashlib.sha256(raw).hexdigest()


def test_the_lock_refuses_a_second_syncer_and_epochs_grow(tmp_path) -> None:
    first = RunLock(tmp_path / "syncer")
    assert first.epoch == 1
    with pytest.raises(RunLocked, match="whose syncer is running"):
        RunLock(tmp_path / "syncer")
    first.check()
    first.release()
    second = RunLock(tmp_path / "syncer")
    assert second.epoch == 2
    with pytest.raises(RuntimeError, match="epoch 2 of this run has started"):
        first.check()
    second.release()


def test_no_checkpoint_is_written_after_a_takeover(tmp_path) -> None:
    def taken_over() -> None:
        raise RuntimeError("epoch 2 of this run has started")

    with pytest.raises(RuntimeError, match="epoch 2"):
        run(tmp_path, fresh(), [write_job(0)], check=taken_over)
    assert checkpoints(tmp_path) == []


def test_what_a_killed_syncer_left_half_written_is_removed(tmp_path) -> None:
    (tmp_path / "step-1-7.ckpt.partial").write_bytes(b"half")
    run(tmp_path, fresh(), [write_job(8)])
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-1-8.ckpt"]
