"""A pinned source package from PyPI, checked by pip before anything of it is run or read."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PIP_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class SourcePackage:
    """One version of a package, and the hash of its source archive."""

    name: str
    version: str
    sha256: str

    @contextmanager
    def archive(self, setting: str) -> Iterator[Path]:
        """The archive, while the context lasts; it is not installed.

        Args:
            setting: what needs it, for messages.

        Raises:
            ValueError: pip fails, or what came is not the pinned file.
        """
        with tempfile.TemporaryDirectory() as folder:
            wanted = Path(folder) / "wanted.txt"
            wanted.write_text(f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n")
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--no-binary", self.name, "--require-hashes", "-r", str(wanted)]
            try:
                done = subprocess.run(
                    command, cwd=folder, capture_output=True, text=True, timeout=PIP_TIMEOUT_S
                )
            except subprocess.TimeoutExpired:
                raise ValueError(
                    f"{setting}: pip download {self.name} did not end within {PIP_TIMEOUT_S:g} s: "
                    "check the network"
                ) from None
            archives = list(Path(folder).glob("*.tar.gz"))
            if done.returncode or len(archives) != 1:
                last_lines = "\n".join(done.stderr.splitlines()[-5:])
                raise ValueError(
                    f"{setting}: pip download {self.name}=={self.version} failed with exit code "
                    f"{done.returncode}: {last_lines}"
                )
            yield archives[0]
