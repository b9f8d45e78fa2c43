"""Random states, torn files and whose folder it is."""

import io
import os
import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from dd_lightning.learner import folders, own_checkpoint
from dd_lightning.learner.rng import restore_rng, rng_states

pytestmark = pytest.mark.unit


def draw():
    np_random = np.random.rand(3).tolist(), np.random.randn()
    return random.random(), random.gauss(0, 1), np_random, torch.rand(3).tolist()


def test_random_states_come_back_through_a_weights_only_file():
    random.gauss(0, 1)  # leaves half of a pair behind, as numpy's does
    np.random.randn()
    file = io.BytesIO()
    torch.save(rng_states(), file)
    expected = draw()
    file.seek(0)
    restore_rng(torch.load(file, weights_only=True))
    assert draw() == expected


def write(path, values, modified):
    torch.save(values, path)
    os.utime(path, (modified, modified))


@pytest.mark.parametrize("harm", ["torn", "flipped", "empty", "text"])
def test_a_torn_file_is_skipped_for_the_one_before(tmp_path, caplog, harm):
    write(tmp_path / "epoch=0-step=3.ckpt", {"a": torch.zeros(1000)}, 100)
    last = tmp_path / "last.ckpt"
    write(last, {"a": torch.ones(1000)}, 200)
    assert own_checkpoint.newest_whole(tmp_path) == last
    data = bytearray(last.read_bytes())
    middle = data.index(np.float32(1).tobytes() * 100)
    data[middle] ^= 1
    harmed = {"torn": data[: len(data) // 2], "flipped": data, "empty": b"", "text": b"no"}[harm]
    last.write_bytes(harmed)
    assert own_checkpoint.newest_whole(tmp_path) == tmp_path / "epoch=0-step=3.ckpt"
    assert "last.ckpt cannot be read" in caplog.text and "one before" in caplog.text
    (tmp_path / "epoch=0-step=3.ckpt").unlink()
    assert own_checkpoint.newest_whole(tmp_path) is None
    assert "starts without one" in caplog.text
    assert own_checkpoint.newest_whole(tmp_path / "none") is None


def test_a_newer_state_is_refused_and_anothers_warned_of():
    with pytest.raises(ValueError, match=r"version 2.*reads up to 1"):
        own_checkpoint.check_state({"version": 2, "learner": "0"}, "0")
    before = torch.get_rng_state()
    foreign = {"version": 1, "learner": "1", "rng": {}}
    with pytest.warns(UserWarning, match="'1' and is loaded by '0'"):
        own_checkpoint.check_state(foreign, "0")
    own_checkpoint.restore_own_rng(foreign, "0")
    assert torch.equal(before, torch.get_rng_state())


def test_two_learners_never_write_into_one_folder(tmp_path):
    def trainer(**options):
        callback = ModelCheckpoint(**options)
        return pl.Trainer(accelerator="cpu", logger=False, callbacks=[callback])

    given = {"dirpath": tmp_path}
    folders.claim(trainer(**given), "0", [])
    folders.claim(trainer(**given), "0", [])
    with pytest.raises(ValueError, match=r"learner '1'.*learner '0'.*default_root_dir"):
        folders.claim(trainer(**given), "1", [])
    default = trainer()
    chosen = folders.without_folder(default)
    assert chosen == default.checkpoint_callbacks and not folders.without_folder(trainer(**given))
    chosen[0].dirpath = str(tmp_path)  # as Lightning resolves it
    with pytest.raises(ValueError, match="delete"):
        folders.claim(default, "1", chosen)
    default.loggers = [CSVLogger(tmp_path)]
    with pytest.warns(UserWarning, match="default_root_dir of its own"):
        folders.claim(default, "1", chosen)
    assert chosen[0].dirpath == str(tmp_path / "learner-1")
