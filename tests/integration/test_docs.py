"""The pages under docs/: examples give what they print, files run as printed, commands are real."""

import doctest
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dd_lightning.protocol.tape import read_tape

pytestmark = [pytest.mark.integration, pytest.mark.virtual]

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
RUN_S = 280.0


def fenced(page, language):
    pattern = rf"^ *```{language}\n(.*?)^ *```"
    return re.findall(pattern, page.read_text(), re.MULTILINE | re.DOTALL)


def test_the_worked_example_gives_what_it_prints():
    failed, attempted = doctest.testfile(str(ROOT / "docs/concepts.md"), module_relative=False)
    assert attempted >= 10 and failed == 0


def test_the_accounts_of_the_worked_example_add_up():
    text = (ROOT / "docs" / "concepts.md").read_text()
    (row,) = re.findall(r"\| processed \|.*\n\|[-|]+\|\n\|(.*)\|", text)
    processed, merged, lost, pending = (int(cell) for cell in row.split("|"))
    assert processed == merged + lost + pending


@pytest.mark.timeout(RUN_S + 20)
def test_the_tutorial_runs_as_printed(tmp_path):
    page = ROOT / "docs" / "extending.md"
    for body in [*fenced(page, "python"), *fenced(page, "yaml")]:
        file = tmp_path / body.splitlines()[0].removeprefix("# ")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(body)
    (command,) = fenced(page, "bash")
    dd_lightning = f"{sys.executable} -m dd_lightning.cli"
    command = command.replace("PYTHONPATH=.", "").replace("dd-lightning", dd_lightning)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        command,
        shell=True,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    summary = json.loads((tmp_path / "sine" / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["task"] == "sine"
    assert summary["loss"]["validation"] < 0.5 * summary["loss"]["initial"]
    (first, *_) = read_tape(tmp_path / "sine" / "tape.jsonl")
    algorithm = first["config"]["algorithm"]
    assert algorithm["merge"] == {"_target_": "my_rules.Median"}
    assert algorithm["outer"] == {"_target_": "my_rules.SignSGD", "lr": 0.01}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target
