"""Random states, torn files and whose folder it is."""

import io
import os
import random
import shutil

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.distributed.checkpoint import FileSystemWriter

from dd_lightning.learner import distributed_files, folders, own_checkpoint
from dd_lightning.learner.own_checkpoint import RNG_OF_RANKS
from dd_lightning.learner.rng import packed, restore_rng, rng_states, unpacked

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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_directory_is_whole_or_passed_over(tmp_path):
    def written(name):
        state = {"state_dict": {"a": torch.ones(1000)}}
        dcp.save(state, storage_writer=FileSystemWriter(tmp_path / name), no_dist=True)
        torch.save({"epoch": 3}, tmp_path / name / "meta.pt")
        return tmp_path / name

    before, last = written("step=3.ckpt"), written("last.ckpt")
    os.utime(before, (100, 100))
    assert own_checkpoint.newest_whole(tmp_path) == last
    assert distributed_files.load_in_one(last, None)["state_dict"]["a"].sum() == 1000
    (data,) = last.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-1])
    assert own_checkpoint.newest_whole(tmp_path) == before
    for part in ("meta.pt", ".metadata"):
        (before / part).write_bytes((before / part).read_bytes()[:-1])
        assert own_checkpoint.newest_whole(tmp_path) is None
        shutil.rmtree(before)
        before = written("step=3.ckpt")


def test_a_directory_takes_the_place_of_another_when_it_is_whole(tmp_path):
    path, met = tmp_path / "last.ckpt", []

    def write(text, fails=False):
        with distributed_files.replaced(path, leads=True, barrier=met.append) as partial:
            partial.mkdir()
            (partial / "part").write_text(text)
            assert not fails

    write("1")
    write("2")
    with pytest.raises(AssertionError):
        write("3", fails=True)
    assert (path / "part").read_text() == "2"
    write("4")
    assert (path / "part").read_text() == "4"
    assert [found.name for found in tmp_path.iterdir()] == ["last.ckpt"] and len(met) == 10


def test_ranks_go_on_with_their_own_random_states():
    def state():
        return {"learner": "0", "rng": rng_states(), RNG_OF_RANKS: [other]}

    torch.manual_seed(1)
    other = unpacked(packed(rng_states()))
    expected = draw()
    torch.manual_seed(2)
    own_checkpoint.begin_rng(state(), "0", 1, 2)
    assert draw() == expected
    mine = state()
    expected = draw()
    with pytest.warns(UserWarning, match="of 2 ranks, this learner has 1"):
        own_checkpoint.begin_rng(mine, "0", 0, 1)
    assert draw() == expected and RNG_OF_RANKS not in mine
    for rank in (1, 2):  # of three: begins anew
        before, mine = torch.get_rng_state(), state()
        own_checkpoint.begin_rng(mine, "0", rank, 3)
        assert torch.equal(before, torch.get_rng_state()) and "rng" not in mine


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
