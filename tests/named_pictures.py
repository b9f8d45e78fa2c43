"""Pictures of bright halves with their names, as a user's webdataset."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import numpy as np
import webdataset as wds
from PIL import Image

from tests.pictures import SIDES

COLOURS = {"red": 0, "green": 1, "blue": 2}
NAMES = tuple(f"{colour} {side} half" for colour, side in itertools.product(COLOURS, SIDES))


def write_named(folder: Path, each: int = 20, side: int = 12) -> str:
    """`each` noisy pictures of every name, PNG or JPEG, in two tars: their URL pattern."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    with wds.ShardWriter(
        f"{folder}/x-%d.tar", maxcount=each * len(NAMES) // 2, mtime=0, verbose=0
    ) as writer:
        for index in range(each * len(NAMES)):
            name = NAMES[index % len(NAMES)]
            colour, where, _ = name.split()
            pixels = draw.integers(0, 90, (side, side, 3), dtype=np.uint8)
            pixels[SIDES[where] + (COLOURS[colour],)] += 150
            kind = "jpg" if index % 5 == 0 else "png"
            encoded = io.BytesIO()
            Image.fromarray(pixels).save(encoded, format="PNG" if kind == "png" else "JPEG")
            writer.write({"__key__": f"{index:06d}", kind: encoded.getvalue(), "txt": name})
    return f"{folder}/x-{{0..1}}.tar"
