"""The 1797 handwritten digits of 8x8 pixels that lie in scikit-learn's package: no download.

Read as a file: neither scikit-learn nor what it needs is imported.
"""

import gzip
import hashlib
from collections.abc import Iterator

import numpy as np

from dd_lightning.tasks.data import Origin

from .extra import require
from .pictures import Picture, picture

FILE = "datasets/data/digits.csv.gz"
SHA256 = "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"  # of the text in it
CLASSES = tuple("0123456789")
SIDE, INK = 8, 16  # pixels; the darkest value


def digits_origin() -> Origin:
    """Licence and the content's hash, the same in every version of scikit-learn."""
    return Origin(
        source="digits",
        licence="CC-BY-4.0 (data), BSD-3-Clause (scikit-learn)",
        attribution=(
            "Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine "
            "Learning Repository, in the selection that scikit-learn ships."
        ),
        versions={"sha256": SHA256},
    )


def digits_pictures(size: int) -> Iterator[Picture]:
    """All digits, scaled to `size` where that is not 8.

    Raises:
        ValueError: scikit-learn is missing, or ships another file than the known one.
    """
    from PIL import Image

    path = require("sklearn", "task.data.source=digits") / FILE
    text = gzip.decompress(path.read_bytes())
    if (digest := hashlib.sha256(text).hexdigest()) != SHA256:
        raise ValueError(
            f"{path} holds text of sha256 {digest}, expected {SHA256}: reinstall scikit-learn, or "
            "use task.data.source=folder with pictures of your own"
        )
    rows = np.loadtxt(text.decode("ascii").splitlines(), delimiter=",", dtype=np.int64)
    for row in rows:
        grey = np.round(row[:-1] * (255 / INK)).astype(np.uint8).reshape(SIDE, SIDE)
        yield picture(Image.fromarray(grey), int(row[-1]), size)
