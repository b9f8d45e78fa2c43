"""What messages share: their base, the types of their fields, what describes tensors and bytes."""

from __future__ import annotations

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""Whatever counts up; no sum or product of a few leaves what the syncer's arithmetic takes."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
"""A duration. NaN and infinity are refused: one in a moving average would stay there for ever."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
"""Of a learner or an incarnation: on every row of the tape and in every table."""

OptionalName = Annotated[str, msgspec.Meta(max_length=200)]
"""As `Name`, or empty."""

Version = tuple[int, int]
"""(epoch of the syncer, number of merges this fragment has seen); compares lexicographically."""

RoundKey = tuple[int, int]
"""(epoch, round number); what a tape and `merged_upto` name a round by."""

ApplyDone = tuple[Count, Count, Version]
"""(after which inner step, which fragment, which version) a learner took over."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages."""


class TensorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of the layout, by its canonical name and full (unsharded) shape."""

    name: str
    shape: tuple[int, ...]
    kind: str = "parameter"  # "parameter" | "embedding" (always averaged) | "buffer"
    module: str = ""  # of a buffer: canonical name of its module's first parameter, or ""


class TensorPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one tensor lies in a payload: `length` elements from flat element `offset` on."""

    name: str
    dtype: str
    offset: int
    length: int


class Payload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes the bytes that travel beside a header."""

    codec: str  # name of the codec: "none" | "bf16"
    kind: str  # "values" | "delta" (base minus values; parameters only, buffers are always values)
    parts: tuple[TensorPart, ...]
    num_bytes: int
    digest: str  # crc32 of the bytes, eight hex digits
