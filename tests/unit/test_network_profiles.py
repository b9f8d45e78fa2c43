"""Shipped profiles compose and say what they should; wrong ones are refused with their key."""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dd_lightning.network import Link, Outage, WanProfile

pytestmark = pytest.mark.unit

FOLDER = Path(__file__).resolve().parents[2] / "conf" / "network"
NAMES = sorted(file.stem for file in FOLDER.glob("*.yaml"))


def shipped(name: str, *overrides: str) -> WanProfile:
    with initialize_config_dir(str(FOLDER), version_base=None):
        config = OmegaConf.to_container(compose(name, list(overrides)), resolve=True)
    assert isinstance(config, dict)
    return WanProfile.from_config(config)


def config(**changes: Any) -> dict[str, Any]:
    base = {
        "name": "test",
        "regions": ["a", "b"],
        "syncer_region": "b",
        "links": {"a-b": {"rtt_ms": 80, "up_mbit_s": 20, "down_mbit_s": 300}},
    }
    return {**base, **changes}


def test_every_promised_profile_is_there() -> None:
    promised = "none lan us us_eu us_asia three_continents eight_regions cross_cloud home degraded"
    assert set(NAMES) == {*promised.split(), "partitioned"}


@pytest.mark.parametrize("name", NAMES)
def test_shipped_profile_is_whole(name: str) -> None:
    profile = shipped(name)
    assert profile.name == name
    assert profile.needs_proxy == (name != "none")
    if profile.needs_proxy:
        assert profile.source and profile.assumed
        assert len(profile.table()) == len(set(profile.learner_regions))


@pytest.mark.parametrize("name", ["us", "us_eu", "us_asia", "three_continents", "eight_regions"])
def test_syncer_can_be_in_any_region(name: str) -> None:
    for region in shipped(name).regions:
        assert shipped(name, f"syncer_region={region}").link(region).rtt_ms == 0.5


def test_figures_of_three_continents() -> None:
    profile = shipped("three_continents", "syncer_region=ap_northeast")
    assert [profile.region_of(k) for k in range(4)] == [
        *("us_east", "eu_west", "ap_northeast", "us_east")
    ]
    link = profile.link("eu_west")
    assert (link.rtt_ms, link.up_mbit_s, link.down_mbit_s) == (199, 465, 465)


def test_degraded_is_three_continents_with_loss() -> None:
    degraded, whole = shipped("degraded"), shipped("three_continents")
    for region in ("eu_west", "ap_northeast"):
        assert degraded.link(region).loss == 0.01 and whole.link(region).loss == 0
        assert degraded.link(region).rtt_ms == whole.link(region).rtt_ms


def test_eight_regions_has_every_pair_once() -> None:
    profile = shipped("eight_regions")
    assert len(profile.links) == 28
    assert {frozenset(pair) for pair in profile.links} == {
        frozenset((a, b)) for a in profile.regions for b in profile.regions if a != b
    }


def test_link_is_seen_from_the_learner() -> None:
    up = WanProfile.from_config(config(learner_regions=["a"])).link("a")
    assert (up.up_mbit_s, up.down_mbit_s) == (20, 300)
    other = config(syncer_region="a", learner_regions=["b"])
    seen = WanProfile.from_config(other).link("b")
    assert (seen.up_mbit_s, seen.down_mbit_s) == (300, 20)


def test_same_region_is_not_free() -> None:
    profile = WanProfile.from_config(config())
    assert profile.link("b").rtt_ms == 0.5 and profile.link("b").up_mbit_s == 10_000


def test_bandwidth_scale_leaves_the_round_trip() -> None:
    link = WanProfile.from_config(config(bandwidth_scale=0.1)).link("a")
    assert link.up_mbit_s == pytest.approx(2) and link.down_mbit_s == pytest.approx(30)
    assert link.window_mib == pytest.approx(2.4) and link.rtt_ms == 80


def test_default_fills_in_and_the_pair_wins() -> None:
    links = {"default": {"rtt_ms": 10, "mbit_s": 5, "loss": 0.5}, "a-b": {"loss": 0.25}}
    link = WanProfile.from_config(config(links=links)).link("a")
    assert (link.rtt_ms, link.up_mbit_s, link.loss) == (10, 5, 0.25)


def test_table_marks_what_is_assumed_and_lists_outages() -> None:
    outages = [{"pair": "b-a", "start_s": 5, "seconds": 2, "every_s": 60}]
    row = WanProfile.from_config(config(assumed=["loss"], outages=outages)).table()[0]
    assert row["loss"] == "0*" and row["rtt_ms"] == "80"
    assert row["outages"] == "2 s at 5 s every 60 s"


def test_outage_windows() -> None:
    once = Outage(frozenset("a"), start_s=10, seconds=5)
    assert once.first_overlap(0, 9.9) is None
    assert once.first_overlap(0, 100) == (10, 15) and once.first_overlap(14, 14) == (10, 15)
    assert once.first_overlap(15, 100) is None
    again = Outage(frozenset("a"), start_s=10, seconds=5, every_s=20)
    assert again.first_overlap(15, 29) is None and again.first_overlap(15, 30) == (30, 35)
    assert again.first_overlap(1011, 1012) == (1010, 1015)
    assert again.hits("a", "b") and not again.hits("c", "b")
    assert not Outage(frozenset("ac"), 0, 1).hits("a", "b")


LINK = {"rtt_ms": 80, "mbit_s": 100}
WRONG = [
    ({"speed": 3}, r"network\.speed is unknown.*bandwidth_scale"),
    ({"regions": []}, r"network\.regions is missing"),
    ({"regions": ["a-x", "b"]}, "without '-'"),
    ({"syncer_region": "c"}, r"'c' is unknown; the regions are a, b"),
    ({"links": {"a-b": {**LINK, "rtt": 3}}}, r"links\.a-b\.rtt is unknown; the keys are rtt_ms"),
    ({"links": {"a-b": {"rtt_ms": 80}}}, r"a-b: up_mbit_s is missing"),
    ({"links": {"a-b": {**LINK, "up_mbit_s": 1}}}, "not both"),
    ({"links": {"a-b": LINK, "b-a": LINK}}, "given twice"),
    ({"links": {"ab": LINK}}, "joined by '-'"),
    ({"links": {"a-b": {**LINK, "loss": 1}}}, r"a-b: link loss=1.*1 % is 0\.01"),
    ({"links": {"a-b": {**LINK, "rtt_ms": -1}}}, r"rtt_ms=-1.*>= 0"),
    ({"links": {"a-b": {**LINK, "rtt_ms": "80"}}}, r"rtt_ms='80'"),
    ({"links": {"a-b": {**LINK, "mbit_s": 0}}}, r"up_mbit_s=0.*> 0"),
    ({"links": {"a-b": {**LINK, "tcp": "vegas"}}}, "reno, cubic, bbr, none"),
    ({"links": {"a-b": {**LINK, "slow_start": "no"}}}, "true or false"),
    ({"links": {"b-b": LINK}}, r"add network\.links\.a-b"),
    ({"links": {}}, "would have no effect"),
    ({"bandwidth_scale": 0}, r"network\.bandwidth_scale=0"),
    ({"outages": [{"start_s": 1, "seconds": 1}]}, "either a region or a pair"),
    ({"outages": [{"region": "c", "start_s": 1, "seconds": 1}]}, "'c' is unknown"),
    ({"outages": [{"region": "a", "start_s": 1}]}, "has no seconds"),
    ({"outages": [{"region": "a", "start_s": 1, "seconds": 9, "every_s": 9}]}, "every_s"),
    ({"outages": [{"region": "a", "start_s": 1, "seconds": 9, "every_s": 9.05}]}, "round trip"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WanProfile.from_config(config(**changes))


def test_a_scale_without_links_is_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"bandwidth_scale=0\.1 has no effect"):
        assert not shipped("none", "bandwidth_scale=0.1").needs_proxy


def test_reversed_twice_is_the_same() -> None:
    link = Link(rtt_ms=1, up_mbit_s=2, down_mbit_s=3, jitter_ms=4, tcp="bbr")
    assert link.reversed().reversed() == link != link.reversed()
