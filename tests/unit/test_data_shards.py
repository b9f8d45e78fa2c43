"""Shards and manifest: same bytes each time, complete, refused when changed; built once."""

import fcntl
import json
import os
import threading

import pytest

from dd_lightning.tasks.data import (
    Manifest,
    build_once,
    read_manifest,
    read_shard,
    write_manifest,
    write_shards,
)

pytestmark = pytest.mark.unit


def records(count: int) -> list[dict[str, bytes]]:
    return [{"bin": f"record {i}".encode(), "txt": b"x"} for i in range(count)]


def build(folder, count: int = 10, shards: int = 3) -> Manifest:
    written = write_shards(folder, "train", records(count), shards)
    manifest = Manifest(written, (), {"source": "test"})
    write_manifest(folder, manifest)
    return manifest


def test_every_record_is_in_one_shard(tmp_path):
    manifest = build(tmp_path)
    found = [record for shard in manifest.train for record in read_shard(tmp_path / shard.file)]
    assert sorted(r["bin"] for r in found) == sorted(r["bin"] for r in records(10))
    assert [shard.records for shard in manifest.train] == [4, 3, 3]
    assert [shard.bytes for shard in manifest.train] == [
        (tmp_path / shard.file).stat().st_size for shard in manifest.train
    ]


def test_a_second_build_has_the_same_checksums(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    assert build(folders[0]) == build(folders[1])


def test_samples_of_a_record_are_counted_by_the_task(tmp_path):
    (shard,) = write_shards(tmp_path, "train", records(5), 1, lambda record: len(record["bin"]))
    assert (shard.records, shard.samples) == (5, 5 * len("record 0"))


def test_large_shards_are_split_evenly(tmp_path):
    shards = write_shards(tmp_path, "train", records(2500), 2)
    assert [shard.records for shard in shards] == [625] * 4


def test_too_few_records_are_refused(tmp_path):
    with pytest.raises(ValueError, match="train: 2 records do not fill 3 shards"):
        write_shards(tmp_path, "train", records(2), 3)


def test_the_manifest_reads_back_and_verifies(tmp_path):
    manifest = build(tmp_path)
    assert read_manifest(tmp_path, verify=True) == manifest


def test_a_changed_shard_is_named(tmp_path):
    manifest = build(tmp_path)
    path = tmp_path / manifest.train[1].file
    content = bytearray(path.read_bytes())
    content[600] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"train-00001\.tar is not what the manifest recorded"):
        read_manifest(tmp_path, verify=True)


def test_an_unprepared_folder_and_a_strange_schema_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no prepared data.*prepare_data"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"schema": 99}))
    with pytest.raises(ValueError, match="not of schema 1"):
        read_manifest(tmp_path)


def test_threads_that_ask_together_build_once(tmp_path):
    calls, folders = [], []

    def count(folder):
        calls.append(folder)
        build(folder)

    threads = [
        threading.Thread(target=lambda: folders.append(build_once(tmp_path / "set", count)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert folders == [tmp_path / "set"] * 4
    assert len(calls) == 1
    read_manifest(tmp_path / "set", verify=True)


def test_a_build_that_fails_leaves_nothing_and_can_be_repeated(tmp_path):
    def fail(folder):
        (folder / "half.tar").write_bytes(b"half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        build_once(tmp_path / "set", fail)
    assert [p.name for p in tmp_path.iterdir()] == [".set.lock"]
    build_once(tmp_path / "set", build)
    assert (tmp_path / "set" / "manifest.json").is_file()


def test_waiting_for_another_build_is_bounded(tmp_path):
    descriptor = os.open(tmp_path / ".set.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=r"preparing data for 0.2 s.*cache_dir"):
            build_once(tmp_path / "set", build, timeout_s=0.2)
    finally:
        os.close(descriptor)
