"""Operators get answers at a bounded rate, and a cut's result when it is there."""

from __future__ import annotations

import pytest

from dd_lightning.protocol.messages import Answer, Query
from dd_lightning.syncer.operators import FRESH_S, MOST_A_SECOND, MOST_SESSIONS, Operators

pytestmark = pytest.mark.unit


class Line:
    def __init__(self) -> None:
        self.sent: list[tuple[str, Answer]] = []
        self.closed: list[str] = []

    def send(self, session, message) -> bool:
        self.sent.append((session, message))
        return True

    def close_session(self, session) -> None:
        self.closed.append(session)


class Desk:
    """Operators with what they are given and what they asked of the syncer."""

    def __init__(self) -> None:
        self.line, self.made, self.cuts = Line(), [], []
        self.objection = ""
        self.operators = Operators(self.line, self._status, self._cut)

    def _status(self, now):
        self.made.append(now)
        return {"t_s": now}

    def _cut(self, now):
        if self.objection:
            raise ValueError(self.objection)
        self.cuts.append(now)
        return f"c{len(self.cuts)}"

    def ask(self, what="status", session="a", now=0.0, number=1) -> Answer | None:
        """The answer that came at once, if one did."""
        before = len(self.line.sent)
        self.operators.asked(session, Query(number=number, what=what), now)
        new = self.line.sent[before:]
        assert all(to == session for to, _ in new) and len(new) <= 1
        return new[0][1] if new else None


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_status_is_made_at_most_once_in_a_while_for_all_who_ask(desk):
    answers = [desk.ask(session=str(i), now=FRESH_S * i / 10) for i in range(10)]
    assert {answer.body["t_s"] for answer in answers} == {0.0} and len(desk.made) == 1
    assert desk.ask(session="later", now=FRESH_S).body == {"t_s": FRESH_S}
    assert len(desk.made) == 2


def test_a_flood_costs_a_few_answers_and_the_connection(desk):
    answers = [desk.ask(number=i) for i in range(MOST_A_SECOND + 1)]
    assert [answer.error for answer in answers[:-1]] == [""] * MOST_A_SECOND
    assert f"more than {MOST_A_SECOND} times a second" in answers[-1].error
    assert desk.line.closed == ["a"] and desk.operators.refused == 1


def test_who_asks_in_measure_is_always_answered(desk):
    for i in range(100):
        assert desk.ask(now=i / MOST_A_SECOND).error == ""
    assert desk.line.closed == []


def test_not_too_many_at_a_time(desk):
    for i in range(MOST_SESSIONS):
        assert desk.ask(session=str(i)).error == ""
    assert "which is the most" in desk.ask(session="one more").error
    assert desk.line.closed == ["one more"]
    desk.operators.forget("0")
    assert desk.ask(session="one more").error == ""


def test_a_wrong_question_is_told_what_is_allowed(desk):
    assert desk.ask("statuz").error == "what is 'statuz'; allowed: status | checkpoint"
    assert desk.operators.refused == 1


def test_a_checkpoint_is_answered_when_its_cut_is_done(desk):
    assert desk.ask("checkpoint", number=7) is None
    assert "under way" in desk.ask("checkpoint", number=8).error
    desk.operators.cut_done("c0", {"files": []})  # somebody else's
    assert len(desk.line.sent) == 1
    desk.operators.cut_done("c1", {"files": ["a.ckpt"]})
    session, answer = desk.line.sent[-1]
    assert (session, answer.number, answer.error) == ("a", 7, "")
    assert answer.body == {"cut": "c1", "files": ["a.ckpt"]}
    assert desk.ask("checkpoint", now=1.0) is None and desk.cuts == [0.0, 1.0]


def test_a_cut_that_fails_or_cannot_begin_is_told_in_words(desk):
    desk.ask("checkpoint", number=3)
    desk.operators.cut_failed("c1", "learner 1 is gone")
    session, answer = desk.line.sent[-1]
    assert (session, answer.number, answer.error) == ("a", 3, "learner 1 is gone")
    desk.objection = "a cut is under way"
    assert desk.ask("checkpoint").error == "a cut is under way"


def test_who_left_is_not_answered(desk):
    desk.ask("checkpoint")
    desk.operators.forget("a")
    desk.operators.cut_done("c1", {})
    assert desk.line.sent == []
