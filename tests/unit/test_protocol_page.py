"""The one-page protocol says what the code does: messages, states, causes, defaults, example."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest

import dd_lightning
from dd_lightning.algorithm import contribution_weight
from dd_lightning.protocol import members, messages
from dd_lightning.protocol.config import AlgorithmConfig, SyncerConfig, Timeouts
from dd_lightning.protocol.estimates import GraceEstimator, Lateness
from dd_lightning.protocol.rounds import RoundBook

pytestmark = pytest.mark.unit
PAGE = (Path(dd_lightning.__file__).parent / "README.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def rows(text: str, heading: str) -> list[list[str]]:
    """Cells of the table whose first heading is `heading`."""
    table = text.split(f"| {heading} |", 1)[1].split("\n\n", 1)[0]
    lines = table.splitlines()[2:]
    cells = [re.split(r"(?<!\\)\|", line.strip().strip("|")) for line in lines]
    return [[cell.strip().replace("\\|", "|") for cell in row] for row in cells]


@pytest.mark.parametrize(
    ("heading", "union"),
    [
        ("learner to syncer", messages.TO_SYNCER),
        ("syncer to learner", messages.TO_LEARNER),
        ("operator and syncer", messages.Query | messages.Answer),
    ],
)
def test_every_message_and_no_other(heading, union) -> None:
    named = rows(section("Messages"), heading)
    told = [re.match(r"`(\w+)`( \*)?$", row[0]).groups() for row in named]
    kinds = {kind.__name__: kind for kind in get_args(union)}
    assert [name for name, _ in told] == list(kinds)
    for name, payload in told:
        assert (payload is not None) == ("payload" in kinds[name].__struct_fields__), name


def test_every_state_in_order() -> None:
    states = [members.JOINING, members.TRAINING, members.PAUSED, members.FINISHING]
    states += [members.GONE, members.LOST]
    told = re.findall(r"`([a-z]+)`", section("States of a learner"))
    assert list(dict.fromkeys(told)) == states


@pytest.mark.parametrize(
    ("heading", "values"),
    [
        ("`timeouts.`", Timeouts()),
        ("`algorithm.`", AlgorithmConfig()),
        ("`algorithm.`", SyncerConfig.load({}).algorithm),
    ],
)
def test_every_default(heading, values) -> None:
    table = rows(section("Defaults"), heading)
    told = {row[0].strip("`"): json.loads(row[1].strip("`")) for row in table}
    assert told == {name: getattr(values, name) for name in values.__struct_fields__}
    assert all(row[2] for row in table)


def test_every_cause_of_a_loss() -> None:
    text = section("The life of a round") + section("What is lost when")
    for cause in ("overlap", "absent", "dead", "unsent", "rollback"):
        assert f"`{cause}`" in text


def test_the_example_in_numbers() -> None:
    text = section("The life of a round")
    book = RoundBook(fragments=4, sync_every=8, next_round=5)
    assert not book.due(9) and book.due(10) and book.fragment_of(5) == 0
    usual = Lateness()
    usual.mean.value, usual.deviation.value = 0.5, 0.2
    grace = GraceEstimator("lateness", 0.8, 2, max(2.0, 8 / 6))
    grace.quorum.value, grace.sync.value = 0.6, 1.5
    assert grace.window(1.0, 1.0, [usual.bound]) == pytest.approx(1.1)
    assert "= 1.1 s" in text
    weights = [contribution_weight(80, 8, 8), contribution_weight(60, 6, 8)]
    assert weights == [800, 600]
    assert "4/11, 4/11, 3/11" in text
