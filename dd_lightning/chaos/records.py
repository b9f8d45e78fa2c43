"""The files by which launcher and learners agree on faults, in the learner's folder.

`faults.jsonl`: what a learner has carried out, or asks the launcher to carry out at its step;
forced to the disk before the fault happens, so that the next process does not do it again.
`orders.jsonl`: what the launcher tells it to do at once. Both are append-only lines of JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DONE = "faults.jsonl"
ORDERS = "orders.jsonl"


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add a line and force it to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


@dataclass(slots=True)
class NewRows:
    """Reads the lines of a file that have been added since the last look."""

    path: Path
    _offset: int = 0

    def read(self) -> list[dict[str, Any]]:
        """New whole lines; none where there is no file (yet)."""
        try:
            if os.stat(self.path).st_size <= self._offset:
                return []
        except FileNotFoundError:
            return []
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
