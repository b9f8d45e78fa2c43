"""Strategies of a user's own inside learners: what they override runs; the result is the same."""

import threading

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from dd_lightning import DecoupledDiLoCoStrategy
from dd_lightning.protocol.config import SyncerConfig
from tests.foreign_strategy import Foreign
from tests.socket_run import run_over_sockets
from tests.trainers import (
    WAIT_S,
    Regression,
    StartTogether,
    fit_plain,
    loader,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
]

STEPS, SCHEDULED = 8, 3  # rounds, one every two steps, before the one that is the end


class OwnDevice(SingleDeviceStrategy):
    """A user's, which counts what Lightning asks of it."""

    def __init__(self):
        super().__init__(device=torch.device("cpu"))
        self.setups, self.steps = 0, 0

    def setup(self, trainer):
        self.setups += 1
        super().setup(trainer)

    def optimizer_step(self, *args, **kwargs):
        self.steps += 1
        return super().optimizer_step(*args, **kwargs)


def trained(folder, inners):
    """The strategies, and Θ's digests before the end, of one synchronous run of two learners."""
    config = SyncerConfig.load(
        {
            "algorithm": {"preset": "diloco", "fragments": 2, "sync_every": 4, "overlap": 1},
            "learners": 2,
            "max_steps": STEPS,
        }
    )
    together, found = threading.Barrier(2), {}

    def learner(index, inner):
        def fit(address):
            module = Regression(seed=3)
            strategy = DecoupledDiLoCoStrategy(address, str(index), inner, data="none")
            fit_plain(module, loader(seed=index), STEPS, strategy, [StartTogether(together)])
            found[index] = strategy

        return fit

    tape = run_over_sockets(folder, config, *(learner(*one) for one in enumerate(inners)))
    digests = [event["digest"] for event in tape if event["event"] == "merge"]
    return found, digests[:SCHEDULED]


@pytest.mark.timeout(3 * WAIT_S)
def test_a_users_own_and_an_unknown_strategy_train_as_lightnings_do(tmp_path):
    _, expected = trained(tmp_path / "plain", ["single_device", "single_device"])
    with pytest.warns(UserWarning, match="with which no learner has been tested"):
        own, found = trained(tmp_path / "own", [OwnDevice(), Foreign()])
    assert found == expected and len(set(found)) == SCHEDULED
    assert (own[0].setups, own[0].steps) == (1, STEPS)
    assert [own[index].inner_name for index in range(2)] == ["OwnDevice", "Foreign"]


def test_an_unknown_strategy_that_keeps_parameters_to_itself_is_refused():
    class Keeps(Foreign):
        world_size = 2

    for inner, said in (
        (Foreign(), "parameter net.0.weight without"),
        (Keeps(), "no process group"),
    ):
        module = Regression()
        module.net[0].weight = torch.nn.Parameter(torch.empty(5, 3, device="meta"))
        with pytest.warns(UserWarning, match="no learner has been tested"):
            strategy = DecoupledDiLoCoStrategy("tcp://127.0.0.1:1", "0", inner)
        strategy.model_to_device = strategy._join  # nothing to move, nor back
        strategy.teardown = bool
        with pytest.raises(ValueError, match=said):
            fit_plain(module, loader(), 1, strategy)
