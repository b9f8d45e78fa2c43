"""Pieces of the learner's side: tokens, sampler, clock, counter, payloads, tensors, address."""

import dataclasses
import pickle
import threading
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)
from torch import nn

from dd_lightning import DecoupledDiLoCoStrategy
from dd_lightning.algorithm import CODECS
from dd_lightning.learner.address import identify
from dd_lightning.learner.beginning import dialer
from dd_lightning.learner.comm import CommThread
from dd_lightning.learner.payload import Coder
from dd_lightning.learner.sampler import sampler_kwargs
from dd_lightning.learner.snapshots import ModelValues
from dd_lightning.learner.step_clock import StepClock
from dd_lightning.learner.step_counter import StepCounter
from dd_lightning.learner.tokens import TokenCounter
from dd_lightning.protocol.config import AlgorithmConfig
from dd_lightning.protocol.held import Snapshot
from dd_lightning.protocol.layout import build_layout
from dd_lightning.protocol.learner_link import LearnerLink
from dd_lightning.protocol.link_actions import InitialValues
from dd_lightning.protocol.messages import Join, TensorInfo
from dd_lightning.syncer.payload import PayloadReader, encode_values
from dd_lightning.transport import learner_channel, rendezvous

pytestmark = pytest.mark.unit
ADDRESS = "tcp://127.0.0.1:29400"


# --------------------------------------------------------------------------------- tokens


class Counting(nn.Module):
    def count_tokens(self, batch):
        return 7


@dataclasses.dataclass
class Sample:
    x: torch.Tensor


IDS = torch.zeros(2, 5, dtype=torch.long)
MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"input_ids": IDS, "attention_mask": MASK}, 4),
        ({"input_ids": IDS}, 10),
        ({"scalar": torch.tensor(1.0), "x": torch.zeros(6, 2)}, 6),
        (torch.zeros(3, 8), 3),
        ((["a", "b"], torch.zeros(2, 1)), 2),
        (Sample(torch.zeros(4)), 4),
    ],
)
def test_tokens_of_a_batch(batch, count):
    assert TokenCounter(nn.Module(), None)(batch) == count


def test_tokens_come_from_the_module_first_and_the_option_second():
    assert TokenCounter(Counting(), None)(IDS) == 7
    assert TokenCounter(nn.Module(), lambda batch: 11)(IDS) == 11
    with pytest.warns(UserWarning, match="no effect"):
        assert TokenCounter(Counting(), lambda batch: 11)(IDS) == 7


def test_a_batch_that_cannot_be_counted_warns_once_and_counts_one():
    counter = TokenCounter(nn.Module(), None)
    with pytest.warns(UserWarning, match="count_tokens"):
        assert counter(["a", "b"]) == 1
    assert counter(["a", "b"]) == 1


@pytest.mark.parametrize("count", [-1, 1.5])
def test_a_wrong_count_is_refused(count):
    with pytest.raises(ValueError, match="integer >= 0"):
        TokenCounter(nn.Module(), lambda batch: count)(IDS)


# --------------------------------------------------------------------------- step counter


def step_counter(**options):
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    counter = StepCounter(
        TokenCounter(nn.Module(), None), [optimizer], options.pop("scaler", None), automatic=True
    )
    return counter, optimizer


class FakeScaler:
    scale = 8.0

    def is_enabled(self):
        return True

    def get_scale(self):
        return self.scale


def test_only_real_steps_count_and_tokens_wait_for_the_next():
    counter, optimizer = step_counter()
    batch, loss = torch.zeros(4, 1), torch.tensor(2.0)
    counter.saw(batch, None)
    optimizer.step()
    assert not counter.has_stepped()  # no loss
    counter.saw(batch, loss)
    assert not counter.has_stepped()  # no optimizer step
    counter.saw(batch, {"loss": loss})
    optimizer.step()
    assert counter.has_stepped()
    assert counter.take() == (12, 2.0)
    counter.close()
    counter.saw(batch, loss)
    optimizer.step()
    assert not counter.has_stepped()


def test_a_step_with_which_the_scale_drops_does_not_count():
    scaler = FakeScaler()
    counter, optimizer = step_counter(scaler=scaler)
    for scale, stepped in ((8.0, True), (4.0, False), (4.0, True), (8.0, True)):
        counter.saw(torch.zeros(1, 1), torch.tensor(1.0))
        optimizer.step()
        scaler.scale = scale
        assert counter.has_stepped() == stepped


def test_seconds_stepping_leave_out_pauses_and_waits_only():
    clock = StepClock()
    clock.begin(10.0)
    assert clock.end(12.0) == 2.0
    clock.begin(15.0)  # data loading
    assert clock.end(16.0) == 4.0
    clock.leave_out(16.0)
    clock.resume(21.0)
    assert clock.end(22.0) == 1.0
    clock.leave_out(22.5)
    assert clock.end(30.0) == 0.5
    assert clock.seconds_stepping == 7.5


# -------------------------------------------------------------------------------- sampler


def test_sampler_kwargs():
    inner = {"num_replicas": 2, "rank": 1}
    options = {"training": True, "slots": 3, "seed": 5}
    assert sampler_kwargs(inner, "none", slot=1, **options) == inner
    assert sampler_kwargs(inner, "shard", slot=2, **options | {"training": False}) == inner
    shards = [sampler_kwargs(inner, "shard", slot=slot, **options) for slot in range(3)]
    assert [(s["num_replicas"], s["rank"]) for s in shards] == [(6, 1), (6, 3), (6, 5)]
    assert {s["seed"] for s in shards} == {5}
    seeds = [sampler_kwargs(inner, "seed", slot=slot, **options) for slot in range(3)]
    assert len({s["seed"] for s in seeds}) == 3
    assert {(s["num_replicas"], s["rank"]) for s in seeds} == {(2, 1)}


# ---------------------------------------------------------------------- tensors and bytes


class Model(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.ones(1), persistent=False)
        self.register_buffer("steps", torch.zeros(1, dtype=torch.long))
        self.to(dtype)


def placed(dtype=torch.float32, fragments=2):
    values = ModelValues(Model(dtype))
    layout = build_layout(values.infos, AlgorithmConfig(fragments=fragments))
    values.place(layout.fragments)
    return values, layout


def test_what_travels():
    values, _ = placed()
    kinds = {info.name: (info.kind, info.module) for info in values.infos}
    assert kinds == {
        "embed.weight": ("embedding", ""),
        "head.bias": ("parameter", ""),
        "norm.weight": ("parameter", ""),
        "norm.bias": ("parameter", ""),
        "norm.running_mean": ("buffer", "norm.weight"),
        "norm.running_var": ("buffer", "norm.weight"),
    }


def test_buffers_travel_once_they_have_changed_and_copies_are_copies():
    module = Model()
    values = ModelValues(module)
    values.place([[info.name for info in values.infos]])
    before = values.read(0)
    assert "norm.running_mean" not in before and "norm.running_mean" in values.read_whole(0)
    with torch.no_grad():
        module.norm.running_mean += 1
        module.head.bias += 1
    after = values.read(0)
    assert torch.equal(after["norm.running_mean"], torch.ones(3))
    assert "norm.running_var" not in after
    assert torch.equal(before["head.bias"] + 1, after["head.bias"])
    with torch.no_grad():
        module.norm.running_mean.zero_()  # back at its first value: it still travels
    assert "norm.running_mean" in values.read(0)


def test_a_buffer_that_the_module_replaces_is_followed():
    module = Model()
    values = ModelValues(module)
    values.place([[info.name for info in values.infos]])
    module.norm.running_mean = module.norm.running_mean + 2
    assert torch.equal(values.read(0)["norm.running_mean"], torch.full((3,), 2.0))
    values.write(0, {"norm.running_mean": torch.full((3,), 5.0)})
    assert torch.equal(module.norm.running_mean, torch.full((3,), 5.0))
    module.norm.running_mean = torch.zeros(4)
    with pytest.raises(RuntimeError, match=r"norm.running_mean had shape \(3,\).*persistent=False"):
        values.read(0)


def test_parameters_unfrozen_after_the_join_are_named_once():
    module = Model()
    values = ModelValues(module)
    values.warn_of_unfrozen()
    module.frozen.requires_grad_(True)
    with pytest.warns(UserWarning, match="2 parameters were frozen .*frozen.bias, frozen.weight"):
        values.warn_of_unfrozen()
    values.warn_of_unfrozen()  # warnings are errors


def test_write_is_in_place_and_casts():
    module = Model(torch.bfloat16)
    values = ModelValues(module)
    values.place([[info.name for info in values.infos]])
    place = module.embed.weight.data_ptr()
    values.write(0, {"embed.weight": torch.full((4, 3), 1.001), "unknown": torch.zeros(1)})
    assert module.embed.weight.data_ptr() == module.head.weight.data_ptr() == place
    assert module.head.weight.dtype == torch.bfloat16 and values.main_dtype == "bfloat16"
    assert torch.equal(module.head.weight, torch.full((4, 3), 1.001).bfloat16())


@pytest.mark.filterwarnings("ignore:.*Complex modules are a new feature.*")
def test_parameters_that_cannot_travel_are_refused():
    module = nn.Linear(2, 2).to(torch.complex64)
    with pytest.raises(ValueError, match="complex64"):
        ModelValues(module)
    with pytest.raises(ValueError, match="no trainable"):
        ModelValues(nn.Linear(2, 2).requires_grad_(False))


@pytest.mark.parametrize("codec", ["none", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_syncer_reads_what_a_learner_encodes(codec, dtype):
    values, layout = placed(dtype)
    coder = Coder.of(values.infos, codec)
    reader = PayloadReader(layout, CODECS[codec]())
    for p in range(layout.num_fragments):
        whole = values.read_whole(p)
        payload, data = coder.encode(InitialValues(p, whole))
        decoded = reader.decode(p, payload, data, whole=True)
        assert all(torch.equal(decoded[name].to(dtype), whole[name]) for name in whole)
        read = values.read(p)
        anchor = {name: tensor + 0.25 for name, tensor in read.items()} if codec == "bf16" else None
        snapshot = Snapshot(p, (1, 1), 1, 1, 1, 1, (1, 0), read, anchor, read)
        payload, data = coder.encode(snapshot)
        assert payload.kind == ("delta" if anchor else "values")
        decoded = reader.decode(p, payload, data)
        for name, tensor in read.items():
            expected = anchor[name].float() - tensor.float() if anchor else tensor
            torch.testing.assert_close(
                decoded[name].float(), expected.float(), rtol=2**-7, atol=0.0
            )


def test_a_fragment_above_the_runs_message_limit_is_named():
    tensors = (TensorInfo("a", (2**18,)), TensorInfo("b", (2**18 + 1,)))
    coder = Coder.of(tensors, "none")
    assert coder.too_large([["a"], ["b"]], 2) == ""
    assert "fragment 1 has 1 MiB, the run's max_message_mib is 1" in coder.too_large(
        [["a"], ["b"]], 1
    )


def test_a_channel_takes_whatever_the_model_can_need(monkeypatch):
    made = []
    monkeypatch.setattr(rendezvous, "lookup", lambda address, timeout_s, silence_s: address)
    monkeypatch.setattr(
        learner_channel,
        "LearnerChannel",
        lambda found, max_message_bytes, **_: made.append(max_message_bytes),
    )
    dialer(ADDRESS, (TensorInfo("a", (2**20, 2**10)), TensorInfo("b", (2**30,))))()
    assert made == [8 * 2**31]  # not what this version's default setting says


def test_a_learner_reads_theta_and_refuses_what_is_damaged():
    values, _ = placed()
    coder = Coder.of(values.infos, "none")
    theta = values.read_whole(0)
    encoded = encode_values(theta)
    decoded = coder.decode(encoded.payload, encoded.data)
    assert all(torch.equal(decoded[name], theta[name]) for name in theta)
    with pytest.raises(ValueError, match="bytes instead of"):
        coder.decode(encoded.payload, encoded.data[:-4])
    damaged = bytearray(encoded.data)
    damaged[0] ^= 1
    with pytest.raises(ValueError, match="checksum"):
        coder.decode(encoded.payload, memoryview(damaged))
    other = encode_values({"elsewhere": torch.zeros(1)})
    with pytest.raises(ValueError, match="elsewhere"):
        coder.decode(other.payload, other.data)


# --------------------------------------------------------------------- strategy and address


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("DD_SYNCER", "DD_LEARNER", "DD_KEY", "DD_VIA"):
        monkeypatch.delenv(name, raising=False)


def test_the_identity_comes_from_arguments_then_the_environment(monkeypatch):
    with pytest.raises(ValueError, match="DD_SYNCER"):
        identify(None, None, None)
    monkeypatch.setenv("DD_SYNCER", "tcp://[::1]:29400")
    monkeypatch.setenv("DD_LEARNER", "3")
    monkeypatch.setenv("DD_VIA", "127.0.1.3")
    identity = identify(None, None, None)
    assert dataclasses.astuple(identity) == ("tcp://[::1]:29400", "3", "127.0.1.3", "")
    identity = identify(ADDRESS, 5, None)
    assert (identity.syncer, identity.learner) == (ADDRESS, "5")


@pytest.mark.parametrize("address", ["127.0.0.1:29400", "tcp://host", "tcp://host:0", "http://h:1"])
def test_a_wrong_address_is_refused(address):
    with pytest.raises(ValueError, match="tcp://HOST:PORT"):
        DecoupledDiLoCoStrategy(address)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"data": "both"}, "seed | shard | none"),
        ({"connect_timeout": 0}, "connect_timeout"),
        ({"key": "/nonexistent"}, "the file /nonexistent cannot be read"),
        ({"learner": ""}, "1 to 200 printable"),
        ({"learner": "a\nb"}, "1 to 200 printable"),
        ({"inner": "zero"}, "fsdp2 | single_device"),
        ({"inner": FSDPStrategy}, "inner is "),
    ],
)
def test_wrong_options_are_refused(options, said):
    with pytest.raises(ValueError, match=said.replace("|", r"\|")):
        DecoupledDiLoCoStrategy(ADDRESS, **options)


def test_more_than_one_device_is_ddp_with_the_options_given():
    options = {"find_unused_parameters": True, "start_method": "spawn"}
    for inner, launcher in (
        ("auto", _SubprocessScriptLauncher),
        (DDPStrategy(**options), _MultiProcessingLauncher),
    ):
        strategy = DecoupledDiLoCoStrategy(ADDRESS, inner=inner)
        trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
        assert trainer.strategy is strategy and strategy.inner_name == "DDPStrategy"
        assert isinstance(strategy.launcher, launcher)
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}


@pytest.mark.parametrize("inner", ["auto", "ddp", "single_device"])
def test_the_strategy_is_the_inner_one_extended(inner):
    strategy = DecoupledDiLoCoStrategy(ADDRESS, inner=inner)
    base = SingleDeviceStrategy if inner == "single_device" else DDPStrategy
    assert isinstance(strategy, DecoupledDiLoCoStrategy) and isinstance(strategy, base)
    assert strategy.inner_name == "SingleDeviceStrategy"
    again = pickle.loads(pickle.dumps(strategy))
    assert type(again) is type(strategy) and again.identity == strategy.identity


def test_options_of_the_users_strategy_are_kept_and_its_object_is_left_alone():
    inner = SingleDeviceStrategy(device="meta")
    strategy = DecoupledDiLoCoStrategy(ADDRESS, inner=inner)
    assert strategy.root_device == torch.device("meta")
    assert type(inner) is SingleDeviceStrategy and not hasattr(inner, "identity")


# ---------------------------------------------------------------------------- comm thread


def test_the_comm_thread_backs_off_between_attempts_and_ends_when_told():
    attempts, enough = [], threading.Event()

    def dial():
        attempts.append(1)
        if len(attempts) >= 3:
            enough.set()
        raise ConnectionRefusedError("closed")

    link = LearnerLink(Join(learner="0", incarnation="a", number=0), now=0.0)
    comm = CommThread(link, dial, (), clock=lambda: clock["now"])
    clock = {"now": 0.0}
    comm.start()
    while not enough.is_set():
        clock["now"] += 0.5
        comm.call(lambda: None)  # wakes it: time has passed
        enough.wait(0.01)
    assert comm.next(0.0) is None
    assert comm.stop(5.0)
    assert link.attempts >= 2 and "closed" in link.last_error


def test_the_training_thread_never_waits_for_a_channel_that_is_being_closed():
    closing, may_close = threading.Event(), threading.Event()

    class Slow:
        def poll(self, timeout_s):
            return [SimpleNamespace(message=None, reason="reset")]  # the channel's disconnect

        def send(self, message, payload=None):
            return True

        def can_upload(self):
            return False

        def wake(self):
            pass

        def close(self):
            closing.set()
            assert may_close.wait(60.0)

    link = LearnerLink(Join(learner="0", incarnation="a", number=0), now=0.0)
    comm = CommThread(link, Slow, ())
    comm.start()
    try:
        assert closing.wait(60.0)
        calls = threading.Thread(target=comm.call, args=(lambda: None,), daemon=True)
        calls.start()
        calls.join(20.0)
        assert not calls.is_alive() and not may_close.is_set()
    finally:
        may_close.set()
    assert comm.stop(20.0)
