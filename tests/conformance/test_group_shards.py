"""State that lies in shards on ranks: an inner optimizer's, given and taken entry by entry, and a
cut's, written by every rank at once; both bit for bit.
"""

import os
import socket
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from dd_lightning.learner import flat_shards
from dd_lightning.learner.cut_file import TakenApart, put_together
from dd_lightning.learner.cut_shards import ShardFiles
from dd_lightning.learner.distributed_files import has_every_part, load_in_one
from dd_lightning.learner.group import Group
from dd_lightning.learner.group_inner import GroupInnerState
from dd_lightning.learner.inner_state import InnerState, raw_bytes
from dd_lightning.learner.state_copy import BackgroundCopy, StateCopies
from dd_lightning.protocol.transfer import TransferError

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
WAIT = timedelta(seconds=60)


class NoStop:
    told = False


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))  # 1 row on two ranks


def train(module, optimizer):
    for step in range(3):
        optimizer.zero_grad()
        module(torch.full((2, 3), 1.0 + step)).square().sum().backward()
        optimizer.step()


def learner(kind, group):
    """(module, optimizer) of a rank, without state."""
    module = net()
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (group.size,))
        fully_shard(module[0], mesh=mesh)
        fully_shard(module, mesh=mesh)
    elif kind == "fsdp":
        device = torch.device("cpu")
        module = FullyShardedDataParallel(module, use_orig_params=True, device_id=device)
        flat_shards.mark(module, group)
    return module, torch.optim.AdamW(module.parameters(), lr=0.1)


def given(state, group):
    """What rank 0 gets of a copy, which does not change while the optimizer goes on."""
    copies, found = StateCopies(), {}
    if group.leads:
        with group.section(lambda: (0, 0)):
            entries = state.copy_slices(copies)
    else:
        group.follow(lambda order: state.follow(order, copies))
    copies.settle()
    for optimizer in state._optimizers:
        for values in optimizer.state.values():
            values["exp_avg"].add_(1.0)
    if not group.leads:
        group.follow(lambda order: state.follow(order, copies))
        return {}
    with group.section(lambda: (0, 0)):
        for entry in entries:
            found[entry] = bytes(state.whole(entry))
        state.forget()
    return found


def take(state, group, entries):
    """From rank 0 to every rank, after a transfer that came to nothing."""
    if not group.leads:
        group.follow(lambda order: state.follow(order, StateCopies()))
        return
    with group.section(lambda: (0, 0)):
        state.begin()
        entry, data = next(iter(entries.items()))
        state.stage(entry, bytearray(data))
        with pytest.raises(TransferError, match="not finite"):
            state.stage(entry, bytearray(b"\xff" * len(data)))
        state.begin()
        for entry, data in entries.items():
            state.stage(entry, bytearray(data))
        assert not any(optimizer.state for optimizer in state._optimizers)  # whole or not at all
        state.commit()


def written_in_slices(group, folder):
    """A copy of every rank's slices, written beside a step that changes them."""
    module, optimizer = learner("fsdp2", group)
    train(module, optimizer)
    states = {
        "state_dict": get_model_state_dict(module),
        "optimizer_states": [get_optimizer_state_dict(module, optimizer)],
        "epoch": 3,
    }
    expected = {name: value.full_tensor() for name, value in states["state_dict"].items()}
    moments = [state["exp_avg"].full_tensor() for state in optimizer.state.values()]
    parts = TakenApart.of(states, module, [optimizer])
    assert parts.copied_bytes == 0  # in the training thread
    copies = BackgroundCopy(parts.later).start().finish()
    train(module, optimizer)
    files = ShardFiles(group, nullcontext)
    files._own = group.another()
    files.write(put_together(parts.tree, copies), folder / "c1.ckpt")
    dist.barrier()
    assert has_every_part(folder / "c1.ckpt")
    read = load_in_one(folder / "c1.ckpt", True)
    assert read["epoch"] == 3
    for name, value in expected.items():
        assert torch.equal(read["state_dict"][name], value)
    (found,) = read["optimizer_states"]
    for number, value in enumerate(moments):
        assert torch.equal(found["state"][number]["exp_avg"], value)
    plain = net()
    again = torch.optim.AdamW(plain.parameters())
    again.load_state_dict(found)
    assert len(again.state) == len(moments)


def rank(number, port, folder):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=number, world_size=2, timeout=WAIT)
    group = Group(WAIT, NoStop())
    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    train(plain, optimizer)
    single = InnerState(plain, [optimizer])
    expected = {entry: bytes(raw_bytes(value)) for entry, value in single.entries().items()}
    for kind in ("fsdp2", "fsdp", "ddp"):
        module, optimizer = learner(kind, group)
        state = GroupInnerState(module, [optimizer], group)
        assert state.description == single.description != ""
        assert state.in_shards == (kind != "ddp")
        take(state, group, expected)
        if kind == "fsdp2":
            whole = {p: v["exp_avg_sq"].full_tensor() for p, v in optimizer.state.items()}
            for parameter, (_, own) in zip(module.parameters(), single._optimizers[0].state.items(),
                                           strict=True):  # fmt: skip
                assert torch.equal(whole[parameter], own["exp_avg_sq"])
        found = given(state, group)
        assert found == (expected if number == 0 else {})
        train(module, optimizer)  # it goes on
    written_in_slices(group, folder)
    dist.destroy_process_group()


def test_state_goes_through_shards_bit_for_bit(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank, (port, tmp_path), 2)
