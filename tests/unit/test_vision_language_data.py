"""From drawings and webdatasets to shards of named pictures."""

import importlib.util

import emoji
import pytest
from PIL import Image, ImageFont

from dd_lightning.tasks.data import read_manifest
from dd_lightning.tasks.vision import openmoji
from dd_lightning.tasks.vision.pictures import picture
from dd_lightning.tasks.vision_language import Tokenizer, VisionLanguageData, sources
from dd_lightning.tasks.vision_language.datamodule import read_named
from dd_lightning.tasks.vision_language.prepare import unique
from tests.named_pictures import NAMES, write_named

pytestmark = pytest.mark.unit

TONES = [chr(c) for c in range(0x1F3FB, 0x1F400)]
RUNNER, HAND = "\U0001f3c3", "\U0001f44b"


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return write_named(tmp_path_factory.mktemp("named"))


def data(cache, urls, **changes) -> VisionLanguageData:
    given = {"source": "webdataset", "path": urls, "size": 8, "num_shards": 8}
    return VisionLanguageData(**{**given, "cache_dir": str(cache), **changes})


def names_of(folder, split):
    manifest = read_manifest(folder, verify=True)
    words = tuple(manifest.info["words"])
    shards = getattr(manifest, split)
    samples = [s for shard in shards for s in read_named(folder / shard.file, words, 40)]
    return [Tokenizer(words).decode(one.ids) for one in samples]


def assert_equal_folders(first, second):
    names = sorted(path.name for path in first.iterdir())
    assert first != second and names == sorted(path.name for path in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_a_webdataset_becomes_shards_of_all_its_pictures(tmp_path, urls):
    folder = data(tmp_path, urls).prepare()
    train, held_out = names_of(folder, "train"), names_of(folder, "validation")
    info = read_manifest(folder).info
    assert info["pictures"] == {"train": len(train), "validation": len(held_out)}
    assert sorted({*train, *held_out}) == sorted(NAMES)
    assert all((train + held_out).count(name) == 20 for name in NAMES)
    assert {" left", " half", "red"} <= {*info["words"]}
    assert len(read_manifest(folder).train) == 8


def test_two_builds_of_a_webdataset_are_byte_identical(tmp_path, urls):
    folders = [data(tmp_path / place, urls).prepare() for place in "ab"]
    assert_equal_folders(*folders)


@pytest.fixture
def drawings(monkeypatch):
    """A few of OpenMoji's names; drawn as letters, for which no font is needed."""
    letters = [chr(c) for c in (*range(ord("A"), ord("Z")), *range(ord("a"), ord("z")))]
    names = {one: f"letter {one}" for one in letters}
    names |= {"ﬀ": "no drawing of it"}
    monkeypatch.setattr(sources, "english_names", lambda: names)
    monkeypatch.setattr(openmoji, "load_font", lambda: ImageFont.load_default(openmoji.POINTS))
    draw = openmoji.draw
    blank = Image.new("RGB", (openmoji.SIDE, openmoji.SIDE), "white")
    monkeypatch.setattr(openmoji, "draw", lambda e, f: blank if e == "ﬀ" else draw(e, f))
    return letters


def test_drawings_become_shards_with_names_and_attribution_twice_the_same(tmp_path, drawings):
    given = {"source": "openmoji", "path": "", "size": 16}
    folders = [data(tmp_path / place, "", **given).prepare() for place in "ab"]
    assert_equal_folders(*folders)
    info = read_manifest(folders[0]).info
    names = names_of(folders[0], "train") + names_of(folders[0], "validation")
    assert sorted(names) == sorted(f"letter {one}" for one in drawings)
    assert "CC BY-SA 4.0" in info["attribution"] and info["versions"]["emoji"]


def test_equal_pictures_count_once_whatever_their_names():
    several = [
        sources.NamedPicture(picture(Image.new("L", (8, 8), grey), 0, 8), name)
        for grey, name in ((9, "a"), (200, "b"), (9, "c"))
    ]
    assert sorted(one.name for one in unique(several)) == ["a", "b"]


def test_english_names_are_those_of_whole_emoji():
    names = sources.english_names()
    assert len(names) > 3900 and len(set(names.values())) == len(names)
    assert names[HAND + TONES[0]] == "waving hand light skin tone"
    assert not any("_" in name or ":" in name for name in names.values())


def test_variants_of_an_emoji_are_on_one_side_of_the_split():
    runners = [one for one in emoji.EMOJI_DATA if one.startswith(RUNNER)]
    assert len(runners) > 50
    assert {sources.base(one) for one in runners} == {RUNNER.encode()}
    assert sources.base("\u27a1\ufe0f") != sources.base("\u2b05\ufe0f")  # the arrows themselves
    waving = {sources.base(HAND + tone) for tone in ("", *TONES)}
    assert waving == {HAND.encode()}


@pytest.mark.parametrize("changed", [{"size": 9}, {"vocabulary": 257}, {"num_shards": 9}])
def test_other_settings_are_another_data_set(tmp_path, urls, changed):
    assert data(tmp_path, urls, **changed).folder() != data(tmp_path, urls).folder()
    assert data(tmp_path, urls, text_length=7).folder() == data(tmp_path, urls).folder()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "cats"}, "task.data.source is 'cats', allowed are"),
        ({"source": "openmoji"}, "a path belongs to source=webdataset"),
        ({"path": ""}, "which need one"),
        ({"vocabulary": 255}, "task.data.vocabulary is 255, allowed are integers >= 256"),
        ({"text_length": 1}, "task.data.text_length is 1"),
        ({"num_shards": 999}, "too few: 15% of them are held out"),
        ({"path": "/no/x.tar"}, "/no/x.tar cannot be opened"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, urls, changes, message):
    with pytest.raises(ValueError, match=message):
        data(tmp_path, urls, **changes).prepare()


def test_a_record_without_a_text_is_refused(tmp_path, urls, monkeypatch):
    monkeypatch.setattr(sources, "TEXT_FIELD", "caption")
    with pytest.raises(ValueError, match=r"record 000000 of .*an image in .* and a text in"):
        data(tmp_path, urls).prepare()


def test_without_the_names_it_says_how_to_get_them(tmp_path, monkeypatch):
    given = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "emoji" else given(name)
    )
    with pytest.raises(ValueError, match=r"emoji, which is missing: pip install .*\[data\]'"):
        data(tmp_path, "", source="openmoji").folder()
