"""`dd-lightning`: help, unknown commands, doctor."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from dd_lightning.cli import COMMANDS, main
from dd_lightning.commands import doctor
from dd_lightning.protocol.config import Timeouts

pytestmark = pytest.mark.unit

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def package(requirement):
    return requirement.split(">=")[0].split("[")[0]


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in COMMANDS)
    promised = "doctor launch syncer status checkpoint estimate replay report export goodput keys"
    assert set(promised.split()) <= set(COMMANDS)


@pytest.mark.parametrize(
    "name", ["doctor", "report", "export", "keys", "goodput", "estimate", "replay"]
)
def test_commands_have_their_own_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: dd-lightning {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["replay", "none.jsonl"], "tape is 'none.jsonl'; allowed: a tape.jsonl, or a run folder."),
        (["replay"], "dd-lightning replay: the following arguments are required: tape; see "),
        (["replay", "t", "--quorum", "x"], "dd-lightning replay: argument --quorum: invalid int"),
        (["report"], "dd-lightning report: the following arguments are required: folder; see "),
        (["status", "--what"], "dd-lightning status: "),
        (["doctor", "--what"], "dd-lightning doctor: unrecognized arguments: --what; see "),
        (["lunch"], "command is 'lunch'; allowed: doctor | launch"),
        (["report", "/nonexistent"], "/nonexistent holds no tape.jsonl"),
        (["export", "/nonexistent", "--run", "/"], "--run is '/', which has no config.yaml"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(arguments, said, capsys):
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(said) and errors.count("\n") == 1


FOREIGN = [
    ("", "the tape has no `run` row"),
    ('{"event":"run"', "the tape has no `run` row"),  # torn in its first line
    ('{"event":"merge"}\n', "line 1 is no event of a tape: it lacks event or t_s"),
    ("[1,2]\n", "line 1 is no event of a tape"),
    ("\x00\n", "line 1 is not JSON"),
    ('{"event":"merge","t_s":0}\n', "the tape has a row that lacks 'epoch'"),
    ('{"event":"join","t_s":0}\n', "the tape has a row that lacks 'incarnation'"),
    (
        '{"event":"run","t_s":0,"config":{"task":{}}}\n{"event":"layout","t_s":0}\n',
        "mode is missing",
    ),
]


@pytest.mark.parametrize(("text", "said"), FOREIGN)
def test_a_foreign_tape_is_refused_and_not_called_unequal(text, said, capsys, tmp_path):
    (tmp_path / "tape.jsonl").write_text(text)
    assert main(["replay", str(tmp_path), "--json"]) == 2
    found = capsys.readouterr()
    assert said in found.err and found.err.count("\n") == 1 and not found.out


def test_a_configuration_of_another_version_is_refused_too(capsys, tmp_path):
    with initialize_config_module("dd_lightning.conf", version_base="1.3"):
        config: Any = OmegaConf.to_container(compose("config", ["mode=simulate"]), resolve=True)
    del config["simulate"]["restart_s"]
    rows = [{"event": "run", "t_s": 0, "config": config}, {"event": "layout", "t_s": 0}]
    (tmp_path / "tape.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["replay", str(tmp_path)]) == 2
    assert "the tape's configuration has no 'restart_s'" in capsys.readouterr().err


def test_full_errors_can_be_asked_for(monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match=r"holds no tape\.jsonl"):
        main(["report", "/nonexistent"])


def test_doctor_reports_what_is_there(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] and found["loopback"]["127.0.0.1"]
    assert main(["doctor"]) == 0
    assert found["versions"]["torch"] in capsys.readouterr().out


def test_doctor_explains_every_timeout():
    found = doctor.timeouts()
    assert list(found) == list(Timeouts.__struct_fields__)
    assert all(entry["meaning"] for entry in found.values())


def test_doctor_knows_the_packages_of_pyproject():
    assert set(doctor.CORE) == {"dd-lightning", *map(package, PROJECT["dependencies"])}
    extras = PROJECT["optional-dependencies"]
    for name, packages in doctor.EXTRAS.items():
        assert list(packages) == [package(one) for one in extras[name]]


def test_doctor_says_how_to_get_what_is_missing(monkeypatch):
    def version(package):
        return None if package == "aim" else "1.0"

    monkeypatch.setattr(doctor, "_version", version)
    assert doctor.examine()["missing"] == ["aim: pip install 'dd-lightning[aim]'"]
