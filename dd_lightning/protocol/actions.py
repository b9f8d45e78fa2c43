"""What the syncer's core asks of its surroundings: events go in, these come out.

`SyncerCore` (`syncer_core.py`) has no clock, socket, thread or tensor; whoever drives it (the
server, the simulator, a test) carries these out in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dd_lightning.protocol.messages import (
    Contribution,
    Message,
    RoundKey,
    StateChunk,
    Version,
)


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to `session`; losing it costs time only."""

    session: str
    message: Message


@dataclass(frozen=True, slots=True)
class SendFragment:
    """Send the published fragment `fragment` (always its newest version) to `session`.

    The driver makes the `Fragment` message from these fields and the published values.
    """

    session: str
    generation: int
    fragment: int
    version: Version
    round: RoundKey
    merged_upto: RoundKey | None


@dataclass(frozen=True, slots=True)
class RelayState:
    """Send a piece of a donor's state on to `session`, after any fragment that waits for it."""

    session: str
    message: StateChunk
    payload: Any  # its bytes, as they came


@dataclass(frozen=True, slots=True)
class HeldContribution:
    """A contribution of a closed round: the message and the payload the driver passed in."""

    learner: str
    generation: int
    incarnation: str
    message: Contribution
    payload: Any
    dtype: str  # of the learner's own parameters
    arrived_s: float
    weight: float


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge `contributions` (ascending (learner, generation)) into `fragment`, then call
    `core.merged(...)`. `reanchor`: Θ becomes the weighted average of the contributed values, outer
    momentum is zeroed and no outer step is made. `version` is the one it becomes."""

    epoch: int
    round: int
    fragment: int
    version: Version
    contributions: tuple[HeldContribution, ...]
    reanchor: bool


@dataclass(frozen=True, slots=True)
class SetInitial:
    """Version 0 of `fragment` has come: publish it, then call `core.initialized(fragment)`."""

    fragment: int
    payload: Any
    message: Any  # Initial


@dataclass(frozen=True, slots=True)
class Record:
    """Write `event` to the tape."""

    event: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class WriteCheckpoint:
    """Write Θ, the outer optimizer and `state`; then call `core.checkpointed(state)`.

    Issued only while no merge is outstanding; merges issued later must be done after it. With a
    `cut` in its state it is the syncer's record of that cut: `core.cut_saved` is called instead."""

    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CutDone:
    """A consistent cut is complete: all its files are on disk. `manifest`: plain JSON values."""

    cut: str
    manifest: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CutFailed:
    """A consistent cut came to nothing, and why; the run goes on as if it had not been asked."""

    cut: str
    reason: str


@dataclass(frozen=True, slots=True)
class CloseSession:
    """End the connection `session` after what was sent to it has gone out."""

    session: str


@dataclass(frozen=True, slots=True)
class Warn:
    """Tell the operator (log and tape)."""

    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The run is over: every learner was released and the last checkpoint is written."""

    status: str  # finished | failed | interrupted
    reason: str


Action = (
    Send
    | SendFragment
    | RelayState
    | Merge
    | SetInitial
    | Record
    | WriteCheckpoint
    | CutDone
    | CutFailed
    | CloseSession
    | Warn
    | Done
)


@dataclass(frozen=True, slots=True)
class MergeResult:
    """What the merge found. `rejected`: learner to reason, refused at the close (the guard)."""

    digest: str  # sha256 over Θ_p after the merge, first 16 hex digits
    agreement: float | None  # ‖Σ w·φ(v)‖/Σ w; None with one contribution or a re-anchor
    seconds: float
    outer_norm: float = 0.0  # ‖Δ‖
    rejected: tuple[tuple[str, str], ...] = ()
    staleness: tuple[tuple[str, int], ...] = ()  # learner to merges between its base and this one
    norms: tuple[tuple[str, float], ...] = ()  # learner to ‖v‖
    cosine: float | None = None  # mean over pairs of contributions; None without a pair
