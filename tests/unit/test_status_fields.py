"""Every field that the tables show is in the status that the syncer makes (`--json`)."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from dd_lightning.protocol.messages import Progress
from dd_lightning.protocol.tape import clean
from dd_lightning.report.live import LINK, TRAINING, plain_line, render
from dd_lightning.syncer.board import RATE_S, StatusBoard
from tests.scripted_core import ScriptedCore

pytestmark = pytest.mark.unit
SHOWN_BESIDE = {"validation_loss", "bytes"}  # added by the launcher, or by a status with sums


class Noted(dict):
    """A mapping that remembers which keys were looked up, over all its parts."""

    def __init__(self, values: dict[str, Any], asked: set[str], where: str = "") -> None:
        super().__init__({key: noted(v, asked, f"{where}{key}.") for key, v in values.items()})
        self._asked, self._where = asked, where

    def get(self, key, default=None):
        self._asked.add(self._where + key)
        return super().get(key, default)

    def __getitem__(self, key):
        self._asked.add(self._where + key)
        return super().__getitem__(key)


def noted(value: Any, asked: set[str], where: str) -> Any:
    if isinstance(value, dict):
        return Noted(value, asked, where)
    if isinstance(value, list):
        return [noted(item, asked, where) for item in value]
    return value


def paths(value: Any, where: str = "") -> set[str]:
    """Every key, with those of the mappings around it."""
    found: set[str] = set()
    if isinstance(value, dict):
        for key, item in value.items():
            found |= {where + key} | paths(item, f"{where}{key}.")
    elif isinstance(value, list):
        for item in value:
            found |= paths(item, where)
    return found


@pytest.fixture
def core() -> ScriptedCore:
    """Two learners; one has answered the open round, which waits for the other."""
    core = ScriptedCore(2, quorum=2).started("0", "1").opened(1)
    core.receive("0", core.contribution("0", 1), payload="x")
    return core


def board(core: ScriptedCore, sent: dict[str, int]) -> StatusBoard:
    made = StatusBoard(core.core.status, lambda s: (sent[s], 3), lambda: (4, 5), began_s=1.0)
    for learner in ("0", "1"):
        made.attached(learner, 1, learner)
    return made


def test_the_tables_show_nothing_that_json_lacks(core):
    status = clean(board(core, {"0": 10, "1": 20}).status(core.now))
    assert json.loads(json.dumps(status, allow_nan=False)) == status
    asked: set[str] = set()
    noted_status = Noted(status, asked)
    Console(file=io.StringIO(), width=200).print(render(noted_status))
    plain_line(noted_status)
    assert asked - SHOWN_BESIDE <= paths(status)
    for column in (*TRAINING, *LINK):
        assert f"learners.0.{column.key}" in asked
    besides = {"rounds.roster", "rounds.grace_left_s", "checkpoint.file", "merges_per_min"}
    assert besides | {"effective_h", "refused_queries", "max_in_flight", "versions"} <= asked


def test_the_figures_of_a_learner_and_of_an_open_round(core):
    core.receive("1", Progress(generation=1, step=core.steps["1"], odometer=40, last_error="cut"))
    core.now += 2.5
    status = core.core.status(core.now)
    (round_,) = status["rounds"]
    assert (round_["roster"], round_["contributed"]) == (["0", "1"], ["0"])
    assert (round_["quorum"], round_["grace_left_s"], round_["merging"]) == (2, None, False)
    one = status["learners"]["1"]
    assert one["silent_s"] == 2.5 and one["steps_per_s"] == 1.0 and one["last_error"] == "cut"
    assert (one["generation"], one["joins"], one["data_slot"]) == (1, 1, 1)
    processed = one["tokens_merged"] + one["tokens_lost"] + one["tokens_pending"]
    assert processed == 40


def test_a_round_in_its_grace_window_says_how_much_is_left():
    core = ScriptedCore(3, quorum=1, min_learners=3).started("0", "1", "2").opened(1)
    core.receive("0", core.contribution("0", 1), payload="x")
    (round_,) = core.core.status(core.now)["rounds"]
    assert round_["contributed"] == ["0"] and round_["grace_left_s"] > 0


def test_rates_are_of_the_present_connection_and_of_a_while(core):
    sent = {"0": 1000, "1": 0}
    made = board(core, sent)
    assert made.status(10.0)["learners"]["0"]["bytes_up_per_s"] == 0.0
    sent["0"] = 1500
    assert made.status(10.0 + RATE_S / 2)["learners"]["0"]["bytes_up_per_s"] == 0.0
    row = made.status(10.0 + 2 * RATE_S)["learners"]["0"]
    assert row["bytes_up_per_s"] == 500 / (2 * RATE_S) and row["bytes_up"] == 1500
    assert made.bytes_of("0", 2) == (0, 0)  # of a generation that nobody attached


def test_what_only_the_server_knows(core):
    made = board(core, {"0": 0, "1": 0})
    assert made.status(5.0)["checkpoint"] == {"file": None, "age_s": None}
    made.checkpoint = ("step-1-0.ckpt", 4.0)
    status = made.status(6.5)
    assert status["checkpoint"] == {"file": "step-1-0.ckpt", "age_s": 2.5}
    assert (status["uptime_s"], status["malformed"], status["refused_queries"]) == (5.5, 4, 5)


def test_merges_a_minute_and_effective_h():
    core = ScriptedCore(1).started("0")
    assert core.core.status(core.now)["effective_h"] is None
    for number in range(1, 9):
        core.opened(number)
        core.receive("0", core.contribution("0", number), payload="x")
    status = core.core.status(core.now)
    assert status["merges"] == 8 and status["effective_h"] == pytest.approx(2, abs=0.5)
    assert status["merges_per_min"] == pytest.approx(60, rel=0.25)  # one each second
    later = core.core.status(core.now + 61)
    assert later["merges_per_min"] == 0.0
