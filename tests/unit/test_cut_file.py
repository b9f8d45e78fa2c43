"""A checkpoint taken apart: what is large is left for the background, and comes back whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from dd_lightning.learner.cut_file import TakenApart, cut_path, put_together, write_whole
from dd_lightning.learner.state_copy import BackgroundCopy

pytestmark = pytest.mark.unit


def test_the_training_thread_copies_what_is_small_only(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(50, 60), nn.BatchNorm1d(60))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(4, 50)).sum().backward()
    optimizer.step()
    checkpoint = {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    parts = TakenApart.of(checkpoint, module, [optimizer])
    buffers = sum(buffer.nbytes for buffer in module.buffers())
    assert parts.copied_bytes == buffers
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    whole = sum(parameter.nbytes for parameter in module.parameters()) + state
    assert sum(tensor.nbytes for tensor in parts.later.values()) == whole
    module[1].running_mean.add_(1.0)  # forward goes on
    tree = put_together(parts.tree, BackgroundCopy(parts.later).start().finish())
    write_whole(tree, tmp_path / "cuts" / "c1.ckpt")
    loaded = torch.load(tmp_path / "cuts" / "c1.ckpt", weights_only=True)
    for name, tensor in module.state_dict().items():
        same = torch.equal(loaded["state_dict"][name], tensor)
        assert same != name.endswith("running_mean"), name
    again = torch.optim.AdamW(module.parameters())
    again.load_state_dict(loaded["optimizer_states"][0])
    assert [path.name for path in (tmp_path / "cuts").iterdir()] == ["c1.ckpt"]


def test_learners_that_share_a_root_do_not_share_a_file() -> None:
    assert cut_path(Path("/r/learners/3"), "3", "c1") == Path("/r/learners/3/cuts/c1.ckpt")
    assert cut_path(Path("/r"), "3", "c1") == Path("/r/cuts/3/c1.ckpt")
