"""`source=shards`: prepared shards elsewhere give the same batches, are fetched when they are
reached, and are refused where they are not what was prepared."""

import json
import threading

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from dd_lightning.tasks.data import fetch, read_manifest
from dd_lightning.tasks.text import TextDataModule
from dd_lightning.tasks.vision import VisionDataModule
from dd_lightning.tasks.vision_language import VisionLanguageDataModule
from tests.named_pictures import write_named
from tests.pictures import write_pictures
from tests.shard_stores import LIKE, prepared_text, take, text_at, upload

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return prepared_text(tmp_path_factory.mktemp("source"))


@pytest.fixture
def store(made, request, monkeypatch):
    """The prepared text in a store of this test's own: its URL."""
    monkeypatch.setattr(fetch, "RETRY_AFTER_S", 0.0)
    name = request.node.originalname
    url = upload(made.folder, f"memory://{name}")
    yield url
    system, path = fsspec.core.url_to_fs(url)
    system.rm(path, recursive=True)


def shards_in(folder):
    return sorted(path.name for path in folder.glob("train-*.tar"))


def test_shards_in_a_store_give_the_batches_of_the_prepared_folder(made, store, tmp_path):
    datamodule = text_at(store, tmp_path)
    datamodule.prepare_data()
    assert datamodule.folder.parent == tmp_path and datamodule.folder.name != made.folder.name
    assert datamodule.manifest() == made.manifest()
    assert shards_in(datamodule.folder) == []  # only reached shards are fetched
    assert torch.equal(take(datamodule, 300), take(made, 300))
    assert shards_in(datamodule.folder) == shards_in(made.folder)
    for ours, theirs in zip(datamodule.val_dataloader(), made.val_dataloader(), strict=True):
        assert torch.equal(ours["input_ids"], theirs["input_ids"])
    read_manifest(datamodule.folder, verify=True)


def test_a_learner_fetches_its_own_share_only(made, store, tmp_path):
    datamodule = text_at(store, tmp_path, data_slot=1, num_data_slots=4)
    datamodule.prepare_data()
    take(datamodule, 150)
    assert shards_in(datamodule.folder) == ["train-00001.tar", "train-00005.tar"]


@pytest.mark.parametrize("batches", [1, 7, 30, 290])
def test_resuming_in_the_midst_of_a_remote_shard_is_exact(made, store, tmp_path, batches):
    whole = take(made, 300)
    state = {**made.state_dict(), "samples": 4 * batches, "batches": batches}
    datamodule = text_at(store, tmp_path)
    datamodule.prepare_data()
    state["stream"]["data"] = datamodule.folder.name
    datamodule.load_state_dict(state)
    assert torch.equal(take(datamodule, 5), whole[batches : batches + 5])
    assert len(shards_in(datamodule.folder)) <= 2  # the one it was in, and where that ends the next


def test_every_copy_of_the_same_shards_is_the_same_stream(made, store, tmp_path):
    other = upload(made.folder, store + "-again")
    folders = [text_at(url, tmp_path).folder for url in (store, other, f"file://{made.folder}")]
    assert len(set(folders)) == 1


def test_splits_and_losses_by_group_work_from_a_store(made, store, tmp_path):
    given = {"split": "group", "data_slot": 1, "num_data_slots": 2, "group_losses": True}
    datamodule = text_at(store, tmp_path, **given)
    datamodule.prepare_data()
    groups = datamodule.groups()
    assert groups.names == ("a", "b")
    assert take(datamodule, 3).shape == (3, 4, 8)
    assert datamodule._stream.samples_per_epoch == (groups.train == 1).sum()
    batch = next(iter(datamodule.val_dataloader()))
    assert set(batch["group_names"]) == {"group_a", "group_b"}


def test_a_folder_on_this_machine_is_read_in_place(made, tmp_path):
    datamodule = text_at(str(made.folder), tmp_path)
    datamodule.prepare_data()
    assert datamodule.folder == made.folder and not list(tmp_path.iterdir())
    assert torch.equal(take(datamodule, 20), take(made, 20))


def test_a_file_url_is_copied_and_all_of_it_may_be_fetched_at_once(made, tmp_path):
    datamodule = text_at(f"file://{made.folder}", tmp_path)
    datamodule.prepare_data()
    datamodule.fetch_shards()
    names = sorted(path.name for path in datamodule.folder.iterdir() if path.suffix != ".lock")
    assert names == sorted(path.name for path in made.folder.iterdir())
    read_manifest(datamodule.folder, verify=True)


def written(system, path, change):
    content = bytearray(system.cat_file(path))
    change(content)
    system.pipe_file(path, bytes(content))


def test_a_shard_that_changed_in_the_store_is_refused_and_not_kept(made, store, tmp_path):
    system, path = fsspec.core.url_to_fs(store)
    for name in shards_in(made.folder):
        written(system, f"{path}/{name}", lambda content: content.__setitem__(600, 0))
    datamodule = text_at(store, tmp_path)
    datamodule.prepare_data()
    with pytest.raises(ValueError, match=r"train-\d+.tar could not be fetched in 4 .*manifest has"):
        take(datamodule, 1)
    assert shards_in(datamodule.folder) == []
    assert not [path for path in datamodule.folder.iterdir() if path.name.startswith(".train")
                and path.suffix != ".lock"]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not json", "is none of ours"),
        (b"[]", "is none of ours"),
        (b'{"schema": 99}', "of schema 99"),
        (b'{"schema": 1}', "is none of ours"),
        (
            json.dumps(
                {"schema": 1, "train": [], "validation": [], "files": {"../x": ""}}
            ).encode(),
            r"names a file outside of it: '\.\./x'",
        ),
    ],
)
def test_a_manifest_that_is_none_is_refused(store, tmp_path, content, message):
    system, path = fsspec.core.url_to_fs(store)
    system.pipe_file(f"{path}/manifest.json", content)
    with pytest.raises(ValueError, match=message):
        text_at(store, tmp_path).prepare_data()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("memory://nothing", r"nothing/manifest.json cannot be opened \(FileNotFoundError\)"),
        ("nothing", "no prepared data in .*nothing"),
        ("strange://x", "strange.*allowed are the protocols of fsspec: .*s3"),
        ("absent://x", r"needs a package that is missing \(pip install absent-fs"),
    ],
)
def test_what_cannot_be_had_is_named(tmp_path, monkeypatch, path, message):
    monkeypatch.setitem(
        known_implementations,
        "absent",
        {"class": "absent_fs.FileSystem", "err": "pip install absent-fs to access it"},
    )
    with pytest.raises(ValueError, match=message):
        text_at(path, tmp_path).prepare_data()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 9}, r"sequence_length is 9, but .* with 8: set .*sequence_length=8"),
        ({"vocabulary": 300}, r"vocabulary is 300, but .*: set task.data.vocabulary=270"),
        ({"tokenizer": "bytes", "vocabulary": 256}, r"set task.data.tokenizer=bpe"),
        ({"path": ""}, "a path belongs to source=folder and source=shards, which need one"),
        ({"split": "era"}, "task.data.split is 'era', allowed with task.data.source=shards are"),
    ],
)
def test_other_settings_than_those_of_the_shards_are_refused(store, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        text_at(changes.pop("path", store), tmp_path, **changes).prepare_data()


def test_settings_without_effect_are_told(store, tmp_path):
    with pytest.warns(UserWarning, match="num_shards=9 has no effect with source=shards"):
        text_at(store, tmp_path, num_shards=9)


class Unwilling(MemoryFileSystem):
    """Breaks off some copies; is silent for ever once it was told so."""

    protocol = "unwilling"
    breaks, silent = 0, False
    over = threading.Event()

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("unwilling://", "memory://"))

    def get_file(self, *args, **options):
        if type(self).silent:
            self.over.wait(30)
        if type(self).breaks:
            type(self).breaks -= 1
            raise ConnectionResetError("broken off")
        return super().get_file(*args, **options)


@pytest.fixture
def unwilling(store):
    fsspec.register_implementation("unwilling", Unwilling, clobber=True)
    Unwilling.breaks, Unwilling.silent = 0, False
    Unwilling.over.clear()
    yield store.replace("memory", "unwilling")
    Unwilling.over.set()


def test_a_copy_that_breaks_off_is_tried_again(made, unwilling, tmp_path):
    datamodule = text_at(unwilling, tmp_path)
    datamodule.prepare_data()
    Unwilling.breaks = 3
    assert torch.equal(take(datamodule, 5), take(made, 5))
    Unwilling.breaks = 4
    with pytest.raises(ValueError, match=r"in 4 tries, .*ConnectionResetError: broken off"):
        datamodule.fetch_shards()


def test_a_store_that_is_silent_is_not_waited_for_without_end(unwilling, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "STALL_TIMEOUT_S", 0.05)
    Unwilling.silent = True
    with pytest.raises(ValueError, match=r"in 4 tries, .*nothing came for 0.05 s"):
        text_at(unwilling, tmp_path).prepare_data()
    assert not list(tmp_path.iterdir())


def pictures(folder):
    given = {"source": "folder", "path": str(write_pictures(folder)), "classes": 4}
    return VisionDataModule, {**given, "size": 8, "num_shards": 8}


def named_pictures(folder):
    given = {"source": "webdataset", "path": write_named(folder), "vocabulary": 270}
    return VisionLanguageDataModule, {**given, "size": 8, "num_shards": 8}


@pytest.mark.parametrize(
    ("source", "wrong", "message"),
    [
        (pictures, {"classes": 5}, "source shards has 4 .*: set task.data.classes=4"),
        (pictures, {"size": 9}, "size is 9, but .*: set task.data.size=8"),
        (named_pictures, {"vocabulary": 257}, r"set task.data.vocabulary=26\d"),
    ],
)
def test_pictures_come_from_a_store_too(tmp_path, source, wrong, message):
    kind, given = source(tmp_path / "source")
    made = kind(**given, cache_dir=str(tmp_path / "made"))
    made.prepare_data()
    url = upload(made.folder, f"memory://{tmp_path.name}")
    there = {k: v for k, v in given.items() if k != "num_shards"}
    there |= {"source": "shards", "path": url, "cache_dir": str(tmp_path / "cache")}
    datamodule = kind(**there)
    datamodule.prepare_data()
    for loader in ("train_dataloader", "val_dataloader"):
        ours, theirs = (next(iter(getattr(one, loader)())) for one in (datamodule, made))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(ValueError, match=message):
        kind(**{**there, **wrong}).prepare_data()


def test_shards_of_another_task_are_refused(tmp_path):
    kind, given = pictures(tmp_path / "source")
    made = kind(**given, cache_dir=str(tmp_path / "made"))
    made.prepare_data()
    with pytest.raises(ValueError, match=r"of task 'vision'; allowed are those of 'text'"):
        TextDataModule(source="shards", path=str(made.folder), **LIKE).prepare_data()
