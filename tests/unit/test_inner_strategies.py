"""Which strategies train inside a learner: known ones, a user's own, unknown ones, refused ones."""

import pickle
from datetime import timedelta

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    SingleDeviceStrategy,
)
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.strategies.xla import XLAStrategy
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from dd_lightning import DecoupledDiLoCoStrategy
from dd_lightning.learner.flat_shards import FlatShard
from tests.foreign_strategy import Foreign

pytestmark = pytest.mark.unit
ADDRESS = "tcp://127.0.0.1:29400"
WAIT = timedelta(seconds=7)


class OwnDevice(SingleDeviceStrategy):
    """A user's."""


class OwnDDP(DDPStrategy):
    """A user's."""


def over(inner, **options):
    return DecoupledDiLoCoStrategy(ADDRESS, learner="0", inner=inner, **options)


@pytest.mark.parametrize(
    ("inner", "name"),
    [
        (OwnDevice(device="meta"), "OwnDevice"),
        (OwnDDP(find_unused_parameters=True), "OwnDDP"),
        ("fsdp_cpu_offload", "FSDPStrategy"),
        ("ddp_fork", "DDPStrategy"),
    ],
)
def test_a_class_of_a_known_family_is_taken_without_a_warning(inner, name):
    strategy = over(inner)  # warnings are errors
    assert isinstance(strategy, DecoupledDiLoCoStrategy)
    assert isinstance(inner, str) or isinstance(strategy, type(inner))
    trained = "SingleDeviceStrategy" if inner == "ddp_fork" else name  # no devices yet
    assert strategy.inner_name == trained


def test_an_unknown_strategy_is_taken_with_a_warning_of_what_must_hold():
    with pytest.warns(UserWarning, match="inner is Foreign, with which no learner has been tested"):
        strategy = over(Foreign())
    assert isinstance(strategy, Foreign) and strategy.inner_name == "Foreign"
    again = pickle.loads(pickle.dumps(strategy))
    assert type(again) is type(strategy) and again.identity == strategy.identity


def test_options_of_fsdp_survive():
    inner = FSDPStrategy(
        sharding_strategy="SHARD_GRAD_OP",
        auto_wrap_policy={nn.Linear},
        cpu_offload=True,
        state_dict_type="sharded",
        timeout=WAIT,
        limit_all_gathers=False,
    )
    strategy = over(inner, data="none")
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
    assert trainer.strategy is strategy and strategy.inner_name == "FSDPStrategy"
    assert strategy.sharding_strategy == ShardingStrategy.SHARD_GRAD_OP
    assert strategy.cpu_offload.offload_params and strategy._state_dict_type == "sharded"
    assert strategy.kwargs == inner.kwargs and not strategy.kwargs["limit_all_gathers"]
    assert strategy._timeout == WAIT and strategy.restore_checkpoint_after_setup


def test_a_users_ddp_keeps_its_own_setup_on_one_device_too():
    inner = OwnDDP(start_method="spawn", static_graph=True)
    strategy = over(inner)
    pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False)
    assert isinstance(strategy.launcher, _MultiProcessingLauncher)
    assert strategy._ddp_kwargs == {"static_graph": True}
    assert type(pickle.loads(pickle.dumps(strategy))) is type(strategy)


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        ("deepspeed_stage_2", "DeepSpeedStrategy, which cannot be a learner"),
        (object.__new__(DeepSpeedStrategy), 'Use inner="fsdp2"'),
        ("xla", "no process group of torch.distributed"),
        (object.__new__(XLAStrategy), "XLAStrategy, which cannot"),
        ("decoupled_diloco", "inner is 'decoupled_diloco'"),
        (FSDPStrategy(use_orig_params=False), "allowed: True"),
    ],
)
def test_what_cannot_be_a_learner_is_refused(inner, said):
    with pytest.raises(ValueError, match=said):
        over(inner)


def test_ours_is_not_put_into_ours():
    with pytest.raises(ValueError, match="inner is a DecoupledDiLoCoStrategy itself"):
        over(over("single_device"))


@pytest.mark.parametrize(
    ("slices", "sources"),
    [
        (((0, 4), (4, 6)), (0, 1)),
        (((0, 0), (0, 6), (0, 0)), (1,)),
        (((0, 4), (4, 6), (0, 4), (4, 6)), (0, 1)),  # two replicas
        (((0, 2), (2, 4), (4, 6)), (0, 1, 2)),
    ],
)
def test_ranks_whose_slices_make_the_whole(slices, sources):
    assert FlatShard((2, 3), (3, 1), slices).sources == sources


def test_slices_that_leave_parts_out_are_refused():
    with pytest.raises(ValueError, match="leave parts out"):
        _ = FlatShard((2, 3), (3, 1), ((0, 2), (3, 6))).sources


def test_elements_lie_as_they_were_flattened():
    whole = torch.arange(6.0).reshape(2, 3)
    turned = FlatShard((2, 3), (1, 2), ((0, 6),))  # as a transposed one was
    assert turned.flat(whole).tolist() == [0, 3, 1, 4, 2, 5]
    assert torch.equal(turned.whole(whole.dtype).copy_(whole), whole)
    straight = FlatShard((2, 3), (3, 1), ((0, 6),))
    assert straight.flat(whole).data_ptr() == whole.data_ptr()
