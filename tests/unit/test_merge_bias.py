"""How far unequal learners move a merge: known means and noise, tapes, table and figure."""

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from dd_lightning.algorithm import Average
from dd_lightning.launch.settings import check
from dd_lightning.launch.task import build_data, build_module
from dd_lightning.report.bias import BiasRow, bias_table, draw_bias
from dd_lightning.simulate.gradient_draws import draw_gradients
from dd_lightning.simulate.merge_bias import (
    Moments,
    Part,
    compare,
    merge_drawn,
    merges_on,
    share_of,
)

pytestmark = pytest.mark.unit

EVERYONE = (Part("0", 1, 1.0), Part("1", 1, 1.0))
ALONE = (Part("0", 1, 1.0),)


@pytest.fixture
def vision_values(tmp_path_factory):
    """Of two learners on digits."""
    cache = tmp_path_factory.getbasetemp() / "bias-data"
    overrides = ["task=vision", "learners=2", f"task.data.cache_dir={cache}"]
    with initialize_config_module("dd_lightning.conf", version_base="1.3"):
        config = compose("config", overrides)
    values = check(OmegaConf.to_container(config, resolve=True)).values
    build_data(values).prepare_data()
    return values


def moments(merges, draws):
    """Of merges by the average, over draws of `{learner: [gradient after 1, 2, ... steps]}`."""
    found = Moments()
    for draw in draws:
        own = {who: [{"w": torch.tensor(one)} for one in steps] for who, steps in draw.items()}
        found.add([merge_drawn(merge, own, Average(), frozenset()) for merge in merges])
    return found


def test_a_learner_left_out_turns_and_lengthens_the_mean():
    draws = [{"0": [[2.0, 0.0]], "1": [[0.0, 2.0]]}] * 3
    both, one = moments([EVERYONE], draws), moments([ALONE], draws)
    moved = compare([one], [both])
    assert moved.length == pytest.approx(2**0.5) and moved.cosine == pytest.approx(0.5**0.5)
    assert moved.bias == pytest.approx(1.0) and moved.spread == pytest.approx(0.0, abs=1e-6)
    same = compare([both], [both])
    assert (same.length, same.bias) == (1.0, 0.0) and same.cosine == pytest.approx(1.0)


def test_who_is_in_a_merge_by_chance_is_spread_and_no_bias():
    draws = [{"0": [[2.0, 0.0]], "1": [[0.0, 2.0]]}] * 3
    either = moments([ALONE, (Part("1", 1, 1.0),)], draws)
    moved = compare([either], [moments([EVERYONE], draws)])
    assert moved.bias == pytest.approx(0.0, abs=1e-6) and moved.spread == pytest.approx(1.0)


def test_noise_of_gradients_is_no_bias_however_few_draws_there_are():
    """[means compared within a draw: noise of 4 lengths over 8 draws would read as a bias of 1]"""
    generator = torch.Generator().manual_seed(0)
    size = 20_000

    def gradient():
        return (1 + 4 * torch.randn(size, generator=generator)).tolist()

    draws = [{"0": [gradient()], "1": [gradient()]} for _ in range(8)]
    moved = compare([moments([ALONE], draws)], [moments([EVERYONE], draws)])
    assert moved.bias < 0.15
    assert moved.spread == pytest.approx(4.0, rel=0.05) and moved.length == pytest.approx(
        1, abs=0.1
    )


def test_a_reference_lost_in_noise_is_refused():
    draws = [{"0": [[1.0]]}, {"0": [[-1.0]]}]
    with pytest.raises(ValueError, match="draw more"):
        compare([moments([ALONE], draws)], [moments([ALONE], draws)])


def test_a_contribution_takes_the_gradient_after_its_own_steps():
    own = {"0": [{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}]}
    for steps, value in ((1, 1.0), (2, 3.0)):
        assert merge_drawn((Part("0", steps, 1.0),), own, Average(), frozenset()) == value


def test_merges_of_a_tape_without_last_rounds_and_weightless_contributions():
    def contribution(round_, learner, weight, verdict="accepted"):
        row = {"event": "contribution", "epoch": 1, "round": round_, "learner": learner}
        return row | {"steps": 12, "weight": weight, "verdict": verdict}

    def merge(round_, *contributors, last=False):
        row = {"event": "merge", "epoch": 1, "round": round_, "contributors": list(contributors)}
        return row | {"reanchor": False, "last": last}

    tape = [
        *(contribution(1, "0", 5.0), contribution(1, "1", 0.0), merge(1, "0", "1")),
        *(contribution(2, "0", 6.0), contribution(2, "1", 2.0), merge(2, "0", "1")),
        *(contribution(2, "2", 0.0, "late"), contribution(3, "0", 6.0), merge(3, "0", last=True)),
    ]
    assert merges_on(tape) == [
        (Part("0", 12, 5.0),),
        (Part("0", 12, 6.0), Part("1", 12, 2.0)),
    ]
    assert merges_on(tape, skip=2) == []
    assert share_of(merges_on(tape), "1") == pytest.approx(0.125)


def test_every_draw_begins_at_theta_again(vision_values):
    lr = vision_values["task"]["module"]["optimizer"]["lr"]
    module = build_module(vision_values)
    theta = {name: one.detach().clone() for name, one in module.named_parameters()}
    draws = draw_gradients(vision_values, theta, 1, draws=2, most=5)
    assert [len(draw) for draw in draws] == [5, 5] and set(draws[0][0]) == set(theta)
    for draw in draws:
        lengths = [sum(float(one.square().sum()) for one in g.values()) ** 0.5 for g in draw]
        assert lengths == sorted(lengths)
        # one step of Adam, with the weight decay of a matrix [without Θ put back: six and more]
        assert max(float(one.abs().max()) for one in draw[0].values()) < 3 * lr
    assert any(not torch.equal(draws[0][0][name], draws[1][0][name]) for name in theta)


def test_table_and_figure(tmp_path):
    rows = [
        BiasRow(rule, condition, 0.25, 1.0, 0.98, 0.1, 0.5, (0.01, 0.03), (-0.01, 0.0))
        for rule in ("tokens", "uniform")
        for condition in ("equal", "slow")
    ]
    table = bias_table(rows).splitlines()
    assert len(table) == 2 + len(rows)
    assert table[-1].startswith("| uniform | slow | 25.0 | 1.00 | 0.980 | 0.10 | 0.50 |")
    assert "+0.020 ± 0.014" in table[-1]
    file = draw_bias(rows, tmp_path / "bias.png")
    assert file.stat().st_size > 10_000 and file.with_suffix(".svg").exists()
