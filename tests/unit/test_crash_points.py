"""The list of crash points and the code agree; arming is checked; unarmed costs a look."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import dd_lightning
from dd_lightning import crash_points
from dd_lightning.crash_points import LEARNER_POINTS, POINTS, SYNCER_POINTS, Armed, from_environment

pytestmark = pytest.mark.unit
WAIT_S = 60.0


def test_every_point_is_one_line_of_the_code_and_says_its_state() -> None:
    found: Counter[str] = Counter()
    for file in Path(dd_lightning.__file__).parent.rglob("*.py"):
        if file.name != "crash_points.py":
            for call in re.findall(r"\breach\((.*)\)$", file.read_text(), re.MULTILINE):
                found.update(re.findall(r'"([^"]+)"', call))
    assert set(found) == set(POINTS) and max(found.values()) == 1
    assert len(POINTS) == len(SYNCER_POINTS) + len(LEARNER_POINTS)
    for name, state in (SYNCER_POINTS | LEARNER_POINTS).items():
        assert re.fullmatch(r"[a-z_]+\.[a-z_]+", name) and 10 < len(state) < 100


def test_unarmed_nothing_is_looked_up() -> None:
    assert from_environment({}) is None and crash_points._armed is None
    crash_points.reach("no such point")  # not even a name that does not exist
    assert not crash_points.is_next("tape.half_row")


@pytest.mark.parametrize(
    ("plan", "tape", "said"),
    [
        ("merge.beginning", "t", "DD_CRASH names 'merge.beginning'; allowed: lock.taken"),
        ("merge.begun:0", "t", "allowed: merge.begun:N with N from 1 on"),
        ("merge.begun:x", "t", "allowed: merge.begun:N with N from 1 on"),
        ("merge.begun", "", "DD_CRASH_TAPE is unset"),
    ],
)
def test_a_wrong_plan_is_refused(plan, tape, said) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Armed(plan, tape)


def test_the_nth_arrival_is_on_the_tape_before_the_process_is_gone(tmp_path) -> None:
    code = (
        "from dd_lightning.crash_points import reach\n"
        "for n in range(9): print(n, flush=True); reach('merge.begun'); reach('merge.done')"
    )
    plan = {"DD_CRASH": "merge.done:7, merge.begun:3", "DD_CRASH_TAPE": str(tmp_path / "fired")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | plan,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL and done.stdout == "0\n1\n2\n", done.stderr
    (row,) = (tmp_path / "fired").read_text().splitlines()
    assert json.loads(row)["point"] == "merge.begun"


def test_is_next_counts_as_reach_does() -> None:
    armed = Armed("tape.half_row:2", "t")
    assert not armed.is_next("tape.half_row")
    armed.arrive("tape.half_row")
    assert armed.is_next("tape.half_row") and not armed.is_next("merge.begun")
