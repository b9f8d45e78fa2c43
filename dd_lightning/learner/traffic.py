"""What went to the syncer and came from it, as the comm thread sees it: bytes, rounds, staleness.

Written by the comm thread (`applied`: by the training thread), read by the training thread:
single values that are replaced whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from dd_lightning.protocol.held import Snapshot
from dd_lightning.protocol.link_actions import Upload
from dd_lightning.protocol.messages import Applied, Fragment, RoundKey, Version


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one process life."""

    contributions: int = 0  # sent, each as often as it was
    merged: int = 0  # of them, known to be merged: their round's fragment came back
    fragments: int = 0  # of Θ that came
    bytes_sent: int = 0  # of payloads
    bytes_received: int = 0
    staleness: int | None = None  # merges between base and round of the last one merged


class Traffic:
    """`keeps_theta`: hold on to the newest Θ that came, one model in host memory (as it came)."""

    def __init__(self) -> None:
        self.figures = Figures()
        self.keeps_theta = False
        self.theta: dict[int, Mapping[str, Tensor]] = {}
        self.versions: dict[int, Version] = {}  # newest that came, by fragment
        self._applied: dict[int, Version] = {}
        self._bases: dict[int, tuple[RoundKey, Version]] = {}  # of what was sent last

    @property
    def version_gap(self) -> int:
        """Merges, over all fragments, that have come and are not applied."""
        newest = dict(self.versions)
        return sum(
            max(0, version[1] - max(0, self._applied.get(fragment, (-1, -1))[1]))
            for fragment, version in newest.items()
        )

    def applied(self, message: Applied) -> None:
        """A fragment of Θ is in the module."""
        self._applied[message.fragment] = message.version

    def sent(self, upload: Upload, num_bytes: int) -> None:
        """A contribution, or the first values of a run, has left."""
        now = self.figures
        if isinstance(upload, Snapshot):
            self._bases[upload.fragment] = (upload.round, upload.base)
            now = replace(now, contributions=now.contributions + 1)
        self.figures = replace(now, bytes_sent=now.bytes_sent + num_bytes)

    def came(self, message: Fragment, tensors: Mapping[str, Tensor], num_bytes: int) -> None:
        """A fragment of Θ."""
        now, fragment = self.figures, message.fragment
        now = replace(
            now, fragments=now.fragments + 1, bytes_received=now.bytes_received + num_bytes
        )
        round_, base = self._bases.get(fragment, (None, None))
        if base is not None and round_ == message.round == message.merged_upto:
            del self._bases[fragment]
            missed = message.version[1] - 1 - base[1]
            now = replace(now, merged=now.merged + 1, staleness=max(0, missed))
        self.figures = now
        if message.version > self.versions.get(fragment, (-1, -1)):
            if self.keeps_theta:
                self.theta[fragment] = tensors
            self.versions[fragment] = message.version
