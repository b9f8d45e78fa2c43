"""The live view of a run, from the syncer's `status.json`: a rich table, or one plain line.

Every key of the status is optional: what is missing is shown as a dash. The syncer does not know
`validation_loss` (the evaluator's newest); whoever shows the table adds it to the status.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dd_lightning.report.comparison import format_bytes
from dd_lightning.report.observer import finite

STATE_STYLES = {
    "training": "green",
    "paused": "yellow",
    "joining": "cyan",
    "finishing": "blue",
    "gone": "dim",
    "lost": "bold red",
}
DASH = "–"
MOST_ERROR = 60  # characters of an error in the table; its log has the rest


def render(status: Mapping[str, Any]) -> RenderableType:
    """A row per learner, and below it the run's own figures and its newest warning."""
    table = Table(expand=True, title=_title(status), title_justify="left", pad_edge=False)
    for head, right in (
        ("learner", False),
        ("state", False),
        ("step", True),
        ("tokens/s", True),
        ("loss", True),
        ("version gap", True),
        ("RTT", True),
        ("rounds", True),
        ("last error", False),
    ):
        table.add_column(head, justify="right" if right else "left", no_wrap=True)
    for name, learner in _learners(status).items():
        state = str(learner.get("state") or DASH)
        table.add_row(
            escape(name),
            Text(state, style=STATE_STYLES.get(state, "")),
            _count(learner.get("step")),
            _count(learner.get("tokens_per_s")),
            _fixed(learner.get("loss"), 3),
            _count(learner.get("version_gap")),
            _fixed(learner.get("rtt_ms"), 0, " ms"),
            _percent(learner.get("rounds_share")),
            Text(_cut(str(learner.get("last_error") or "")), style="red"),
        )
    lines: list[RenderableType] = [table, Text(_rounds(status)), Text(_totals(status))]
    warnings = status.get("warnings") or ()
    if warnings:
        lines.append(Text(f"warning: {warnings[-1]}", style="yellow"))
    return Group(*lines)


def plain_line(status: Mapping[str, Any]) -> str:
    """One line for a log: the run, then each learner's state and step."""
    learners = "; ".join(
        f"{name} {learner.get('state') or DASH} {_count(learner.get('step'))}"
        for name, learner in _learners(status).items()
    )
    parts = (_title(status), _rounds(status), _totals(status), learners or "no learner yet")
    return " | ".join(parts)


def _title(status: Mapping[str, Any]) -> str:
    return f"{_fixed(status.get('t_s'), 0, ' s')} {status.get('state') or DASH}"


def _rounds(status: Mapping[str, Any]) -> str:
    versions = [one for one in map(_version, status.get("versions") or ()) if one is not None]
    spread = f"{min(versions)}–{max(versions)}" if versions else DASH
    return ", ".join(
        (
            f"round {_count(status.get('next_round'))} ({_count(status.get('open_rounds'))} open)",
            f"quorum {_count(status.get('quorum'))}",
            f"grace {_fixed(status.get('grace_s'), 2, ' s')}",
            f"merges {_count(status.get('merges'))} (versions {spread})",
        )
    )


def _totals(status: Mapping[str, Any]) -> str:
    wire = _mapping(status.get("bytes")) or _wire_of(_learners(status).values())
    return ", ".join(
        (
            f"tokens merged {_count(status.get('tokens_merged'))}",
            f"up {_bytes(wire.get('up'))}",
            f"down {_bytes(wire.get('down'))}",
            f"validation loss {_fixed(status.get('validation_loss'), 4)}",
        )
    )


def _wire_of(learners: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Sums over the learners' present connections, where the status has no sums of its own."""
    rows = list(learners)
    return {
        way: sum(finite(row.get(f"bytes_{way}")) or 0.0 for row in rows)
        for way in ("up", "down")
        if any(f"bytes_{way}" in row for row in rows)
    }


def _learners(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    found = _mapping(status.get("learners"))
    return {str(name): _mapping(learner) for name, learner in found.items()}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _version(value: Any) -> int | None:
    """n of [epoch, n], or n."""
    last = value[-1] if isinstance(value, list | tuple) and value else value
    return last if isinstance(last, int) else None


def _count(value: Any) -> str:
    number = finite(value)
    return DASH if number is None else f"{number:,.0f}"


def _fixed(value: Any, digits: int, unit: str = "") -> str:
    number = finite(value)
    return DASH if number is None else f"{number:.{digits}f}{unit}"


def _percent(value: Any) -> str:
    number = finite(value)
    return DASH if number is None else f"{number:.0%}"


def _bytes(value: Any) -> str:
    number = finite(value)
    return DASH if number is None else format_bytes(number)


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST_ERROR else f"{line[: MOST_ERROR - 1]}…"
