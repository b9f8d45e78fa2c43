"""What the learner's link asks of its driver, and what it hands over for upload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dd_lightning.protocol.held import Snapshot
from dd_lightning.protocol.messages import (
    Contribution,
    CutOver,
    FinishNow,
    Initial,
    Message,
    Payload,
    SendInitial,
    StateChunk,
    StateComing,
    TakeCut,
)


@dataclass(frozen=True, slots=True)
class Send:
    """Send on the control channel; losing it costs time only."""

    message: Message


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand to the training side (its ledger, or its loading and finishing loops)."""

    message: Message
    payload: Any = None


@dataclass(frozen=True, slots=True)
class Reconnect:
    """Close the channel and make a new one, with back-off."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The learner cannot take part: raise `reason` in the training thread."""

    reason: str


LinkAction = Send | Deliver | Reconnect | Fail


@dataclass(frozen=True, slots=True)
class InitialValues:
    """Version 0 of one fragment, to be uploaded."""

    fragment: int
    values: Mapping[str, Tensor]


Upload = Snapshot | InitialValues

HANDED_ON = SendInitial | FinishNow | StateChunk | StateComing | TakeCut | CutOver
"""Messages that only the training side has to do with."""


def stamped(
    upload: Upload, payload: Payload, generation: int, fingerprint: str
) -> Contribution | Initial:
    """The header of an upload under a generation."""
    if isinstance(upload, InitialValues):
        return Initial(generation=generation, fragment=upload.fragment, payload=payload)
    epoch, round_ = upload.round
    return Contribution(
        generation=generation,
        epoch=epoch,
        round=round_,
        fragment=upload.fragment,
        step=upload.step,
        steps=upload.steps,
        tokens=upload.tokens,
        odometer=upload.odometer,
        base=upload.base,
        payload=payload,
        fingerprint=fingerprint,
        boundary_wait_s=upload.boundary_wait_s,
        final=upload.final,
        unasked=upload.unasked,
        cut=upload.cut,
    )
