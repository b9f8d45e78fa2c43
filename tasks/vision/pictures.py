"""Labelled pictures: squared, encoded once, told apart by their pixels."""

import hashlib
import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG and its class.

    Args:
        digest: hash of size, mode and pixels; sorts, deduplicates and splits pictures. Not of the
            PNG: another zlib may write other bytes.
        kin: the same for pictures that belong on one side of the split.
    """

    png: bytes
    label: int
    digest: bytes
    kin: bytes


def picture(image: "Image", label: int, size: int, kin: bytes = b"") -> Picture:
    """The middle square of `image`, scaled to `size` x `size` pixels, grey or RGB; without `kin`
    it is its own."""
    from PIL import Image, ImageOps

    image = image.convert("L" if image.mode == "L" else "RGB")
    if image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    digest = hashlib.sha256(f"{image.mode} {size}".encode() + image.tobytes()).digest()
    encoded = io.BytesIO()
    image.save(encoded, format="PNG")
    return Picture(encoded.getvalue(), label, digest, kin or digest)


def decode(png: bytes) -> "Image":
    """An RGB image from the bytes of any format that Pillow reads."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        return image.convert("RGB")


def unique(pictures: Iterable[Picture]) -> list[Picture]:
    """Each picture once (of equal ones the first), in an order fixed by the pixels alone."""
    first: dict[bytes, Picture] = {}
    for one in pictures:
        first.setdefault(one.digest, one)
    return [first[digest] for digest in sorted(first)]


def is_validation(one: Picture, percent: int) -> bool:
    """Whether a picture is held out: decided by its kin, whatever else is in the data set."""
    return int.from_bytes(hashlib.sha256(one.kin).digest()[:8], "big") % 100 < percent
