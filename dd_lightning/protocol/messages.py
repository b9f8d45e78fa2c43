"""Every message between learners, operators and the syncer, as typed msgspec structs.

A message is a header (one of these structs, msgpack-encoded with a type tag, and its checksum) and,
for those marked *payload*, the raw little-endian bytes of the tensors of one fragment beside it, in
name order.
Nothing that comes over a wire is ever unpickled. Messages are idempotent: losing, repeating,
delaying or reordering them changes nothing but time (`dd_lightning/README.md`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from dd_lightning.protocol.cut_messages import CutOver, CutRecorded, CutTaken, TakeCut
from dd_lightning.protocol.inner_messages import (
    DonateState,
    Inner,
    StateChunk,
    StateComing,
    StateFailed,
    StateLoaded,
    StateOver,
    StateReceived,
)
from dd_lightning.protocol.message_base import (
    ApplyDone,
    Count,
    Message,
    Name,
    OptionalName,
    Payload,
    RoundKey,
    Seconds,
    TensorInfo,
    Version,
)
from dd_lightning.protocol.message_base import TensorPart as TensorPart  # for who describes bytes
from dd_lightning.protocol.operator_messages import Answer, Query
from dd_lightning.protocol.sealing import Corrupt as Corrupt  # for who decodes
from dd_lightning.protocol.sealing import seal, unseal

PROTOCOL_VERSION = 1

HELD = "held"
"""`Pull.base` of a first pull after a re-attach: answer with whatever the learner holds."""


# --------------------------------------------------------------------- learner to syncer


class Join(Message):
    """(Re)attach: who I am, what I hold. Answered by `Welcome`, `Refused`; repeated until then.

    `number` grows with each join of this process and `incarnation` names the process life, so a
    repeated join gets the same generation. `continues`: this process lived on and has loaded every
    fragment once; then `versions`, `odometer`, `pending` state what it holds. `cut`: it was
    restored from its part of that consistent cut, which they then speak of; `former`: the
    incarnation whose account it carries on.
    """

    learner: Name
    incarnation: Name
    number: Count
    protocol: int = PROTOCOL_VERSION
    run_id: str = ""
    generation: Count = 0  # the last one this process held, 0: none
    continues: bool = False
    takeover: bool = False
    tensors: tuple[TensorInfo, ...] = ()
    dtype: str = "float32"  # of the learner's own parameters
    step: Count = 0  # inner steps done, over all incarnations that state was carried through
    odometer: Count = 0  # tokens of this incarnation
    versions: tuple[Version, ...] = ()  # held per fragment
    pending: tuple[tuple[Count, Count], ...] = ()  # (c_steps, c_tokens) per fragment
    unheard: tuple[ApplyDone, ...] = ()  # applies that may not be on the tape
    epoch: Count = 0  # in which it was admitted last, 0: never
    cut: OptionalName = ""
    former: OptionalName = ""
    state_from: str = "cold"  # self | checkpoint | peer | cold
    state_step: Count = 0
    wants_state: bool = False  # has no inner state of its own: a peer's is welcome
    data_position: Count = 0  # micro-batches drawn, of its checkpoint, or by now if it lived on
    skips: bool = False  # its data can begin at a later position
    data_slot: int | None = None
    strategy: str = ""
    ranks: int = 1
    max_steps: int | None = None
    host: str = ""
    pid: int = 0


class Initial(Message):
    """*Payload.* Fragment `fragment` of version 0, from the first learner admitted."""

    generation: Count
    fragment: Count
    payload: Payload


class Progress(Message):
    """Coalesced report after inner steps; also the heartbeat (`step` unchanged then).

    `state`: "training" | "paused" | "waiting" (inside a step boundary under `wait: overlap`).
    `step_seconds`: durations of the steps finished since the last report. `boundary_seconds`: of
    the boundaries before them, as far as no wait is in them.
    """

    generation: Count
    step: Count
    odometer: Count
    state: str = "training"
    step_seconds: tuple[Seconds, ...] = ()
    boundary_seconds: tuple[Seconds, ...] = ()
    data_position: Count = 0  # micro-batches drawn, over all lives
    seconds_stepping: Seconds = 0.0  # of this incarnation, as `design.md` defines it
    losses: tuple[float, ...] = ()  # training loss of (at most) the last 20 steps
    ping: Count = 0  # number of this report, answered by `Pong` when > 0
    rtt_ms: Seconds | None = None  # median of the round trips measured so far
    last_error: str = ""


class Contribution(Message):
    """*Payload.* θ_p of this learner at the boundary after `step`, with what no merge has yet.

    Covers the tokens (odometer − tokens, odometer] of the incarnation. `final`: handed in by a
    finishing learner. `unasked`: under `wait: overlap`, at the learner's own step r·H/P.
    """

    generation: Count
    epoch: Count
    round: Count
    fragment: Count
    step: Count
    steps: Count  # c_steps
    tokens: Count  # c_tokens
    odometer: Count
    base: Version  # version the learner held when it took the snapshot
    payload: Payload
    fingerprint: str  # of the layout
    boundary_wait_s: Seconds = 0.0  # from the pull's arrival to the snapshot
    final: bool = False
    unasked: bool = False
    cut: OptionalName = ""  # the last consistent cut that the learner had recorded before


class Nothing(Message):
    """Answer to a final pull: the learner holds nothing of this fragment that no merge has."""

    generation: Count
    epoch: Count
    round: Count
    fragment: Count
    odometer: Count


class Received(Message):
    """Fragment `fragment` has arrived (not yet been applied): opens the outbox for the next."""

    generation: Count
    fragment: Count
    version: Version


class Applied(Message):
    """A fragment was applied at the boundary after `step`. `odometer` and (`steps`, `tokens`):
    T and c right after it; `tokens_before`: c just before, after settling a merged snapshot."""

    generation: Count
    step: Count
    fragment: Count
    version: Version
    odometer: Count
    steps: Count
    tokens: Count
    tokens_before: Count
    settled: RoundKey | None = None  # the round of the snapshot that `merged_upto` settled
    cut: OptionalName = ""  # the last consistent cut that the learner had recorded before


class Checkpointed(Message):
    """The learner wrote its own checkpoint (Lightning's) at `step`."""

    generation: Count
    step: Count
    data_position: Count


class Finish(Message):
    """The learner has done its last inner step and answers final pulls from now on."""

    generation: Count
    step: Count
    odometer: Count
    reason: str = "done"


class Goodbye(Message):
    """The learner leaves now; what it still holds is lost as `unsent`."""

    generation: Count
    reason: str


# --------------------------------------------------------------------- syncer to learner


class Welcome(Message):
    """Admission under `generation`. Fragments follow (except as `protocol` says under epochs)."""

    learner: str
    number: int  # the join this answers
    generation: int
    epoch: int
    run_id: str
    config: dict[str, Any]  # SyncerConfig as plain values
    fragments: tuple[tuple[str, ...], ...]  # tensor names (parameters, then buffers) per fragment
    averaged: tuple[str, ...]  # names merged by the average whatever the rule
    fingerprint: str
    send_initial: bool  # True: hand in version 0 of every fragment first (`Initial`)
    clock: int  # the run clock now
    offset: int  # s of `C·P >= r·H + s`
    next_round: int
    merged_upto: tuple[RoundKey | None, ...]  # per fragment
    data_slot: int
    num_data_slots: int
    start_step: int  # inner steps the schedule of a newcomer starts at (the run's clock)
    peer_address: str  # where the learner's connection comes from, as the syncer sees it
    data_position: int = 0  # where the slot's data goes on, as far as it was heard of
    donated: bool = False  # a peer's inner state comes, or `StateOver` says that none does
    cut: str = ""  # admitted as part of the run restored from this cut, with all that it holds
    reload: bool = False  # it lived on beside a restored run: take Θ as it is


class Refused(Message):
    """The join is refused. `fatal`: joining again will not help; else it may, for `retry_s`."""

    number: int
    reason: str
    fatal: bool = True
    retry_s: Seconds = 0.0  # the lease of the id's holder, whose close we may not have seen yet


class Rejoin(Message):
    """Answer to any message of an ended generation; acted on only by who still holds it."""

    generation: int


class SendInitial(Message):
    """Hand in version 0 of every fragment: the learner that was to do it is gone."""

    generation: int


class Fragment(Message):
    """*Payload.* Θ_p, newest version. `merged_upto`: last round that merged a contribution of this
    incarnation. `round`: the merge that made this version ((epoch, 0): start or restore)."""

    generation: int
    fragment: int
    version: Version
    round: RoundKey
    merged_upto: RoundKey | None
    payload: Payload


class Pull(Message):
    """Contribute fragment `fragment` to round `round` once `base` has been applied and c >= 1."""

    generation: int
    epoch: int
    round: int
    fragment: int
    base: Version | str  # a version, or "held"
    merged_upto: RoundKey | None
    final: bool = False
    values: bool = False  # True: send values, not a delta (the base is no longer kept)


class Verdict(Message):
    """A contribution was refused, and why. `reload`: load Θ and reset the inner optimizer."""

    generation: int
    epoch: int
    round: int
    fragment: int
    reason: str
    reload: bool = False


class Closed(Message):
    """Rounds of `fragment` up to `round` are closed: queued contributions to them are dropped."""

    generation: int
    fragment: int
    round: RoundKey


class FinishNow(Message):
    """Stop training at the next boundary, then hand in (budget reached, straggler, shutdown)."""

    generation: int
    reason: str


class Released(Message):
    """Everything handed in is merged and on disk: the learner may go."""

    generation: int


class Pong(Message):
    """Answer to `Progress.ping`."""

    generation: int
    ping: int


TO_SYNCER = (
    Join
    | Initial
    | Progress
    | Contribution
    | Nothing
    | Received
    | Applied
    | Checkpointed
    | Finish
    | Inner
    | StateChunk
    | StateReceived
    | StateLoaded
    | StateFailed
    | Goodbye
    | CutRecorded
    | CutTaken
)
TO_LEARNER = (
    Welcome
    | Refused
    | Rejoin
    | SendInitial
    | Fragment
    | Pull
    | Verdict
    | Closed
    | FinishNow
    | Released
    | DonateState
    | StateChunk
    | StateComing
    | StateOver
    | Pong
    | TakeCut
    | CutOver
)

_encoder = msgspec.msgpack.Encoder()
_from_learner = msgspec.msgpack.Decoder(TO_SYNCER)
_at_syncer = msgspec.msgpack.Decoder(TO_SYNCER | Query)
_from_syncer = msgspec.msgpack.Decoder(TO_LEARNER)
_answer = msgspec.msgpack.Decoder(Answer)


def encode(message: Message) -> bytes:
    """Header bytes of a message, with their checksum (crc32, little-endian) at the end."""
    return seal(_encoder.encode(message))


def decode_from_learner(header: bytes | memoryview) -> Message:
    """Raises Corrupt, or ValueError (msgspec.ValidationError or DecodeError) for anything else."""
    return _from_learner.decode(unseal(header))


def decode_at_syncer(header: bytes | memoryview) -> Message:
    """A learner's or an operator's. Raises as `decode_from_learner`."""
    return _at_syncer.decode(unseal(header))


def decode_answer(header: bytes | memoryview) -> Message:
    """What an operator gets. Raises as `decode_from_learner`."""
    return _answer.decode(unseal(header))


def decode_from_syncer(header: bytes | memoryview) -> Message:
    """Raises Corrupt, or ValueError (msgspec.ValidationError or DecodeError) for anything else."""
    return _from_syncer.decode(unseal(header))
