"""The run's totals are made once per merge, however often they are asked for."""

import pytest

from dd_lightning.protocol import run_state
from dd_lightning.protocol.accounts import Account
from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.protocol.layout import build_layout
from dd_lightning.protocol.messages import TensorInfo
from dd_lightning.protocol.run_state import RunState

pytestmark = pytest.mark.unit


def test_tokens_merged_are_added_up_once_per_merge(monkeypatch):
    sums = []
    real = run_state.element_weighted
    monkeypatch.setattr(run_state, "element_weighted", lambda *args: sums.append(1) or real(*args))
    config = SyncerConfig.load({"algorithm": {"fragments": 2}, "learners": 1})
    run = RunState(config, "r", 1)
    run.set_layout(build_layout([TensorInfo("a", (3,)), TensorInfo("b", (1,))], config.algorithm))
    account = run.accounts["life"] = Account("0", "life", 2)
    assert run.tokens_merged == run.tokens_merged == 0.0
    account.merge(0, (1, 1), 8, 8, lambda *loss: None)
    run.merges += 1
    assert run.tokens_merged == run.tokens_merged == 6.0
    assert len(sums) == 2
