"""`estimate`: by hand on round numbers, against a measured run, and what it refuses."""

from __future__ import annotations

import json

import pytest

from dd_lightning.cli import main
from dd_lightning.network.profiles import WanProfile
from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.simulate.estimate import estimate
from dd_lightning.simulate.estimate_links import (
    HEADER_BYTES_DOWN,
    HEADER_BYTES_UP,
    REPORT_BYTES,
    slow_start_s,
)

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
    assert learner.transfer_up_s == pytest.approx(0.1, rel=0.01)
    assert learner.rho_s == pytest.approx(1.1, rel=0.01)
    assert found.effective_h == pytest.approx(10.0)
    assert learner.bytes_up_per_step == 100_000 + HEADER_BYTES_UP + REPORT_BYTES
    assert learner.bytes_down_per_step == 100_000 + HEADER_BYTES_DOWN
    assert learner.latency_steps == pytest.approx(0.9 + 1.0 + 0.2, rel=0.01)
    assert found.bytes_per_hour == pytest.approx(found.bytes_per_step * 3600)
    assert found.egress_per_day == pytest.approx(100_320 * 86400)


def test_a_run_of_so_many_steps_has_a_start_and_an_end():
    endless, run = (estimate(250_000, config(), network(), 1.0, steps) for steps in (None, 100))
    assert endless.effective_h == endless.steady_h == run.steady_h == 10.0
    # ten merges of each fragment and a last one; Θ comes once more, handed in by the first learner
    assert run.effective_h == pytest.approx(100 / 11)
    assert run.learners[0].bytes_down_per_step == pytest.approx(1.2 * 100_320)
    up = 1.1 * (100_000 + HEADER_BYTES_UP) + REPORT_BYTES + 0.1 * 100_000
    assert run.learners[0].bytes_up_per_step == pytest.approx(up)


def test_a_flow_that_was_idle_starts_slowly():
    # a window of ten segments; 100 kB take 1 + 2 + 4 of them: two round trips more
    link = network(tcp="cubic", mbit_s=1000.0, window_mib=24).link("there")
    assert slow_start_s(link, 100_000) == pytest.approx(2.0)
    assert slow_start_s(link, 14_000) == 0.0


def test_the_slower_the_link_the_rarer_the_rounds():
    hs = [estimate(250_000, config(), network(mbit_s=rate * MEGABYTE_A_SECOND), 1.0).effective_h
          for rate in (1, 0.1, 0.05, 0.025)]  # fmt: skip
    assert hs == sorted(hs) and hs[0] == 10.0
    # 100 kB at 50 and 25 kB/s take 2 and 4 s: a round every so many steps of a second, ten a cycle
    assert hs[2:] == pytest.approx([20.0, 40.0], rel=0.03)


def test_learners_of_one_region_share_its_pipe():
    one, four = (estimate(250_000, config(m), network(), 1.0).learners[0] for m in (1, 4))
    assert four.transfer_up_s == pytest.approx(4 * one.transfer_up_s)


def test_bf16_halves_what_goes_up_and_nothing_else():
    raw, half = (estimate(250_000, config(codec=c), network(), 1.0).learners[0]
                 for c in ("none", "bf16"))  # fmt: skip
    assert raw.bytes_up_per_step - half.bytes_up_per_step == pytest.approx(50_000)
    assert half.bytes_down_per_step == raw.bytes_down_per_step


def test_a_slow_link_binds_and_the_advice_says_what_would_help():
    found = estimate(25_000_000, config(), network(), 1.0)
    assert found.binding == "link"
    assert any("codec=bf16" in sentence for sentence in found.advice)
    assert any("apply=rebase" in sentence for sentence in found.advice)


def test_a_machine_with_too_little_memory_binds():
    local = WanProfile.from_config({"name": "none", "regions": ["local"], "syncer_region": "local"})
    found = estimate(10**9, config(), local, 100.0, memory=10e9)
    assert found.binding == "syncer memory" and found.syncer_memory_share > 1
    assert any("--memory-gb" in sentence for sentence in found.advice)


def test_a_fragment_that_arrives_after_the_next_merge_is_stale():
    near, far = (estimate(250_000, config(), network(rtt_ms=rtt), 1.0).learners[0]
                 for rtt in (1000.0, 25_000.0))  # fmt: skip
    assert near.staleness == 0 and far.staleness == 1  # 26.1 steps, a merge every 25


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
    [
        (["--parameters", "0"], "--parameters is 0"),
        (["--parameters", "nan"], "--parameters is nan; allowed"),
        (["algorithm=data_parallel", "mode=simulate"], "algorithm is 'data_parallel'; allowed"),
        (["--chips", "0"], "chips is 0; allowed:"),
        (["--memory-gb", "0"], "--memory-gb is 0"),
        (["--steps", "0"], "--steps is 0"),
        (["--step", "1"], "ambiguous option"),
        (["--peers", "1"], "unrecognized arguments"),
    ],
)
def test_nought_is_refused_and_not_taken_for_nothing_given(arguments, said, capsys):
    assert main(["estimate", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_an_unknown_network_is_one_line(capsys):
    assert main(["estimate", "network=nowhere"]) == 2
    assert "network is 'nowhere'; allowed: " in capsys.readouterr().err


def test_a_failure_rate_without_a_fleet_has_no_effect_and_says_so(capsys):
    assert main(["estimate", "--parameters", "1e6", "--mtbi-years", "3"]) == 0
    assert capsys.readouterr().err == "warning: --mtbi-years: no effect without --chips.\n"
