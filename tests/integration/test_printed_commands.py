"""Every command that README and docs print is run here as printed, run by another test, or has the
reason why not: a command that is none of these fails, and so does a reason that nothing needs.
"""

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from dd_lightning.cli import main

pytestmark = [pytest.mark.integration, pytest.mark.virtual, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# commands by how they begin, and who runs them or why nobody does
MINUTES = "takes minutes; composed and checked by test_readme"
HOST = "wants a host of the user's; the same command on loopback: "
ELSEWHERE = {
    "make demo": "what it runs is composed by test_readme; " + MINUTES,
    "make test": "runs this test",
    "dd-lightning launch experiment=smoke network=us_eu": "run by test_launch_smoke",
    "dd-lightning launch experiment=smoke chaos=": "test_chaos_choices, make test-all",
    "dd-lightning launch experiment=smoke mode=simulate chaos=": "test_simulate_chaos",
    "dd-lightning launch -m experiment=demo": MINUTES,
    "dd-lightning launch -m experiment=smoke": "smaller ones by test_sweeps",
    "dd-lightning launch experiment=": MINUTES,
    "dd-lightning launch --config-dir conf task=sine": "run as printed by test_docs",
    "dd-lightning syncer --listen tcp://127.0.0.1:29400": "run as printed by test_readme",
    "dd-lightning syncer --listen tcp://0.0.0.0": HOST + "test_transport_curve, test_readme",
    "dd-lightning syncer --resume --cut": HOST + "test_cut_resume",
    "dd-lightning status": HOST + "test_operator_commands",
    "dd-lightning checkpoint": HOST + "test_operator_commands",
    "dd-lightning export": "run by test_readme",
    "dd-lightning report runs/": "its folder comes from a sweep of minutes; RUN's is run here",
    "dd-lightning report MULTIRUN": "run by test_studies",
    "python train.py": "run as printed by test_readme",
    "torchrun": HOST + "tests/conformance/test_group_starts.py",
    "python scripts/": "measures for minutes; its parts have unit tests",
}
SMALLER = (  # the only difference between what is printed and what is run here
    "trainer.max_steps=40",
    "task.module.gpt.width=32",
    "task.data.batch_size=1",
    "task.data.max_bytes=300000",
    "task.data.validation_samples=8",
)
NEEDS_RUN = ("replay", "report")


def words(line):
    """A printed line without comment, environment and the way to the program."""
    found = [w for w in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", w)]
    return [Path(found[0]).name, *found[1:]]


def printed():
    found = {}
    for page in PAGES:
        for body in re.findall(r"^ *```bash\n(.*?)^ *```", page.read_text(), re.M | re.S):
            for line in filter(str.strip, body.splitlines()):
                command = words(line)
                found.setdefault(shlex.join(command), command)
    return found


COMMANDS = printed()


def elsewhere(command):
    plain = " ".join(command)
    fits = [begin for begin in ELSEWHERE if plain.startswith(begin)]
    return max(fits, key=len) if fits and not runs_here(command) else None


def runs_here(command):
    if command[0] != "dd-lightning":
        return False
    if command[1] == "launch":
        return command[2:4] == ["experiment=smoke", "mode=simulate"] and "network=us_eu" in command
    if command[1] in NEEDS_RUN:
        return "RUN" in command
    return command[1] in ("doctor", "keys", "goodput", "estimate")


HERE = {name: command for name, command in COMMANDS.items() if runs_here(command)}
(LAUNCH,) = [name for name, command in HERE.items() if command[1] == "launch"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the commands run; a trace of failures lies there, as docs/goodput.md describes it."""
    folder = tmp_path_factory.mktemp("printed")
    (folder / "failures.csv").write_text("time,component,seconds_down\n3600,7,600\n90000,12,60\n")
    return folder


@pytest.fixture(scope="module")
def run(folder):
    """RUN: the launch in virtual time that the README prints."""
    where = folder / "run"
    call(HERE[LAUNCH], folder, *SMALLER, f"hydra.run.dir={where}")
    return where


@pytest.fixture(autouse=True)
def hydra_is_left_as_it_was():
    yield
    GlobalHydra.instance().clear()


def call(command, folder, *more):
    before = os.getcwd()
    os.chdir(folder)
    os.environ["DD_DATA"] = str(ROOT / "data")
    try:
        assert main([*command[1:], *more]) in (0, None), command
    finally:
        os.chdir(before)
        del os.environ["DD_DATA"]


def test_each_is_run_or_has_its_reason():
    assert len(COMMANDS) > 40
    used = set()
    for name, command in COMMANDS.items():
        reason = elsewhere(command)
        assert runs_here(command) or reason, f"neither run nor excused: {name}"
        used.add(reason)
    assert set(ELSEWHERE) <= used, "reasons without a command"


def test_who_is_named_exists():
    for reason in ELSEWHERE.values():
        for test in re.findall(r"test_\w+", reason):
            assert list(ROOT.glob(f"tests/**/{test}.py")), test


def test_launch_in_virtual_time(run):
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("name", [name for name in HERE if name != LAUNCH])
def test_command(name, folder, run, tmp_path):
    command = [str(run) if word == "RUN" else word for word in HERE[name]]
    call(command, tmp_path if command[1] == "keys" else folder)  # keys are never written over
