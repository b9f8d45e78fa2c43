"""Presets, the resolver of names and `_target_`s, and the checks behind both."""

import pytest

from dd_lightning import algorithm
from dd_lightning.algorithm import (
    CODECS,
    FRAGMENTERS,
    MERGE_RULES,
    PRESETS,
    RadialDirectional,
    check_choice,
    check_int,
    check_number,
    check_outer,
    preset,
    resolve,
    warn_few_merges,
)

pytestmark = pytest.mark.unit

# the promised keys of the algorithm group
KEYS = {
    *("fragments", "fragmentation", "sync_every", "overlap", "quorum", "grace_rule", "merge"),
    *("apply", "mix_alpha", "wait", "average_tensors", "grace_safety", "grace_cap", "outer"),
    *("codec", "max_in_flight", "min_learners", "max_learners", "on_lost_quorum"),
    *("max_norm_ratio", "max_stale", "weights"),
}


class Started:
    """Neither a merge rule nor a codec: must never be built because a setting names it."""

    def __init__(self):
        raise AssertionError("built")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_the_promised_keys_and_resolves(name):
    settings = preset(name)
    assert set(settings) == KEYS
    resolve("merge", settings["merge"], MERGE_RULES)
    resolve("fragmentation", settings["fragmentation"], FRAGMENTERS)
    resolve("codec", settings["codec"], CODECS)
    check_outer(settings["outer"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("paper", {"fragments": 24, "sync_every": 24, "overlap": 2, "quorum": 1, "merge": "rda"}),
        ("paper", {"outer": {"lr": 0.7, "momentum": 0.9}, "grace_rule": "lateness"}),
        ("paper", {"wait": "never", "apply": "overwrite"}),
        ("short_run", {"fragments": 12, "sync_every": 12, "overlap": 2, "quorum": 1}),
        ("short_run", {"outer": {"lr": 0.7, "momentum": 0.3}, "merge": "rda"}),
        ("diloco", {"quorum": "all", "fragments": 1, "overlap": 0, "merge": "average"}),
        ("diloco", {"wait": "overlap"}),
        ("streaming", {"quorum": "all", "merge": "average", "wait": "overlap"}),
    ],
)
def test_presets_are_those_of_the_specification(name, expected):
    assert {key: PRESETS[name][key] for key in expected} == expected


def test_streaming_overlaps_several_fragments():
    assert PRESETS["streaming"]["fragments"] > 1 and PRESETS["streaming"]["overlap"] > 0


def test_a_preset_is_a_copy():
    preset("paper")["outer"]["lr"] = 5
    assert preset("paper")["outer"]["lr"] == 0.7


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"algorithm is 'papr'; allowed: paper \| short_run"):
        preset("papr")


def test_few_merges_under_high_momentum_warn():
    with pytest.warns(UserWarning, match="about 29 merges .*algorithm=short_run"):
        assert warn_few_merges(24 * 30 - 1, 24, 0.9)
    assert not warn_few_merges(24 * 30, 24, 0.9)
    assert not warn_few_merges(24, 24, 0.3)


def test_resolve_takes_names_targets_and_instances():
    assert resolve("merge", "rda", MERGE_RULES) == RadialDirectional()
    spec = {"_target_": "dd_lightning.algorithm.RadialDirectional", "min_numel": 4}
    assert resolve("merge", spec, MERGE_RULES) == RadialDirectional(min_numel=4)
    rule = RadialDirectional(min_numel=2)
    assert resolve("merge", rule, MERGE_RULES) is rule


@pytest.mark.parametrize(
    ("kind", "spec", "message"),
    [
        ("merge", "mean", r"merge is 'mean'; allowed: rda \| average.*_target_: your_package"),
        ("merge", {"min_numel": 1}, "a mapping with the key _target_"),
        ("merge", {"_target_": "nowhere.Rule"}, "merge._target_ is 'nowhere.Rule'.*PYTHONPATH"),
        ("merge", {"_target_": f"{__name__}.Started"}, "a class with __call__"),
        ("codec", {"_target_": f"{__name__}.Started"}, "a class with encode, decode, num_bytes"),
        (
            "merge",
            {"_target_": "dd_lightning.algorithm.RadialDirectional", "size": 1},
            "the keys min_numel, cancel_below",
        ),
        ("merge", 3, "an object with __call__"),
        ("codec", object(), "an object with encode"),
        ("merge", RadialDirectional, "an object with __call__"),
    ],
)
def test_resolve_teaches(kind, spec, message):
    with pytest.raises(ValueError, match=message):
        resolve(kind, spec, {"merge": MERGE_RULES, "codec": CODECS}[kind])


def test_checks_return_what_they_checked_and_name_what_they_refuse():
    assert check_int("n", 3, 1, 3) == 3
    assert check_number("x", 1, 0, 1) == 1.0
    assert check_choice("c", "a", ("a", "b")) == "a"
    with pytest.raises(ValueError, match=r"^n is 4; allowed: an integer from 1 to 3\. Lower it\.$"):
        check_int("n", 4, 1, 3, fix="Lower it.")
    with pytest.raises(ValueError, match=r"^x is 1; allowed: a finite number >= 0 and < 1\.$"):
        check_number("x", 1, 0, below=1)
    with pytest.raises(ValueError, match=r"^x is 0; allowed: a finite number > 0 and <= 2\.$"):
        check_number("x", 0, maximum=2, above=0)
    with pytest.raises(ValueError, match=r"^c is 'z'; allowed: a \| b\.$"):
        check_choice("c", "z", ("a", "b"))


def test_everything_exported_exists():
    assert len(set(algorithm.__all__)) == len(algorithm.__all__)
    assert all(hasattr(algorithm, name) for name in algorithm.__all__)
