"""A message whose bytes were changed on their way, as the end that decodes it would see it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dd_lightning.network.control import PathFaults
from dd_lightning.network.link import Direction
from dd_lightning.protocol.messages import Message, decode_at_syncer, decode_from_syncer
from dd_lightning.transport.frames import Arrival


@dataclass(frozen=True, slots=True)
class Broken:
    """Bytes that are no message; who gets them closes the connection."""

    reason: str


def come_through(
    faults: PathFaults, now: float, way: Direction, header: bytes, sent: Arrival
) -> Arrival | Broken:
    """What arrives of a message sent at `now` while its path changes bytes.

    A changed payload arrives as it is: the protocol's checksum is there to find it. A changed
    header, or the framing around it, ends the connection, as in the real channel.
    """
    payload = b"" if sent.payload is None else bytes(sent.payload)
    framing = sent.num_bytes - len(header) - len(payload)
    before = bytes(framing) + header + payload
    after = faults.alter(before, now)
    if after[:framing] != before[:framing]:
        return Broken("the framing of a message is damaged")
    body = framing + len(header)
    try:
        message = _decode(way, after[framing:body])
    except ValueError as error:
        return Broken(str(error))
    if sent.payload is None:
        return replace(sent, message=message)
    return replace(sent, message=message, payload=memoryview(after[body:]))


def _decode(way: Direction, header: bytes) -> Message:
    return decode_at_syncer(header) if way == "up" else decode_from_syncer(header)
