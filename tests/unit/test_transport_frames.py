"""What is a well-formed message, on frames alone."""

import math
import zlib

import pytest
import zmq

from dd_lightning.protocol import messages
from dd_lightning.protocol.messages import Progress, decode_from_learner, encode, seal
from dd_lightning.transport import frames
from dd_lightning.transport.frames import CONTROL, DATA
from tests.transport_samples import contribution, describe, from_learner, from_syncer, goodbye

pytestmark = pytest.mark.unit

DATA_BYTES = b"12345678"


def decode(role, *parts):
    return frames.decode_frames(decode_from_learner, role, [zmq.Frame(part) for part in parts])


def test_samples_cover_every_type_of_message():
    for samples, union in (
        (from_learner(b""), messages.TO_SYNCER),
        (from_syncer(b""), messages.TO_LEARNER),
    ):
        assert {type(message) for message, _ in samples} == set(union.__args__)


def test_a_message_and_its_payload():
    message = contribution(DATA_BYTES)
    decoded, payload = decode(DATA, encode(message), DATA_BYTES)
    assert decoded == message
    assert payload is not None and bytes(payload) == DATA_BYTES
    assert decode(CONTROL, encode(goodbye())) == (goodbye(), None)


@pytest.mark.parametrize(
    ("role", "parts", "cause"),
    [
        (CONTROL, [], "0 frames"),
        (DATA, [b"a", b"b", b"c"], "3 frames"),
        (CONTROL, [seal(b"\xc1garbage")], "malformed"),
        (CONTROL, [b"\xc1garbage"], "checksum"),
        (CONTROL, [encode(from_syncer(b"")[2][0])], "Invalid value"),
        (DATA, [encode(contribution(DATA_BYTES))], "without its payload"),
        (CONTROL, [encode(goodbye()), b"x"], "with a payload"),
        (CONTROL, [encode(contribution(DATA_BYTES)), DATA_BYTES], "on the control connection"),
        (DATA, [encode(goodbye())], "on the data connection"),
        (CONTROL, [bytes(frames.MAX_HEADER_BYTES + 1)], "a header of"),
    ],
)
def test_anything_else_is_refused_with_its_cause(role, parts, cause):
    with pytest.raises(ValueError, match=cause):
        decode(role, *parts)


def test_no_flipped_bit_of_a_header_passes():
    header = encode(goodbye())
    for bit in range(8 * len(header)):
        flipped = bytearray(header)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(messages.Corrupt):
            decode(CONTROL, bytes(flipped))


@pytest.mark.parametrize(
    "wrong",
    [
        {"step_seconds": (math.nan,)},
        {"step_seconds": (-1.0,)},
        {"seconds_stepping": math.inf},
        {"rtt_ms": math.nan},
        {"step": -1},
        {"odometer": 2**63},
    ],
)
def test_figures_that_no_learner_has_are_refused(wrong):
    right = {"generation": 1, "step": 2, "odometer": 3}
    assert decode(CONTROL, encode(Progress(**right)))[0] == Progress(**right)
    with pytest.raises(ValueError, match=r"Expected `(float|int)` [<>]="):
        decode(CONTROL, encode(Progress(**right | wrong)))


def test_payload_faults():
    description = describe(DATA_BYTES)
    assert description.digest == f"{zlib.crc32(DATA_BYTES):08x}"
    assert frames.payload_fault(description, DATA_BYTES) is None
    assert frames.payload_fault(description, DATA_BYTES[1:]) == "byte count"
    assert frames.payload_fault(description, b"12345679") == "checksum"
    assert frames.digest(b"") == "00000000"


def test_identities():
    session = "ab" * 16
    for role in (CONTROL, DATA):
        assert frames.split_identity(frames.identity_of(role, session)) == (role, session)
    for identity in (b"", b"\x00abcd", b"c" + bytes(15), b"d" + bytes(17), b"x" + bytes(16)):
        assert frames.split_identity(identity) is None


def test_outgoing_messages_that_the_other_end_would_refuse():
    message = contribution(DATA_BYTES)
    with pytest.raises(ValueError, match="travels with a payload"):
        frames.check_outgoing(message, b"", None, 100)
    with pytest.raises(ValueError, match="travels with no payload"):
        frames.check_outgoing(goodbye(), b"", b"x", 100)
    with pytest.raises(ValueError, match=r"8 bytes, max_message_bytes is 7\. Use more fragments"):
        frames.check_outgoing(message, b"", DATA_BYTES, 7)
    with pytest.raises(ValueError, match="header of Goodbye"):
        frames.check_outgoing(goodbye(), bytes(frames.MAX_HEADER_BYTES + 1), None, 7)
    frames.check_outgoing(message, b"", DATA_BYTES, 8)


def test_wire_size_counts_framing():
    assert frames.wire_size() == 0
    assert frames.wire_size(0) == 2
    assert frames.wire_size(255, 256) == 257 + 265
