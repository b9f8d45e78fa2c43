"""Codecs: bytes on the wire, exactness, and refusal of what does not fit."""

import struct

import pytest
import torch

from dd_lightning.algorithm import (
    CODECS,
    BFloat16Codec,
    Codec,
    NoCodec,
    dtype_from_name,
    dtype_name,
)

pytestmark = pytest.mark.unit
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def test_raw_bytes_are_little_endian_in_row_order():
    encoded = NoCodec().encode(torch.tensor([[1.0, -2.5], [3.0, 0.1]]).T)
    assert bytes(encoded) == struct.pack("<4f", 1.0, 3.0, -2.5, 0.1)


def test_bf16_bytes_are_the_upper_half_rounded_to_even():
    # 1 + 2^-8 lies halfway between two bfloat16 and goes to the even one, 1
    encoded = BFloat16Codec().encode(torch.tensor([1.0, -2.0, 1.00390625]))
    assert bytes(encoded) == bytes.fromhex("803f 00c0 803f")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5)])
def test_raw_round_trip_is_exact(dtype, shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    codec = NoCodec()
    encoded = codec.encode(tensor)
    assert encoded.nbytes == codec.num_bytes(shape, dtype)
    for buffer in (encoded, bytes(encoded), bytearray(encoded)):
        back = codec.decode(buffer, shape, dtype_name(dtype))
        assert back.dtype == dtype and torch.equal(back, tensor)


def test_raw_encoding_shares_memory_and_decoding_does_not():
    tensor = torch.zeros(2)
    encoded = NoCodec().encode(tensor)
    back = NoCodec().decode(encoded, (2,), torch.float32)
    tensor.fill_(1.0)
    assert bytes(encoded) == struct.pack("<2f", 1.0, 1.0)
    assert back.tolist() == [0.0, 0.0]


def test_decoding_needs_no_alignment():
    payload = b"x" + struct.pack("<2f", 1.5, -4.0)
    assert NoCodec().decode(memoryview(payload)[1:], (2,), "float32").tolist() == [1.5, -4.0]


@pytest.mark.parametrize("codec", [NoCodec(), BFloat16Codec()])
@pytest.mark.parametrize("change", [-1, 1, 4])
def test_a_wrong_number_of_bytes_is_refused(codec, change):
    size = codec.num_bytes((2, 3), "float32")
    message = rf"holds {size + change} bytes; shape \(2, 3\) .* exactly {size}"
    with pytest.raises(ValueError, match=message):
        codec.decode(bytes(size + change), (2, 3), "float32")


@pytest.mark.parametrize("codec", [NoCodec(), BFloat16Codec()])
def test_headers_that_make_no_sense_are_refused(codec):
    with pytest.raises(ValueError, match="a dimension of shape is -2"):
        codec.decode(b"", (-2, -3), "float32")
    with pytest.raises(ValueError, match="dtype is 'object'; allowed: float32"):
        codec.decode(b"", (0,), "object")
    with pytest.raises(ValueError, match=r"dtype is torch.int64; allowed: float32"):
        codec.encode(torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("dtype", FLOATS)
def test_dtype_names_go_both_ways(dtype):
    assert f"torch.{dtype_name(dtype)}" == str(dtype)
    assert dtype_from_name(dtype_name(dtype)) == dtype


def test_registered_codecs_keep_the_protocol():
    assert {name: cls.encodes for name, cls in CODECS.items()} == {
        "none": "values",
        "bf16": "delta",
    }
    for name, cls in CODECS.items():
        assert cls.name == name and isinstance(cls(), Codec)
