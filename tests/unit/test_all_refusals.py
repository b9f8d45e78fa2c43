"""Every refusal of the protocol, by the name it has there: refused whole, counted, the learner told
why and taken off the roster, the round going on without it.

Bytes are checked as the server does it, by a real reader before the core sees the message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from dd_lightning.algorithm import NoCodec
from dd_lightning.protocol import messages as msg
from dd_lightning.syncer.lock import RunLock, RunLocked
from dd_lightning.syncer.payload import PayloadError, PayloadReader
from tests.scripted_core import ScriptedCore
from tests.syncer_jobs import encode

pytestmark = pytest.mark.unit

VALUES = {"a": torch.ones(2), "b": torch.ones(2)}
Spoil = Callable[[msg.Contribution, memoryview], tuple[msg.Contribution, memoryview]]


def header(**change: Any) -> Spoil:
    return lambda message, data: (replace(message, **change), data)


def payload(**change: Any) -> Spoil:
    return lambda message, data: (
        replace(message, payload=replace(message.payload, **change)),
        data,
    )


def flipped(message: msg.Contribution, data: memoryview) -> tuple[msg.Contribution, memoryview]:
    broken = bytearray(data)
    broken[1] ^= 1
    return message, memoryview(broken)


def non_finite(message: msg.Contribution, data: memoryview) -> Any:
    described, spoiled = encode({"a": torch.tensor([1.0, float("nan")])})
    return replace(message, payload=described), spoiled


REFUSALS: dict[str, tuple[Spoil, str]] = {
    "non-finite values": (non_finite, "non-finite"),
    "wrong layout": (header(fingerprint="of another model"), "layout"),
    "wrong tensors": (payload(parts=()), "layout"),
    "wrong fragment": (header(fragment=1), "layout"),
    "no such fragment": (header(fragment=9), "layout"),
    "wrong round": (header(round=2), "round"),
    "a round far ahead": (header(round=201), "round"),
    "wrong epoch": (header(epoch=2), "epoch"),
    "wrong base": (header(base=(1, 5)), "base"),
    "a base of a later epoch": (header(base=(2, 0)), "base"),
    "wrong byte count": (lambda message, data: (message, data[:-4]), "byte count"),
    "wrong checksum": (flipped, "checksum"),
    "wrong codec": (payload(codec="gzip"), "codec"),
    "nothing trained": (header(tokens=0), "empty"),
    "tokens that are settled": (header(tokens=10**6), "counters"),
}


def arrives(core: ScriptedCore, session: str, message: msg.Contribution, data: memoryview) -> None:
    """What the server does with a contribution."""
    assert core.core.run.layout is not None
    reader = PayloadReader(core.core.run.layout, NoCodec())
    try:
        tensors = reader.decode(message.fragment, message.payload, data, whole=False)
    except PayloadError as error:
        core.core.refuse_payload(session, message, error.reason, core.now)
        core.carry_out()
        return
    core.receive(session, message, payload=tensors)


def good(core: ScriptedCore, learner: str) -> tuple[msg.Contribution, memoryview]:
    assert core.core.run.layout is not None
    names = core.core.run.layout.fragments[0]
    described, data = encode({name: VALUES[name] for name in names})
    return replace(core.contribution(learner, 1), payload=described), data


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_contribution(name) -> None:
    spoil, reason = REFUSALS[name]
    core = ScriptedCore(learners=2, quorum=2).started("0", "1").opened(1)
    arrives(core, "0", *spoil(*good(core, "0")))
    (verdict,) = core.sent("0", msg.Verdict)
    assert (verdict.reason, verdict.reload) == (reason, False)
    assert core.core.run.refusals == 1 and reason in core.member("0").last_error
    assert core.events("contribution")[-1]["verdict"] == reason
    assert set(core.core.run.book.open[0].left) == {"1"}
    arrives(core, "1", *good(core, "1"))
    assert [held.learner for held in core.merges[0].contributions] == ["1"]
    assert core.core.run.ledger("0")[0]["merged"] == 0 == core.core.run.ledger("0")[0]["lost"]


def test_the_spoiled_ones_would_be_taken_unspoiled() -> None:
    core = ScriptedCore(learners=2, quorum=2).started("0", "1").opened(1)
    for learner in ("0", "1"):
        arrives(core, learner, *good(core, learner))
    assert len(core.merges[0].contributions) == 2 and core.core.run.refusals == 0


def test_wrong_generation() -> None:
    """Not even counted: it is told to rejoin, and nothing else happens."""
    core = ScriptedCore(learners=2, quorum=2).started("0", "1").opened(1)
    message, data = good(core, "0")
    arrives(core, "0", replace(message, generation=7), data)
    assert core.sent("0", msg.Rejoin) == [msg.Rejoin(generation=7)]
    assert not core.sent("0", msg.Verdict) and core.core.run.refusals == 0
    assert set(core.core.run.book.open[0].left) == {"0", "1"}


@pytest.mark.parametrize(("learners", "guarded"), [(2, False), (3, True)])
def test_a_norm_above_max_norm_ratio_is_refused_at_the_close_of_three(learners, guarded) -> None:
    """The merge finds it (`test_syncer_merger`); the core refuses whom it names."""
    names = [str(i) for i in range(learners)]
    core = ScriptedCore(learners=learners, quorum=learners, max_norm_ratio=3.0)
    core.started(*names).opened(1)
    core.reject = {"1": "norm 9.1 x the median"} if guarded else {}
    for name in names:
        arrives(core, name, *good(core, name))
    told = [verdict.reason for verdict in core.sent("1", msg.Verdict)]
    assert told == (["norm 9.1 x the median"] if guarded else [])
    assert core.core.run.refusals == guarded


def test_non_finite_three_times_in_a_row_reloads_and_a_good_one_between_does_not() -> None:
    core = ScriptedCore(learners=2, quorum=1, grace_rule="none").started("0", "1")
    bad = {1: True, 2: True, 3: False, 4: True, 5: True, 6: True}
    for number, spoiled in bad.items():
        core.opened(number)
        message = core.contribution("0", number)
        if spoiled:
            core.core.refuse_payload("0", message, "non-finite", core.now)
            core.carry_out()
        else:
            core.receive("0", message, payload="x")
        core.receive("1", core.contribution("1", number), payload="y")
        core.advance(0.1)
    reloads = [verdict.reload for verdict in core.sent("0", msg.Verdict)]
    assert reloads == [False, False, False, False, True]


def test_a_second_syncer_of_a_run(tmp_path) -> None:
    first = RunLock(tmp_path)
    with pytest.raises(RunLocked):
        RunLock(tmp_path)
    first.release()
    second = RunLock(tmp_path)  # has started meanwhile: seen before each checkpoint is written
    with pytest.raises(RuntimeError, match="epoch 2"):
        first.check()
    second.release()
