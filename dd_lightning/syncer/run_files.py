"""Small files of a run's `syncer/` that a later start reads: when it began, on which ports."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STARTED, PORTS = "started", "ports.json"


@dataclass(frozen=True, slots=True)
class Started:
    """The first start of a run: every later one has its id and its clock."""

    run_id: str
    wall_s: float  # Unix time

    @classmethod
    def now(cls, run_id: str) -> Started:
        """A run that begins."""
        return cls(run_id, time.time())

    def write(self, folder: Path) -> None:
        """Raises OSError: a run that cannot write this does not begin."""
        write_small(folder / STARTED, json.dumps({"run_id": self.run_id, "wall_s": self.wall_s}))


def read_started(folder: Path) -> Started | None:
    """None: no start of the run came so far."""
    found = _read(folder / STARTED)
    return Started(str(found["run_id"]), float(found["wall_s"])) if found else None


def read_ports(folder: Path) -> dict[str, int]:
    """`channel` and `store` of the start before; empty where it came not so far."""
    found = _read(folder / PORTS) or {}
    return {name: int(found[name]) for name in ("channel", "store") if name in found}


def write_ports(folder: Path, ports: Mapping[str, Any]) -> str:
    """Write them with our pid; what is to be said where the disk refuses, "" else.

    Lost then: a resumed syncer listens elsewhere, and learners must be told its new address.
    """
    try:
        write_small(folder / PORTS, json.dumps({**ports, "pid": os.getpid()}))
    except OSError as error:
        return (
            f"{PORTS} cannot be written ({error.strerror}): a resumed syncer will listen on other "
            "ports, unless it is given this one with --listen. Free space in the run's folder."
        )
    return ""


def write_small(path: Path, text: str) -> None:
    """In one rename; what fails leaves the file as it was. Raises OSError."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        raise


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None
