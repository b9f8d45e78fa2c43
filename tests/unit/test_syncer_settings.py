"""Settings of `dd-lightning syncer`: what is taken, and the one line for what is not."""

from __future__ import annotations

import pytest

from dd_lightning.syncer.settings import TAPE, load_config, parse

pytestmark = pytest.mark.unit


def test_a_file_a_preset_and_overrides(tmp_path) -> None:
    file = tmp_path / "syncer.yaml"
    file.write_text("learners: 3\nalgorithm: {fragments: 5}\n")
    overrides = ["algorithm=short_run", "algorithm.quorum=2", "timeouts.lease=12"]
    config = load_config(file, overrides)
    assert (config.learners, config.algorithm.preset) == (3, "short_run")
    assert config.algorithm.outer == {"lr": 0.7, "momentum": 0.3}
    assert (config.algorithm.fragments, config.algorithm.quorum) == (5, 2)
    assert config.timeouts.lease == 12


def test_a_file_may_name_a_preset_as_the_command_line_does(tmp_path) -> None:
    file = tmp_path / "syncer.yaml"
    file.write_text("algorithm: short_run\n")
    algorithm = load_config(file, ["algorithm.fragments=5"]).algorithm
    assert (algorithm.preset, algorithm.fragments, algorithm.sync_every) == ("short_run", 5, 12)
    file.write_text("algorithm: papr\n")
    with pytest.raises(ValueError, match="algorithm is 'papr'; allowed: paper"):
        load_config(file, [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("algorithm: {outer: 0.7}", "algorithm.outer is 0.7; allowed: a mapping"),
        ("algorithm: [short_run]", "algorithm is .*; allowed: a mapping"),
        ("algorithm: {preset: [paper]}", "algorithm.preset is"),
        ("timeouts: 5", "timeouts is 5; allowed: a mapping"),
        ("timeouts: {round: .nan}", "timeouts.round is nan; allowed: seconds above 0"),
        ("1: 2", "1 is not a setting"),
    ],
)
def test_a_setting_of_another_kind_is_named(tmp_path, text, said) -> None:
    file = tmp_path / "syncer.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        load_config(file, [])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["algorithm.fragmets=3"], "algorithm.fragmets"),
        (["algorithm=papr"], "papr"),
        (["algorithm.quorum=0"], "algorithm.quorum"),
        (["algorithm.outer.lr=-1"], "outer.lr"),
        (["algorithm.merge=median"], "merge"),
        (["algorithm.codec=int4"], "codec"),
        (["algorithm.fragments=many"], "algorithm.fragments"),
        (["learners"], "override"),
        (["learners=3", "learners.x=1"], "learners"),
        (["--config", "missing.yaml"], "--config"),
        (["--listen", "127.0.0.1:0"], "--listen"),
        (["--listen", "tcp://0.0.0.0:0"], "--listen"),
        (["--listen", "tcp://127.0.0.1:70000"], "--listen"),
        (["--resume"], "--run-dir"),
        (["--lisen", "tcp://127.0.0.1:0"], "--lisen"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path, arguments, said) -> None:
    with pytest.raises(ValueError, match=said):
        parse(["--run-dir", str(tmp_path), *arguments])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_a_run_needs_resume(tmp_path) -> None:
    (tmp_path / TAPE).touch()
    with pytest.raises(ValueError, match="give --resume"):
        parse(["--run-dir", str(tmp_path)])
