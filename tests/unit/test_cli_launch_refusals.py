"""`dd-lightning launch` with wrong settings: one line, exit code 2, nothing started."""

import pytest
from hydra.core.global_hydra import GlobalHydra

from dd_lightning.launch import processes
from dd_lightning.launch.app import main

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch, tmp_path):
    def refuse(*arguments, **options):
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.setattr(processes.subprocess, "Popen", refuse)
    monkeypatch.chdir(tmp_path)
    yield
    GlobalHydra.instance().clear()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm.quorum=0", "algorithm.quorum is 0; allowed: an integer >= 1, or all."),
        ("algorithm.quorum=9", "algorithm.quorum is 9; allowed: 1 to 4 (the learners), or all."),
        ("algorithm.fragments=0", "algorithm.fragments is 0; allowed: an integer >= 1."),
        ("algorithm.sync_every=-2", "algorithm.sync_every is -2; allowed: an integer >= 2."),
        ("algorithm.merge=median", "algorithm.merge is 'median'; allowed: "),
        ("algorithm.fragment=3", "algorithm.fragment is not a setting; allowed: preset, fragments"),
        ("learnres=3", "learnres is not a setting; allowed: "),
        ("algorithm=papr", "algorithm is 'papr'; allowed: "),
        ("network=moon", "network is 'moon'; allowed: "),
        ("chaos=kill_learnr", "chaos is 'kill_learnr'; allowed: "),
        ("algorithm=data_parallel", "algorithm is 'data_parallel'; allowed: under mode=simulate"),
        ("mode=threads", "mode is 'threads'; allowed: processes | simulate."),
        ("learners", "Error parsing override 'learners'"),
        ("seed=${nothing}", "seed: "),
    ],
)
def test_one_line_and_exit_code_2(override, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main([override])
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith(said), errors
    assert errors.count("\n") == 1, errors


def test_a_near_name_is_suggested(capsys):
    with pytest.raises(SystemExit):
        main(["algorithm.fragment=3"])
    assert "Did you mean algorithm.fragments?" in capsys.readouterr().err


def test_a_class_of_ones_own_beside_keys_that_are_there_is_told_how(capsys):
    with pytest.raises(SystemExit):
        main(["algorithm.outer={_target_: torch.optim.Adam}"])
    said = capsys.readouterr().err
    assert "'~algorithm.outer' '+algorithm.outer={_target_: your.Class, ...}'" in said


def test_the_traceback_can_be_asked_for(monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match=r"algorithm\.quorum is 0"):
        main(["algorithm.quorum=0"])


def test_a_failing_job_of_a_sweep_ends_it(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["-m", "algorithm.quorum=0,9"])
    assert ended.value.code == 2
    assert "algorithm.quorum is 0" in capsys.readouterr().err


def test_a_folder_that_holds_a_run_is_not_run_in_again(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tape.jsonl").write_text("")
    with pytest.raises(SystemExit) as ended:
        main([f"hydra.run.dir={tmp_path / 'run'}"])
    assert ended.value.code == 2
    assert "which holds a run already" in capsys.readouterr().err
