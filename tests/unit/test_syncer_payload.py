"""Payloads: what is decoded, and what is refused for which reason."""

from __future__ import annotations

import msgspec
import pytest
import torch

from dd_lightning.algorithm import BFloat16Codec, NoCodec
from dd_lightning.syncer.payload import PayloadError, PayloadReader, encode_values
from tests.syncer_jobs import TENSORS, config_of, encode, layout_of, values_of

pytestmark = pytest.mark.unit

LAYOUT = layout_of(config_of())
FRAGMENT = next(i for i, names in enumerate(LAYOUT.fragments) if "norm.running_var" in names)


@pytest.fixture
def values():
    return {n: v for n, v in values_of(0).items() if n in LAYOUT.fragments[FRAGMENT]}


def reason_of(payload, data, fragment=FRAGMENT, codec=None, **options) -> str:
    with pytest.raises(PayloadError) as caught:
        PayloadReader(LAYOUT, codec or NoCodec()).decode(fragment, payload, data, **options)
    return caught.value.reason


def test_encoded_values_decode_to_themselves_and_are_a_copy(values) -> None:
    encoded = encode_values(values)
    expected = {name: value.clone() for name, value in values.items()}
    for value in values.values():
        value.zero_()
    decoded = PayloadReader(LAYOUT, NoCodec()).decode(FRAGMENT, encoded.payload, encoded.data)
    viewed = encoded.tensors({t.name: t.shape for t in TENSORS})
    for name, value in expected.items():
        assert torch.equal(decoded[name], value)
        assert torch.equal(viewed[name], value)


def test_a_bf16_delta_has_buffers_as_raw_values(values) -> None:
    payload, data = encode(values, "delta", BFloat16Codec())
    decoded = PayloadReader(LAYOUT, BFloat16Codec()).decode(FRAGMENT, payload, data)
    for name, value in values.items():
        expected = value if "running" in name else value.bfloat16().float()
        assert torch.equal(decoded[name], expected)


def test_values_are_taken_under_a_delta_codec(values) -> None:
    payload, data = encode(values)
    decoded = PayloadReader(LAYOUT, BFloat16Codec()).decode(FRAGMENT, payload, data)
    assert all(torch.equal(decoded[name], value) for name, value in values.items())


def test_buffers_may_be_missing_except_in_version_0(values) -> None:
    payload, data = encode({n: v for n, v in values.items() if "running" not in n})
    assert PayloadReader(LAYOUT, NoCodec()).decode(FRAGMENT, payload, data)
    assert reason_of(payload, data, whole=True) == "layout"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_are_refused(values, bad) -> None:
    next(iter(values.values())).view(-1)[-1] = bad
    assert reason_of(*encode(values)) == "non-finite"


def test_a_flipped_bit_is_a_checksum(values) -> None:
    payload, data = encode(values)
    broken = bytearray(data)
    broken[7] ^= 1
    assert reason_of(payload, memoryview(broken)) == "checksum"


def test_a_truncated_or_missing_payload_is_a_byte_count(values) -> None:
    payload, data = encode(values)
    assert reason_of(payload, data[:-4]) == "byte count"
    assert reason_of(payload, None) == "byte count"
    lying = msgspec.structs.replace(payload, num_bytes=payload.num_bytes - 4)
    assert reason_of(lying, data[:-4]) == "byte count"


def test_another_codec_kind_or_dtype_is_a_codec(values) -> None:
    payload, data = encode(values)
    for change in ({"codec": "bf16"}, {"kind": "delta"}, {"codec": "gzip"}):
        assert reason_of(msgspec.structs.replace(payload, **change), data) == "codec"
    part = msgspec.structs.replace(payload.parts[0], dtype="int64")
    changed = msgspec.structs.replace(payload, parts=(part, *payload.parts[1:]))
    assert reason_of(changed, data) == "codec"


def test_other_tensors_slices_or_fragments_are_a_layout(values) -> None:
    payload, data = encode(values)
    for parts in (
        payload.parts[1:],
        (*payload.parts, payload.parts[0]),
        (msgspec.structs.replace(payload.parts[0], offset=1), *payload.parts[1:]),
        (msgspec.structs.replace(payload.parts[0], name="other"), *payload.parts[1:]),
    ):
        assert reason_of(msgspec.structs.replace(payload, parts=parts), data) == "layout"
    assert reason_of(payload, data, fragment=1 - FRAGMENT) == "layout"
    assert reason_of(payload, data, fragment=2) == "layout"
