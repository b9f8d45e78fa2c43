"""One message of every type, and a channel with a learner connected, for the transport's tests."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dd_lightning.protocol.cut_messages import CutOver, CutRecorded, CutTaken, TakeCut
from dd_lightning.protocol.inner_messages import (
    DonateState,
    Inner,
    StateChunk,
    StateComing,
    StateFailed,
    StateLoaded,
    StateOver,
    StatePayload,
    StateReceived,
)
from dd_lightning.protocol.messages import (
    PROTOCOL_VERSION,
    Applied,
    Checkpointed,
    Closed,
    Contribution,
    Finish,
    FinishNow,
    Fragment,
    Goodbye,
    Initial,
    Join,
    Message,
    Nothing,
    Payload,
    Pong,
    Progress,
    Pull,
    Received,
    Refused,
    Rejoin,
    Released,
    SendInitial,
    TensorInfo,
    Verdict,
    Welcome,
)
from dd_lightning.transport.frames import digest
from dd_lightning.transport.learner_channel import LearnerChannel
from dd_lightning.transport.rendezvous import Rendezvous
from dd_lightning.transport.syncer_channel import SyncerChannel

MOST_BYTES = 128 << 20
BOUND_S = 60.0  # on every wait of the tests: loose, for a busy machine


def describe(data: bytes | memoryview) -> Payload:
    size = memoryview(data).nbytes
    return Payload(codec="none", kind="values", parts=(), num_bytes=size, digest=digest(data))


def contribution(data: bytes | memoryview, round: int = 3) -> Contribution:
    return Contribution(
        generation=1,
        epoch=1,
        round=round,
        fragment=0,
        step=4,
        steps=2,
        tokens=64,
        odometer=128,
        base=(1, 2),
        payload=describe(data),
        fingerprint="abc",
    )


def fragment(data: bytes | memoryview) -> Fragment:
    return Fragment(
        generation=1,
        fragment=0,
        version=(1, 2),
        round=(1, 3),
        merged_upto=None,
        payload=describe(data),
    )


def from_learner(data: bytes) -> list[tuple[Message, bytes | None]]:
    """One of each, with its payload."""
    generation: dict[str, Any] = {"generation": 1}
    tensors = (TensorInfo("w", (2, 3)),)
    return [
        (Join(learner="0", incarnation="i", number=1, tensors=tensors), None),
        (Initial(fragment=0, payload=describe(data), **generation), data),
        (Progress(step=1, odometer=2, losses=(0.5,), **generation), None),
        (contribution(data), data),
        (Nothing(epoch=1, round=1, fragment=0, odometer=1, **generation), None),
        (Received(fragment=0, version=(1, 1), **generation), None),
        (
            Applied(
                step=1,
                fragment=0,
                version=(1, 1),
                odometer=1,
                steps=1,
                tokens=1,
                tokens_before=1,
                **generation,
            ),
            None,
        ),
        (Checkpointed(step=1, data_position=1, **generation), None),
        (Finish(step=1, odometer=1, **generation), None),
        (Goodbye(reason="done", **generation), None),
        (CutRecorded(cut="c1", step=1, odometer=2, **generation), None),
        (CutTaken(cut="c1", file="c1.ckpt", **generation), None),
        (Inner(optimizer="AdamW", **generation), None),
        (chunk(data), data),
        (StateReceived(transfer=1, chunks=1, **generation), None),
        (StateLoaded(transfer=1, step=4, **generation), None),
        (StateFailed(transfer=1, reason="shape", **generation), None),
    ]


def from_syncer(data: bytes) -> list[tuple[Message, bytes | None]]:
    """One of each, with its payload."""
    generation: dict[str, Any] = {"generation": 1}
    welcome = Welcome(
        learner="0",
        number=1,
        epoch=1,
        run_id="r",
        config={"learners": 2},
        fragments=(("w",),),
        averaged=(),
        fingerprint="abc",
        send_initial=True,
        clock=0,
        offset=0,
        next_round=1,
        merged_upto=(None,),
        data_slot=0,
        num_data_slots=2,
        start_step=0,
        peer_address="127.0.0.1",
        **generation,
    )
    return [
        (welcome, None),
        (Refused(number=1, reason="no"), None),
        (Rejoin(**generation), None),
        (SendInitial(**generation), None),
        (fragment(data), data),
        (Pull(epoch=1, round=1, fragment=0, base=(1, 1), merged_upto=None, **generation), None),
        (Verdict(epoch=1, round=1, fragment=0, reason="late", **generation), None),
        (Closed(fragment=0, round=(1, 1), **generation), None),
        (FinishNow(reason="budget", **generation), None),
        (Released(**generation), None),
        (Pong(ping=1, **generation), None),
        (TakeCut(cut="c1", **generation), None),
        (CutOver(cut="c1", complete=True, **generation), None),
        (DonateState(transfer=1, upto=8, **generation), None),
        (StateComing(**generation), None),
        (chunk(data), data),
        (StateOver(transfer=1, reason="no donor", **generation), None),
    ]


def chunk(data: bytes) -> StateChunk:
    payload = StatePayload(parts=(), num_bytes=len(data), digest=digest(data))
    return StateChunk(generation=1, transfer=1, chunk=0, last=True, step=4, payload=payload)


def goodbye(reason: str = "done") -> Goodbye:
    return Goodbye(generation=1, reason=reason)


def dial(syncer: SyncerChannel, most_bytes: int = MOST_BYTES) -> LearnerChannel:
    rendezvous = Rendezvous("127.0.0.1", syncer.port, "run", PROTOCOL_VERSION, "")
    return LearnerChannel(rendezvous, max_message_bytes=most_bytes)


@contextmanager
def connected(most_bytes: int = MOST_BYTES) -> Iterator[tuple[SyncerChannel, LearnerChannel]]:
    """A syncer's channel and a learner's whose both connections it has seen."""
    syncer = SyncerChannel("127.0.0.1", max_message_bytes=most_bytes)
    learner = None
    try:
        learner = dial(syncer, most_bytes)
        until(syncer, lambda _: both_bound(syncer, learner))
        syncer.trust(learner.session)
        yield syncer, learner
    finally:
        if learner is not None:
            learner.close()
        syncer.close()


def both_bound(syncer: SyncerChannel, learner: LearnerChannel) -> bool:
    state = syncer._sessions.get(learner.session)
    return state is not None and len(state.connections) == 2


def until(
    channel: SyncerChannel | LearnerChannel, enough: Callable[[list[Any]], bool]
) -> list[Any]:
    """Polls until `enough(all events so far)`; fails after `BOUND_S`."""
    events: list[Any] = []
    deadline = time.monotonic() + BOUND_S
    while not enough(events):
        assert time.monotonic() < deadline, f"only {events}"
        events += channel.poll(0.05)
    return events


def count(kind: type, number: int) -> Callable[[list[Any]], bool]:
    return lambda events: sum(isinstance(event, kind) for event in events) >= number


def open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def free_port() -> int:
    """A port of 127.0.0.1 where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@contextmanager
def silent_port() -> Iterator[int]:
    """A port that accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield silent.getsockname()[1]
