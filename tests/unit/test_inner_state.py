"""Inner optimizer state in pieces: cut, put together, checked, loaded; and what is refused."""

from __future__ import annotations

import pickle
import zlib

import msgspec
import pytest
import torch
from torch import nn

from dd_lightning.learner.inner_state import InnerState, raw_bytes
from dd_lightning.protocol import transfer
from dd_lightning.protocol.inner_messages import StateChunk, StatePart, StatePayload
from dd_lightning.protocol.transfer import Assembly, StateSource, TransferError

pytestmark = pytest.mark.unit

OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "rprop": lambda p: torch.optim.Rprop(p),
}


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 2)).to(dtype)


def train(module, optimizer, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(4, 8, generator=generator).to(module[0].weight.dtype)
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()


def groups(module):
    """In another order than the module's, as weight decay groups often are."""
    parameters = list(module.parameters())
    return [{"params": parameters[1::2]}, {"params": parameters[::2], "weight_decay": 0.1}]


def chunks_of(state, step=7):
    entries = state.entries()
    source = StateSource(3, step, [(e, raw_bytes(t.clone())) for e, t in entries.items()])
    source.allow(10**6)
    while source.ready:
        message, data = source.take()
        yield msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=StateChunk), bytes(data)


def carry(donor, receiver):
    assembly = Assembly(3, receiver.fits())
    for message, data in chunks_of(donor):
        assembly.add(message, data)
    assert assembly.complete and assembly.step == 7
    receiver.load(assembly.entries)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_receiver_goes_on_exactly_as_the_donor(name, dtype, monkeypatch):
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 48)
    ours, theirs = net(dtype), net(dtype)
    one, other = OPTIMIZERS[name](groups(ours)), OPTIMIZERS[name](groups(theirs))
    train(ours, one, 5)
    theirs.load_state_dict(ours.state_dict())
    donor, receiver = InnerState(ours, [one]), InnerState(theirs, [other])
    assert donor.description == receiver.description != ""
    carry(donor, receiver)
    train(ours, one, 3, seed=2)
    train(theirs, other, 3, seed=2)
    for mine, copy in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, copy)


def test_numbers_come_as_numbers():
    ours, theirs = net(), net()
    one, other = OPTIMIZERS["sgd"](ours.parameters()), OPTIMIZERS["sgd"](theirs.parameters())
    for p in ours.parameters():
        one.state[p] = {"step": 3, "scale": 0.5, "none": None, "seen": torch.tensor([True, False])}
    carry(InnerState(ours, [one]), InnerState(theirs, [other]))
    for p in theirs.parameters():
        state = other.state[p]
        assert (state["step"], state["scale"]) == (3, 0.5) and type(state["step"]) is int
        assert state["seen"].tolist() == [True, False] and "none" not in state


def test_what_two_learners_must_have_in_common():
    def described(make, module=None, **options):
        module = net() if module is None else module
        return InnerState(module, [make(module.parameters(), **options)]).description

    adam = torch.optim.AdamW
    assert described(adam) == described(adam, lr=0.5, weight_decay=0.3, betas=(0.5, 0.9))
    others = [
        described(adam, amsgrad=True), described(torch.optim.Adam),
        described(torch.optim.SGD, lr=1.0), described(torch.optim.SGD, lr=1.0, momentum=0.1),
        described(adam, net(torch.bfloat16)), described(adam, nn.Linear(8, 5)),
    ]  # fmt: skip
    assert len({described(adam), *others}) == 7
    strange = nn.Parameter(torch.zeros(1))
    assert InnerState(net(), [adam([strange])]).description == ""


def test_state_that_is_no_tensor_or_number_is_refused_by_the_donor():
    module = net()
    optimizer = torch.optim.LBFGS(module.parameters())
    optimizer.state[module[0].weight]["history"] = [torch.zeros(1)]
    with pytest.raises(TransferError, match="a list of an optimizer cannot travel"):
        InnerState(module, [optimizer]).entries()


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


def message_of(data, **part):
    part = {"optimizer": 0, "parameter": "0.weight", "key": "exp_avg", "dtype": "float32",
            "shape": (5, 8), "offset": 0, "length": 40} | part  # fmt: skip
    digest = f"{zlib.crc32(data):08x}"
    payload = StatePayload(parts=(StatePart(**part),), num_bytes=len(data), digest=digest)
    return StateChunk(generation=1, transfer=1, chunk=0, last=True, step=1, payload=payload)


FORTY = bytes(160)


@pytest.mark.parametrize(
    ("data", "part", "said"),
    [
        (pickle.dumps(Bomb()), {}, "bytes are missing"),
        (pickle.dumps(Bomb()), {"dtype": "pickle"}, "pickle cannot travel"),
        (pickle.dumps(Bomb()), {"dtype": "object", "shape": (1,), "length": 1}, "cannot travel"),
        (FORTY, {"parameter": "other"}, "not a parameter of this learner"),
        (FORTY, {"optimizer": 1}, "not a parameter of this learner"),
        (FORTY, {"shape": (40,)}, r"has shape \(40,\), its parameter \(5, 8\)"),
        (bytes(800), {"shape": (5, 40), "length": 200}, "has shape"),
        (FORTY, {"offset": 1}, "out of place"),
        (FORTY, {"length": 41}, "out of place"),
        (FORTY[:40], {"length": 10}, "elements are missing"),
        (FORTY + b"more", {}, "belong to nothing"),
        (FORTY, {"number": True}, "is not a number"),
    ],
)
def test_what_does_not_hold_is_refused_and_never_unpickled(data, part, said):
    module = net()
    state = InnerState(module, [torch.optim.AdamW(module.parameters())])
    with pytest.raises(TransferError, match=said):
        Assembly(1, state.fits()).add(message_of(data, **part), data)


def test_checksum_order_and_repeats():
    module = net()
    optimizer = torch.optim.AdamW(module.parameters())
    train(module, optimizer, 1)
    state = InnerState(module, [optimizer])
    assembly = Assembly(1, state.fits())
    message = message_of(FORTY)
    with pytest.raises(TransferError, match="checksum"):
        assembly.add(message, b"x" + FORTY[1:])
    with pytest.raises(TransferError, match="announced"):
        assembly.add(message, FORTY[1:])
    with pytest.raises(TransferError, match="chunk 1 came instead of 0"):
        assembly.add(msgspec.structs.replace(message, chunk=1), FORTY)
    assembly.add(message, FORTY)
    assembly.add(message, FORTY)
    assert assembly.chunks == 1 and len(assembly.entries) == 1


def test_values_that_are_not_finite_change_nothing():
    ours, theirs = net(), net()
    one, other = OPTIMIZERS["adamw"](ours.parameters()), OPTIMIZERS["adamw"](theirs.parameters())
    train(ours, one, 2)
    train(theirs, other, 1)
    one.state[ours[1].weight]["exp_avg"][0, 0] = float("nan")
    before = {key: t.clone() for key, t in InnerState(theirs, [other]).entries().items()}
    with pytest.raises(TransferError, match="not finite"):
        carry(InnerState(ours, [one]), InnerState(theirs, [other]))
    after = InnerState(theirs, [other]).entries()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_chunks_are_bounded_and_a_donor_stops_at_what_is_allowed():
    module = nn.Sequential(
        *(nn.Linear(400, 400) for _ in range(3)), *(nn.Linear(1, 1) for _ in range(300))
    )
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    payloads = [message.payload for message, _ in chunks_of(InnerState(module, [optimizer]))]
    sizes = [(payload.num_bytes, len(payload.parts)) for payload in payloads]
    assert max(b for b, _ in sizes) <= transfer.CHUNK_BYTES and len(sizes) >= 4
    assert max(n for _, n in sizes) <= transfer.CHUNK_PARTS
    entries = InnerState(module, [optimizer]).entries()
    source = StateSource(1, 1, [(e, raw_bytes(t)) for e, t in entries.items()])
    assert not source.ready
    source.allow(2)
    source.allow(1)
    source.take(), source.take()
    assert not source.ready and not source.over
