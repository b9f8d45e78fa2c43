"""Pictures of a few classes that are easy to tell apart, as a user's folder of class folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

NAMES = ("bottom", "left", "right", "top")  # sorted, as ImageFolder numbers them
SIDES = {"bottom": np.s_[6:, :], "left": np.s_[:, :6], "right": np.s_[:, 6:], "top": np.s_[:6, :]}


def write_pictures(folder: Path, each: int = 60, side: int = 12) -> Path:
    """`each` noisy pictures a class, one half of which is bright: PNG or JPEG, RGB or grey."""
    draw = np.random.default_rng(0)
    for name in NAMES:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for index in range(each):
            pixels = draw.integers(0, 120, (side, side, 3), dtype=np.uint8)
            pixels[SIDES[name]] += 120
            image = Image.fromarray(pixels)
            if index % 3 == 0:
                image = image.convert("L")
            image.save(folder / name / f"{index}.{'jpg' if index % 2 else 'png'}")
    return folder
