"""The syncer remembers how far the data of each slot was drawn, and tells who comes back."""

from __future__ import annotations

import logging

import pytest

from dd_lightning.learner import data_position
from dd_lightning.protocol import messages as msg
from dd_lightning.protocol.held import Held
from dd_lightning.protocol.joining import join_of
from dd_lightning.protocol.positions import DataPositions
from dd_lightning.protocol.progress import ProgressReport
from dd_lightning.protocol.syncer_core import SyncerCore
from tests.scripted_core import TENSORS, ScriptedCore

pytestmark = pytest.mark.unit


def join(position: int = 0, **change) -> msg.Join:
    values = {"learner": "0", "incarnation": "a", "number": 1, "skips": True, **change}
    return msg.Join(**values, data_position=position)


def report(core: ScriptedCore, position: int, generation: int = 1, session: str = "0") -> None:
    core.steps["0"] = core.steps.get("0", 0) + 1
    core.receive(
        session,
        msg.Progress(
            generation=generation, step=core.steps["0"], odometer=0, data_position=position
        ),
    )


@pytest.fixture
def core() -> ScriptedCore:
    """Learner 0 has drawn 40 batches, as far as was heard, and is gone."""
    core = ScriptedCore(2, quorum=1).started("0", "1")
    for position in (30, 40, 35):  # the last one is late: nothing goes backward
        report(core, position)
    core.core.disconnected("0", core.now)
    core.carry_out()
    return core


@pytest.mark.parametrize(
    ("own", "skips", "told", "begins"),
    [(0, True, 40, 40), (32, True, 40, 40), (50, True, 50, 50), (32, False, 40, 32)],
)
def test_a_process_without_its_state_begins_where_its_slot_was_heard_of(
    core, own, skips, told, begins
) -> None:
    core.join("0", session="new", incarnation="b", data_position=own, skips=skips)
    (welcome,) = core.sent("new", msg.Welcome)
    assert (welcome.data_position, welcome.data_slot) == (told, 0)
    report(core, 41, generation=2, session="new")  # and with it out of `joining`
    assert core.events("join")[-1]["data_position"] == begins
    assert core.core.run.positions.state() == [[0, max(told, 41)]]


def test_a_process_that_lived_on_keeps_its_own(core) -> None:
    core.join(
        "0", session="new", number=2, continues=True, generation=1, versions=((1, 0), (1, 0)),
        step=3, data_position=43, skips=True,
    )  # fmt: skip
    (welcome,) = core.sent("new", msg.Welcome)
    assert welcome.data_position == core.events("join")[-1]["data_position"] == 43


def test_positions_come_back_with_a_checkpoint_of_the_syncer(core) -> None:
    state = core.core.state()
    assert state["positions"] == [[0, 40]]
    again = SyncerCore(core.config, run_id="r", epoch=2, restored=state)
    again.receive("x", join(7, learner="0", tensors=TENSORS), 0.0)
    (welcome,) = [
        a.message for a in again.take() if isinstance(getattr(a, "message", 0), msg.Welcome)
    ]
    assert welcome.data_position == 40
    older = {key: value for key, value in state.items() if key != "positions"}
    assert SyncerCore(core.config, run_id="r", epoch=2, restored=older).run.positions.state() == []


def test_data_belongs_to_the_slot_whoever_has_it() -> None:
    positions = DataPositions([[3, 12]])
    assert positions.admit(3, join(learner="other"), resumes=False) == (12, 12)
    assert positions.admit(2, join(learner="other"), resumes=False) == (0, 0)
    positions.heard(3, 11)
    assert positions.state() == [[3, 12]]


def test_what_a_restored_cut_has_undone_is_drawn_again() -> None:
    positions = DataPositions([[0, 12]])
    part = join(9, cut="c1", continues=True)
    assert positions.admit(0, part, resumes=False) == (12, 12)  # the run was not restored from it
    assert positions.admit(0, part, resumes=True) == (9, 9)
    assert positions.admit(0, join(0), resumes=False) == (9, 9)


def test_reports_and_joins_say_how_much_was_drawn() -> None:
    held = Held(3, 30, ((1, 0),), ((3, 30),), data_position=17)
    assert ProgressReport().message(held, "", 0.0).data_position == 17
    numbers = {"number": 2, "run_id": "r", "generation": 1, "epoch": 1}
    assert join_of(join(5), held, False, **numbers).data_position == 17
    assert join_of(join(5), Held(0, 0, (), ()), False, **numbers).data_position == 5


class Skips:
    at: int | None = None

    def skip_to(self, batches: int) -> None:
        self.at = batches


@pytest.mark.parametrize(("own", "known", "at"), [(0, 0, None), (5, 9, 9), (9, 5, 9)])
def test_a_datamodule_is_told_where_to_begin(own, known, at) -> None:
    data = Skips()
    assert data_position.position_of(data, own, known) == (at or 0)
    assert data.at == at


@pytest.mark.parametrize("datamodule", [None, object()])
def test_without_skip_to_it_is_said_what_is_drawn_again(datamodule, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        assert data_position.position_of(datamodule, 9, 9) == 9
        assert not caplog.records
        assert data_position.position_of(datamodule, 5, 9) == 5
    (record,) = caplog.records
    assert "the 4 after that are drawn again" in record.getMessage()
    assert "skip_to(batches)" in record.getMessage()
