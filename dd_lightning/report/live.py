"""The live view of a run, from the syncer's status: rich tables, or one plain line.

`dd-lightning launch` shows `status.json`, `dd-lightning status` what the syncer answers.

Every key of the status is optional: what is missing is shown as a dash. The syncer does not know
`validation_loss` (the evaluator's newest); whoever shows the table adds it to the status.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, JustifyMethod, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dd_lightning.report.cells import DASH, count, cut, fixed, percent, size
from dd_lightning.report.observer import finite

STATE_STYLES = {
    "training": "green",
    "paused": "yellow",
    "joining": "cyan",
    "finishing": "blue",
    "gone": "dim",
    "lost": "bold red",
}
MOST_ROUNDS = 6  # open rounds that are shown one by one
MOST_FRAGMENTS = 24  # whose merges are shown one by one


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table of learners: what of a learner's row is shown, and how."""

    head: str
    key: str
    show: Callable[[Any], str | Text]
    right: bool = True


def _text(value: Any) -> str:
    return escape(cut(str(value))) if value not in (None, "") else DASH


def _state(value: Any) -> Text:
    state = str(value or DASH)
    return Text(state, style=STATE_STYLES.get(state, ""))


def _error(value: Any) -> Text:
    return Text(cut(str(value or "")), style="red")


TRAINING = (
    Column("state", "state", _state, right=False),
    Column("step", "step", count),
    Column("steps/s", "steps_per_s", lambda v: fixed(v, 2)),
    Column("tokens/s", "tokens_per_s", count),
    Column("loss", "loss", lambda v: fixed(v, 3)),
    Column("version gap", "version_gap", count),
    Column("RTT", "rtt_ms", lambda v: fixed(v, 0, " ms")),
    Column("rounds", "rounds_share", percent),
    Column("silent", "silent_s", lambda v: fixed(v, 1, " s")),
    Column("last error", "last_error", _error, right=False),
)
LINK = (
    Column("strategy", "strategy", _text, right=False),
    Column("slot", "data_slot", count),
    Column("generation", "generation", count),
    Column("joins", "joins", count),
    Column("peer", "peer", _text, right=False),
    Column("rho", "rho_s", lambda v: fixed(v, 3, " s")),
    Column("up", "bytes_up", size),
    Column("down", "bytes_down", size),
    Column("up/s", "bytes_up_per_s", size),
    Column("down/s", "bytes_down_per_s", size),
    Column("merged", "tokens_merged", count),
    Column("lost", "tokens_lost", count),
    Column("pending", "tokens_pending", count),
)


def render(status: Mapping[str, Any]) -> RenderableType:
    """Two tables with a row per learner (training; link and tokens), and below them the open
    rounds, the run's own figures and its newest warning."""
    learners = _learners(status)
    lines: list[RenderableType] = [
        _table(TRAINING, learners, _title(status)),
        _table(LINK, learners, None),
        *(Text(_open_round(_mapping(one))) for one in (status.get("rounds") or ())[:MOST_ROUNDS]),
        Text(_rounds(status)),
        Text(_pace(status)),
        Text(_totals(status)),
        Text(_keeping(status)),
    ]
    warnings = status.get("warnings") or ()
    if warnings:
        lines.append(Text(f"warning: {warnings[-1]}", style="yellow"))
    return Group(*lines)


def _table(
    columns: Sequence[Column], learners: Mapping[str, Mapping[str, Any]], title: str | None
) -> Table:
    table = Table(expand=True, title=title, title_justify="left", pad_edge=False)
    table.add_column("learner", no_wrap=True)
    for column in columns:
        justify: JustifyMethod = "right" if column.right else "left"
        table.add_column(column.head, justify=justify, no_wrap=True)
    for name, learner in learners.items():
        table.add_row(escape(name), *(one.show(learner.get(one.key)) for one in columns))
    return table


def plain_line(status: Mapping[str, Any]) -> str:
    """One line for a log: the run, then each learner's state and step."""
    learners = "; ".join(
        f"{name} {learner.get('state') or DASH} {count(learner.get('step'))}"
        for name, learner in _learners(status).items()
    )
    parts = (_title(status), _rounds(status), _totals(status), learners or "no learner yet")
    return " | ".join(parts)


def _title(status: Mapping[str, Any]) -> str:
    title = f"{fixed(status.get('t_s'), 0, ' s')} {status.get('state') or DASH}"
    if status.get("run_id"):
        up = fixed(status.get("uptime_s"), 0, " s")
        title += f", run {status['run_id']}, epoch {count(status.get('epoch'))}, up {up}"
    return title


def _open_round(one: Mapping[str, Any]) -> str:
    came = ", ".join(map(str, one.get("contributed") or ())) or "nobody"
    roster = ", ".join(map(str, one.get("roster") or ())) or "nobody"
    left = one.get("grace_left_s")
    phase = (
        "being merged"
        if one.get("merging")
        else "waits for its quorum"
        if left is None
        else f"grace {fixed(left, 2, ' s')} left"
    )
    return ", ".join(
        (
            f"round {count(one.get('round'))} of fragment {count(one.get('fragment'))}"
            + (" (re-anchor)" if one.get("reanchor") else ""),
            f"{fixed(one.get('age_s'), 1, ' s')} old: {came} of {roster}",
            f"quorum {count(one.get('quorum'))}",
            phase,
        )
    )


def _rounds(status: Mapping[str, Any]) -> str:
    versions = [one for one in map(_version, status.get("versions") or ()) if one is not None]
    spread = f"{min(versions)}–{max(versions)}" if versions else DASH
    return ", ".join(
        (
            f"round {count(status.get('next_round'))} ({count(status.get('open_rounds'))} open)",
            f"quorum {count(status.get('quorum'))}",
            f"grace {fixed(status.get('grace_s'), 2, ' s')}",
            f"merges {count(status.get('merges'))} (versions {spread})",
        )
    )


def _pace(status: Mapping[str, Any]) -> str:
    versions = status.get("versions") or ()
    merges = [count(_version(one)) for one in versions[:MOST_FRAGMENTS]]
    more = " …" if len(versions) > MOST_FRAGMENTS else ""
    wanted = count(status.get("sync_every"))
    return ", ".join(
        (
            f"{fixed(status.get('merges_per_min'), 1)} merges/min",
            f"effective H {fixed(status.get('effective_h'), 1)} of {wanted}",
            f"run clock {count(status.get('run_clock'))}",
            f"rounds in flight at most {count(status.get('max_in_flight'))}",
            f"merges per fragment {' '.join(merges) or DASH}{more}",
        )
    )


def _keeping(status: Mapping[str, Any]) -> str:
    checkpoint = _mapping(status.get("checkpoint"))
    written = f"checkpoint {checkpoint.get('file') or DASH}"
    if checkpoint.get("file"):
        written += f" ({fixed(checkpoint.get('age_s'), 0, ' s')} ago)"
    return ", ".join(
        (
            written,
            f"refused {count(status.get('refusals'))}",
            f"malformed {count(status.get('malformed'))}",
            f"queries refused {count(status.get('refused_queries'))}",
        )
    )


def _totals(status: Mapping[str, Any]) -> str:
    wire = _mapping(status.get("bytes")) or _wire_of(_learners(status).values())
    return ", ".join(
        (
            f"tokens merged {count(status.get('tokens_merged'))}",
            f"up {size(wire.get('up'))}",
            f"down {size(wire.get('down'))}",
            f"validation loss {fixed(status.get('validation_loss'), 4)}",
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
