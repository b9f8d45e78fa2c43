"""The core when the disk refuses checkpoints: tried again, nobody released on one that is not."""

from __future__ import annotations

import pytest

from dd_lightning.protocol import actions as act
from dd_lightning.protocol import messages as msg
from tests.scripted_core import TOKENS, ScriptedCore

pytestmark = pytest.mark.unit


class FullDisk(ScriptedCore):
    """Its disk takes no checkpoint while `full`."""

    def __init__(self, **config) -> None:
        super().__init__(1, config=config)
        self.full = False
        self.tried_s: list[float] = []

    def one(self, action: act.Action) -> None:
        if isinstance(action, act.WriteCheckpoint) and self.full:
            self.tried_s.append(self.now)
            self.core.not_checkpointed("the disk is full. Free space.", self.now)
        else:
            super().one(action)


def finishing(**config) -> FullDisk:
    """Its only learner has done its last step, handed in, and everything is merged."""
    driven = FullDisk(**config).started("0").opened(1)
    driven.full = True
    driven.receive("0", driven.contribution("0", 1), payload="p")
    step = driven.steps["0"]
    finish = msg.Finish(generation=1, step=step, odometer=TOKENS * step)
    driven.receive("0", finish)
    for _ in range(8):
        for pull in driven.sent("0", msg.Pull):
            final = driven.member("0").finals.get(pull.fragment)
            if pull.final and final is not None and not final.done:
                nothing = msg.Nothing(
                    generation=1, epoch=1, round=pull.round, fragment=pull.fragment,
                    odometer=TOKENS * step,
                )  # fmt: skip
                driven.receive("0", nothing)
        driven.advance(0.5, beats=("0",))
    assert driven.member("0").all_done_s is not None
    return driven


def test_tried_again_with_a_pause_that_doubles_and_said_once() -> None:
    driven = finishing()
    driven.advance(40.0, beats=("0",))
    pauses = [b - a for a, b in zip(driven.tried_s, driven.tried_s[1:], strict=False)]
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    said = [warning.text for warning in driven.warnings if "checkpoint" in warning.text]
    assert said == ["no checkpoint: the disk is full. Free space. It is tried again; until then "
                    "the run goes on without."]  # fmt: skip
    assert [e["text"] for e in driven.events("warning")].count(said[0]) == 1


def test_nobody_is_released_on_a_checkpoint_that_does_not_exist() -> None:
    driven = finishing()
    driven.advance(20.0, beats=("0",))
    assert driven.core.endgame.saved_merges < driven.core.run.merges
    assert driven.sent("0", msg.Released) == [] and driven.done is None
    driven.full = False  # space was freed
    driven.advance(20.0, beats=("0",))
    assert driven.core.endgame.saved_merges == driven.core.run.merges
    assert driven.sent("0", msg.Released)
    assert driven.events("warning")[-1]["text"] == "checkpoints are written again"


def test_a_second_full_disk_is_said_again() -> None:
    driven = finishing()
    for full in (False, True):
        driven.full = full
        driven.core.request_checkpoint(driven.now)
        driven.carry_out()
        driven.advance(10.0, beats=("0",))
    assert len([w for w in driven.warnings if "no checkpoint" in w.text]) == 2


def test_a_disk_that_stays_full_ends_the_run_within_flush_as_failed() -> None:
    driven = finishing(timeouts={"flush": 70.0})
    driven.advance(75.0, beats=("0",))
    assert driven.sent("0", msg.Released)  # it has waited `flush`
    driven.receive("0", msg.Goodbye(generation=1, reason="finished"))
    driven.advance(60.0)
    assert driven.done is None
    driven.advance(20.0)
    assert driven.done is not None and driven.done.status == "failed"
    assert "the last checkpoint is not on the disk timeouts.flush = 70 s" in driven.done.reason


def test_a_write_under_way_is_the_only_one_and_requests_meanwhile_are_one() -> None:
    driven = FullDisk().started("0")
    asked: list[act.WriteCheckpoint] = []
    driven.one = lambda action: (  # type: ignore[method-assign]
        asked.append(action)
        if isinstance(action, act.WriteCheckpoint)
        else FullDisk.one(driven, action)
    )
    for _ in range(3):
        driven.core.request_checkpoint(driven.now)
        driven.carry_out()
    assert len(asked) == 1
    driven.core.checkpointed(asked[0].state, driven.now)
    driven.carry_out()
    assert len(asked) == 2
    driven.core.checkpointed(asked[1].state, driven.now)
    driven.carry_out()
    assert len(asked) == 2
