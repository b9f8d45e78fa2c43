"""Where the text comes from: documents of a source, with its licence and versions.

Sources: `docs`, the docstrings of installed packages (nothing is imported or downloaded); `sotu`,
State of the Union addresses from npm; `folder`, the user's own text files.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dd_lightning.tasks.data import Origin

SOURCES = ("docs", "sotu", "folder", "shards")
SEPARATOR = b"\0"  # between documents; removed from their text
TOP = "top"  # group of a folder's files that lie in none of its folders
SUFFIXES = (".txt", ".md")


@dataclass(frozen=True, slots=True)
class Document:
    """One text; `name` says where it is from, `group` (era, library, folder) what it belongs to."""

    name: str
    text: bytes
    group: str = ""

    @property
    def digest(self) -> bytes:
        """Hash of the text alone: sorts, deduplicates and splits documents."""
        return hashlib.sha256(self.text).digest()


def unique(documents: Iterable[Document], max_bytes: int) -> Iterator[Document]:
    """Documents without repeated or empty texts, until `max_bytes` of text are reached."""
    seen: set[bytes] = set()
    total = 0
    for document in documents:
        text = document.text.replace(SEPARATOR, b"").strip()
        document = replace(document, text=text)
        if not text or document.digest in seen:
            continue
        if total + len(text) > max_bytes:
            return
        seen.add(document.digest)
        total += len(text)
        yield document


def is_validation(document: Document, percent: int) -> bool:
    """Whether a document is held out: decided by its text, whatever else is in the corpus."""
    return int.from_bytes(document.digest[:8], "big") % 100 < percent


def folder_files(folder: Path) -> list[Path]:
    """The text files below `folder`, sorted.

    Raises:
        ValueError: no such folder, or no text file in it.
    """
    if not folder.is_dir():
        raise ValueError(
            f"task.data.path is {str(folder)!r}, which is not a folder; source=folder reads the "
            f"{' and '.join(SUFFIXES)} files below it"
        )
    files = sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    if not files:
        raise ValueError(f"no {' or '.join(SUFFIXES)} file below task.data.path {str(folder)!r}")
    return files


def folder_origin(folder: Path) -> Origin:
    """Content hash of a folder's text files, so a changed file means another data set."""
    digest = hashlib.sha256()
    for file in folder_files(folder):
        digest.update(file.relative_to(folder).as_posix().encode() + SEPARATOR)
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return Origin("folder", "the user's own", "", {"sha256": digest.hexdigest()})


def folder_documents(folder: Path) -> Iterator[Document]:
    """Each file's bytes, in the order of their hashes: a byte limit cuts no part of the tree. A
    file's group is the folder directly below `folder` that it lies in."""
    paths = ((file.relative_to(folder), file) for file in folder_files(folder))
    yield from by_digest(
        Document(path.as_posix(), file.read_bytes(), path.parts[0] if path.parts[1:] else TOP)
        for path, file in paths
    )


def by_digest(documents: Iterable[Document]) -> list[Document]:
    """A fixed shuffle that depends on the texts only."""
    return sorted(documents, key=lambda document: document.digest)
