"""Pictures with a name each: OpenMoji's drawings, or the user's webdataset."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from dd_lightning.tasks.data import Origin
from dd_lightning.tasks.vision import openmoji
from dd_lightning.tasks.vision.extra import require
from dd_lightning.tasks.vision.own import IMAGE_FIELDS, webdataset_records
from dd_lightning.tasks.vision.pictures import Picture, decode, picture

TEXT_FIELD = "txt"
FACING_RIGHT = "\u27a1"  # after a joiner: the same drawing, mirrored


@dataclass(frozen=True, slots=True)
class NamedPicture:
    """A picture and what it shows."""

    picture: Picture
    name: str


def openmoji_origin() -> Origin:
    """Licence of the drawings, which a copy of the shards must keep and name."""
    require("emoji", openmoji.SETTING, "data")
    return Origin(
        source="openmoji",
        licence="CC-BY-SA-4.0 (drawings), BSD-3-Clause (names: the package emoji, from CLDR)",
        attribution=openmoji.openmoji_origin().attribution,
        versions={"font sha256": openmoji.FONT_SHA256, "emoji": version("emoji")},
    )


def openmoji_named(size: int) -> Iterator[NamedPicture]:
    """Every emoji that the font draws, in the order of its characters.

    Raises:
        ValueError: a package is missing, or the font is another one.
    """
    font = openmoji.load_font()
    for emoji, name in sorted(english_names().items()):
        image = openmoji.draw(emoji, font)
        if image.convert("L").getextrema() == (255, 255):
            continue  # the font has no drawing of it
        yield NamedPicture(picture(image, 0, size, base(emoji)), name)


def english_names() -> dict[str, str]:
    """Emoji to the English name of the Unicode CLDR, as "waving hand light skin tone"."""
    require("emoji", openmoji.SETTING, "data")
    import emoji

    whole = emoji.STATUS["fully_qualified"]
    return {
        one: entry["en"].strip(":").replace("_", " ")
        for one, entry in emoji.EMOJI_DATA.items()
        if entry["status"] == whole
    }


def base(emoji: str) -> bytes:
    """The same for all skin tones, genders and directions of one thing."""
    return openmoji.kin(emoji.replace("\u200d" + FACING_RIGHT, ""))


def webdataset_named(path: str, size: int) -> Iterator[NamedPicture]:
    """Every record of the tars: an image field, and its text in `txt`.

    Raises:
        ValueError: a tar cannot be opened, or a record lacks a field.
    """
    for record, url in webdataset_records(path):
        fields = [name for name in IMAGE_FIELDS if name in record]
        name = _text_of(record)
        if not fields or not name:
            held = sorted(key for key in record if not key.startswith("__"))
            raise ValueError(
                f"record {record['__key__']} of {url} holds {held}; allowed with "
                f"source=webdataset: an image in one of {IMAGE_FIELDS} and a text in {TEXT_FIELD}"
            )
        yield NamedPicture(picture(decode(record[fields[0]]), 0, size), name)


def _text_of(record: dict[str, Any]) -> str:
    return " ".join(bytes(record.get(TEXT_FIELD, b"")).decode(errors="replace").split())
