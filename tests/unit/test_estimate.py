"""`estimate`: by hand on round numbers, against a measured run, and what it refuses."""

from __future__ import annotations

import json

import pytest

from dd_lightning.cli import main
from dd_lightning.network.profiles import WanProfile
from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.simulate.estimate import estimate

pytestmark = pytest.mark.unit

MEGABYTE_A_SECOND = 8 * 1500 / 1448  # Mbit/s, with what packets add
LINK = {"rtt_ms": 1000.0, "mbit_s": MEGABYTE_A_SECOND, "tcp": "none"}


def network(**link) -> WanProfile:
    return WanProfile.from_config(
        {
            "name": "test",
            "regions": ["here", "there"],
            "syncer_region": "here",
            "learner_regions": ["there"],
            "links": {"there-here": LINK | link},
        }
    )


def config(learners: int = 1, **algorithm) -> SyncerConfig:
    settings = {"fragments": 10, "sync_every": 10, "grace_rule": "none"} | algorithm
    return SyncerConfig.load({"learners": learners, "algorithm": settings})


def test_a_learner_by_hand():
    # ten fragments of 100 kB; a step takes a second
    found = estimate(250_000, config(), network(), 1.0)
    (learner,) = found.learners
    assert learner.transfer_up_s == pytest.approx(0.1)
    assert learner.rho_s == pytest.approx(1.1)
    assert found.effective_h == pytest.approx(10.0)
    assert learner.bytes_up_per_step == learner.bytes_down_per_step == pytest.approx(100_000)
    assert learner.latency_steps == pytest.approx(0.9 + 1.0 + 0.2)
    assert found.bytes_per_hour == pytest.approx(200_000 * 3600)
    assert found.egress_per_day == pytest.approx(100_000 * 86400)


def test_the_slower_the_link_the_rarer_the_rounds():
    hs = [estimate(250_000, config(), network(mbit_s=rate * MEGABYTE_A_SECOND), 1.0).effective_h
          for rate in (1, 0.1, 0.05, 0.025)]  # fmt: skip
    assert hs == sorted(hs) and hs[0] == 10.0
    # 100 kB at 50 and 25 kB/s take 2 and 4 s: a round every so many steps of a second, ten a cycle
    assert hs[2:] == pytest.approx([20.0, 40.0])


def test_learners_of_one_region_share_its_pipe():
    one, four = (estimate(250_000, config(m), network(), 1.0).learners[0] for m in (1, 4))
    assert four.transfer_up_s == pytest.approx(4 * one.transfer_up_s)


def test_bf16_halves_what_goes_up_and_nothing_else():
    raw, half = (estimate(250_000, config(codec=c), network(), 1.0).learners[0]
                 for c in ("none", "bf16"))  # fmt: skip
    assert half.bytes_up_per_step == raw.bytes_up_per_step / 2
    assert half.bytes_down_per_step == raw.bytes_down_per_step


def test_a_slow_link_binds_and_the_advice_says_what_would_help():
    found = estimate(25_000_000, config(), network(), 1.0)
    assert found.binding == "link"
    assert any("codec=bf16" in sentence for sentence in found.advice)
    assert any("apply=rebase" in sentence for sentence in found.advice)


def test_without_a_network_nothing_is_far():
    local = WanProfile.from_config({"name": "none", "regions": ["local"], "syncer_region": "local"})
    (learner,) = estimate(250_000, config(), local, 1.0).learners
    assert learner.rho_s == 0 and learner.overwrite_cost == pytest.approx(0.09)


@pytest.mark.parametrize(("parameters", "step_s"), [(0, 1.0), (10, 0.0), (10, float("nan"))])
def test_nonsense_is_refused_by_name(parameters, step_s):
    with pytest.raises(ValueError, match=r"--(parameters|step-s) is"):
        estimate(parameters, config(), network(), step_s)


def test_the_demo_as_it_was_measured(capsys):
    # `experiment=demo`, seed 1: steps of 95.5 ms, 164.4 MB in 500 steps, effective H 22.9, rho of
    # Ireland and Tokyo 74 and 150 ms (the lowest recent)
    assert main(["estimate", "experiment=demo", "--step-s", "0.0955", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes_per_step"] * 500 == pytest.approx(164.4e6, rel=0.1)
    assert found["effective_h"] == pytest.approx(22.9, rel=0.1)
    assert found["learners"][1]["rho_s"] == pytest.approx(0.0736, rel=0.15)
    assert found["learners"][2]["rho_s"] == pytest.approx(0.1497, rel=0.15)


def test_the_table_names_what_binds(capsys):
    arguments = ["--parameters", "1e9", "network=three_continents", "learners=3", "--chips", "3000"]
    assert main(["estimate", *arguments]) == 0
    said = capsys.readouterr().out
    assert "binding: link" in said and "cannot take part in every round" in said
    assert "goodput under failures: 99" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--parameters", "0"], "--parameters is 0"), (["--chips", "0"], "chips is 0; allowed:")],
)
def test_nought_is_refused_and_not_taken_for_nothing_given(arguments, said, capsys):
    assert main(["estimate", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_an_unknown_network_is_one_line(capsys):
    assert main(["estimate", "network=nowhere"]) == 2
    assert "network is 'nowhere'; allowed: " in capsys.readouterr().err
