"""A rank of a group whose module FSDP1 has: `python -m tests.conformance.flat_job RANK STORE`.

One process group for many checks, each against the same module in one piece.
"""

import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from dd_lightning.learner.group import Group
from dd_lightning.learner.group_values import GroupValues
from dd_lightning.learner.inner_fsdp import clip_by_norm
from dd_lightning.learner.snapshots import ModelValues
from tests.conformance.live_bytes import LiveBytes

RANKS = 2
IDS = torch.arange(7)
MIB = 2**20


class Net(nn.Module):
    """Tied weights, a frozen bias, buffers, an odd number of elements."""

    def __init__(self, width=5):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 3)
        self.body = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
        self.body[0].bias.requires_grad_(False)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)))


class Never:
    """Nobody is told to stop."""

    told = False


def wrapped(module, units=(nn.Sequential,), **options):
    policy = ModuleWrapPolicy(set(units))
    cpu = torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: frozen beside trained, NO_SHARD
        return FSDP(module, auto_wrap_policy=policy, device_id=cpu, **options)


def in_section(group, values, act):
    """Rank 0 acts, the others follow."""
    if not group.leads:
        group.follow(values.follow)
        return
    with group.section(lambda: (0, 0)):
        act()


def reads_and_writes_as_in_one_piece(group, **options):
    plain, module = Net(), Net()
    root = wrapped(module, use_orig_params=True, **options)
    expected, values = ModelValues(plain), GroupValues(module, group, root)
    assert values.infos == expected.infos  # names, shapes, kinds: the fingerprint
    names = [info.name for info in values.infos]
    fragments = [names[::2], names[1::2]]  # every unit lies in both
    for one in (expected, values):
        one.place(fragments)
    generator = torch.Generator().manual_seed(group.size)

    for passes in ([], [True], [False], [False, True, False]):  # with gradients, or not
        new = {i.name: torch.rand(i.shape, generator=generator) for i in values.infos}

        def swap(new=new):
            for fragment in range(2):
                for name, tensor in values.read_whole(fragment).items():
                    assert torch.equal(tensor, expected.read_whole(fragment)[name]), name
                values.write(fragment, new)

        in_section(group, values, swap)
        expected.write(0, new)
        expected.write(1, new)
        for with_grad in [True, *passes]:  # what a pass leaves whole must not outlive a write
            with torch.set_grad_enabled(with_grad):
                assert torch.equal(root(IDS), plain(IDS))


def clips_as_in_one_piece(group):
    plain, module = Net(), Net()
    root = wrapped(module, use_orig_params=True)
    for one in (plain, root):
        one(IDS).square().sum().backward()
    trained = [p for p in plain.parameters() if p.requires_grad]
    nn.utils.clip_grad_norm_(trained, 0.5)
    clip_by_norm(root, torch.optim.SGD(root.parameters(), lr=1.0), 0.5)
    with FSDP.summon_full_params(root, with_grads=True):
        for ours, its in zip(module.parameters(), plain.parameters(), strict=True):
            if its.requires_grad:
                torch.testing.assert_close(ours.grad, its.grad)
    with pytest.raises(ValueError, match="one optimizer of every trainable"):
        clip_by_norm(root, torch.optim.SGD([module.head.weight], lr=1.0), 0.5)


def holds_no_more_than_a_fragment_in_full(group):
    module = Net(width=200_000)
    root = wrapped(module, use_orig_params=True)  # the body is one unit of 8.8 MB
    values = GroupValues(module, group, root)
    names = [info.name for info in values.infos]
    largest = 4 * 3 * 200_000
    values.place([["body.0.weight"], ["body.2.weight"], names])
    new = {"body.0.weight": torch.ones(200_000, 3)} if group.leads else {}
    before = [*module.parameters(), *module.buffers(), *new.values()]
    with LiveBytes(before) as live:
        in_section(group, values, lambda: values.read(0))
    assert live.peak <= (largest + MIB if group.leads else MIB)
    with LiveBytes(before) as live:
        in_section(group, values, lambda: values.write(0, new))
    assert live.peak <= MIB  # what is merged is there already, and goes on in slices


def refuses_what_cannot_be_read(group):
    with pytest.raises(ValueError, match=r"embed\.weight was flattened into an FSDP unit"):
        module = Net()
        GroupValues(module, group, wrapped(module, (nn.Linear,), use_orig_params=True))
    with pytest.raises(ValueError, match="use_orig_params=False"):
        module = nn.Linear(3, 3)
        GroupValues(module, group, wrapped(module, use_orig_params=False))


def main(rank, store):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    group = Group(None, Never())
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        reads_and_writes_as_in_one_piece(
            group, sharding_strategy=getattr(ShardingStrategy, strategy)
        )
    torch.Tensor.pin_memory = torch.Tensor.clone  # which takes a GPU; as it does, another storage
    reads_and_writes_as_in_one_piece(group, cpu_offload=CPUOffload(offload_params=True))
    clips_as_in_one_piece(group)
    holds_no_more_than_a_fragment_in_full(group)
    refuses_what_cannot_be_read(group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
