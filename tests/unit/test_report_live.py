"""The live table and the plain line show what is there, and a dash for what is not."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dd_lightning.report.live import plain_line, render

pytestmark = pytest.mark.unit

STATUS = {
    "t_s": 12.3,
    "state": "running",
    "next_round": 14,
    "open_rounds": 2,
    "quorum": 3,
    "grace_s": 0.125,
    "merges": 120,
    "versions": [[1, 5], [1, 6]],
    "tokens_merged": 1_234_567,
    "bytes": {"up": 2**20, "down": 512},
    "warnings": ["older", "[bold]newest"],
    "validation_loss": 3.21,
    "learners": {
        "0": {
            "state": "training",
            "step": 120,
            "tokens_per_s": 8123.4,
            "version_gap": 7,
            "rtt_ms": 84.2,
            "rounds_share": 0.97,
            "loss": 2.2,
        },
        "[red]1": {"state": "lost", "last_error": "connection closed"},
    },
}


def shown(status: dict, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(status))
    return console.file.getvalue()


def test_table_has_a_row_per_learner_and_the_run_below() -> None:
    text = shown(STATUS)
    row = next(line for line in text.splitlines() if "training" in line)
    for cell in ("120", "8,123", "2.200", "7", "84 ms", "97%"):
        assert cell in row
    row = next(line for line in text.splitlines() if "[red]1" in line)
    assert "lost" in row and "connection closed" in row
    for part in ("round 14 (2 open)", "quorum 3", "versions 5–6", "up 1 MiB", "loss 3.2100"):
        assert part in text
    assert "[bold]newest" in text and "older" not in text


@pytest.mark.parametrize("key", [*STATUS, None])
def test_any_key_may_be_missing_or_null(key: str | None) -> None:
    without = {name: value for name, value in STATUS.items() if name != key}
    nulled = {**STATUS, key: None} if key else dict.fromkeys(STATUS)
    for status in (without, nulled):
        assert "learner" in shown(status)
        assert plain_line(status).count("\n") == 0


def test_learners_may_say_nothing() -> None:
    status = {"learners": {"0": {}, "1": None}}
    assert "–" in shown(status, width=60)
    assert plain_line(status).endswith("0 – –; 1 – –")


def test_plain_line_is_one_line_with_all_learners() -> None:
    line = plain_line(STATUS)
    assert "round 14 (2 open)" in line
    assert line.endswith("0 training 120; [red]1 lost –")


def test_bytes_are_summed_over_learners_where_the_status_has_no_sum() -> None:
    rows = {"0": {"bytes_up": 1000, "bytes_down": 5}, "1": {"bytes_up": 24}}
    assert "up 1 KiB, down 5 B" in plain_line({"learners": rows})
