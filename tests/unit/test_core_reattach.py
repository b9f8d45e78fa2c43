"""A learner that was cut off and lives re-attaches: it is asked at once what its rounds lack."""

from __future__ import annotations

import pytest

from dd_lightning.protocol.messages import HELD, Progress, Pull, Rejoin
from tests.scripted_core import TOKENS, ScriptedCore

pytestmark = pytest.mark.unit


@pytest.fixture
def core() -> ScriptedCore:
    """Round 1 is open and waits for both."""
    return ScriptedCore(2, quorum=2).started("0", "1").opened(1)


def reattach(core: ScriptedCore, learner: str = "0") -> None:
    """Over a new connection, while the syncer takes the old one for alive."""
    step = core.steps[learner]
    core.join(
        learner, session="new", number=2, continues=True, generation=1, step=step,
        versions=((1, 0), (1, 0)), odometer=TOKENS * step,
        pending=((step, TOKENS * step),) * 2,
    )  # fmt: skip


def test_the_pull_of_an_open_round_comes_with_the_welcome(core) -> None:
    assert [pull.generation for pull in core.sent("0", Pull)] == [1]
    reattach(core)
    (pull,) = core.sent("new", Pull)  # at the same instant: no pull timeout has passed
    assert (pull.round, pull.generation, pull.base) == (1, 2, HELD)
    core.receive("new", core.contribution("0", 1, generation=2), payload="x")
    core.receive("1", core.contribution("1", 1), payload="x")
    (merge,) = core.merges
    assert [(held.learner, held.generation) for held in merge.contributions] == [("0", 2), ("1", 1)]


def test_it_is_not_asked_twice_within_a_pull_timeout(core) -> None:
    reattach(core)
    core.advance(3.5, beats=("0", "1"))  # the timeout is four median steps, of 1 s each
    assert len(core.sent("new", Pull)) == 1
    core.advance(1.0, beats=("0", "1"))
    assert len(core.sent("new", Pull)) == 2


def test_what_it_has_handed_in_is_not_asked_again(core) -> None:
    core.receive("0", core.contribution("0", 1), payload="x")
    reattach(core)
    assert core.sent("new", Pull) == []


def test_late_bytes_of_the_old_connection_do_nothing(core) -> None:
    late = core.contribution("0", 1)
    reattach(core)
    before = len(core.actions)
    core.receive("0", late, payload="x")
    core.receive("0", Progress(generation=1, step=99, odometer=990))
    said = [type(message) for message in core.sent("0", Rejoin)]
    assert said == [Rejoin, Rejoin] and len(core.actions) == before + 2
    assert core.member("0").step < 99 and core.merges == []
