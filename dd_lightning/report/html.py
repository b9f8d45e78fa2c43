"""`report.html` of a run; every text from the run is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from dd_lightning.report.answer import Told, answer, question
from dd_lightning.report.comparison import FORMULA, format_bytes
from dd_lightning.report.page import as_json, figure, render_page

TITLES = {
    "loss_tokens": "Validation loss of Θ against tokens",
    "loss_time": "Validation loss of Θ against time",
    "timeline": "Learners, rounds and versions",
    "bytes_per_second": "Bytes on the wire",
    "contributors": "Contributors of each merge",
    "tokens_lost": "Where the tokens went",
}
MOST_WARNINGS = 50
MOST_FAULTS = 200


@dataclass(frozen=True, slots=True)
class Report:
    """What the page shows. `warnings`: text to how often it was given."""

    told: Told
    warnings: Mapping[str, int] = field(default_factory=dict)
    faults: Sequence[str] = ()  # one sentence each: what was injected, what followed
    figures: Sequence[Path] = ()
    note: str = ""  # said above the figures, e.g. why there are none


def render_html(report: Report) -> str:
    """The whole page of a run."""
    told, summary = report.told, report.told.summary
    status, task = summary["status"], summary["task"] or "a run"
    said = f'<b class="{status}">{status.capitalize()}:</b> {escape(answer(told))}'
    figures = "".join(figure(path, TITLES.get(path.stem, path.stem)) for path in report.figures)
    body = f"""{_tiles(summary)}
<h2>Figures</h2>
{f'<p class="note">{escape(report.note)}</p>' if report.note else ""}
<div class="figures">{figures}</div>
<h2>Learners</h2>
{_learners(summary)}
{_faults(report.faults)}
{_warnings(report.warnings)}
<h2>Bytes compared</h2>
<p class="note">Data-parallel: {escape(FORMULA)}; parameters = {told.parameters:,}. This run: all
bytes that {_counted(told)}.</p>
<h2>Parameters</h2>
<p class="note">SHA-256 of Θ: <code>{escape(summary["parameters_sha256"] or "none")}</code></p>
<h2>Summary and configuration</h2>
<details><summary>Versions</summary>{as_json(summary["versions"])}</details>
<details><summary>Configuration</summary>{as_json(told.config)}</details>
<details><summary>summary.json</summary>{as_json(summary)}</details>"""
    what = f"{task} · {summary['mode']} · seed {summary['seed']}"
    return render_page(f"{task}: {status}", what, question(told), said, body)


def _counted(told: Told) -> str:
    if told.is_data_parallel:
        return "members sent (up) and received (down), so that each is counted twice"
    return "the syncer's sockets received and sent"


def _tiles(summary: Mapping[str, Any]) -> str:
    merges, people = summary["merges_per_fragment"]["mean"], summary["contributors"]["mean"]
    tiles = {
        "goodput": f"{summary['goodput']:.1%}",
        "uptime": f"{summary['uptime']:.1%}",
        "tokens merged": f"{summary['tokens_merged_share']:.1%}",
        "rounds merged": f"{summary['rounds']:,}",
        "merges per fragment": _number(merges),
        "contributors per merge": _number(people),
        "effective H, steps": _number(summary["effective_h"]),
        "up": format_bytes(summary["bytes"]["up"]),
        "down": format_bytes(summary["bytes"]["down"]),
        "last training loss": _number(summary["loss"]["train_last"]),
        **{name.replace("_", " "): _number(value) for name, value in summary["metrics"].items()},
    }
    cells = (
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in tiles.items()
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _learners(summary: Mapping[str, Any]) -> str:
    heads = (
        "learner", "strategy", "ranks", "steps", "joins", "tokens", "merged", "lost", "pending",
        "stepping", "alive", "step p50", "step p99", "RTT", "rounds", "up", "down",
    )  # fmt: skip
    rows = []
    for name, one in summary["per_learner"].items():
        tokens = one["tokens"] or 1
        cells = [
            name,
            one["strategy"],
            str(one["ranks"]),
            f"{one['steps']:,}",
            str(one["joins"]),
            f"{one['tokens']:,.0f}",
            *(f"{one[f'tokens_{kind}'] / tokens:.1%}" for kind in ("merged", "lost", "pending")),
            f"{one['seconds_stepping']:.1f} s",
            f"{one['seconds_alive']:.1f} s",
            *(_milliseconds(one[f"step_seconds_p{share}"]) for share in (50, 99)),
            "–" if one["rtt_ms_p50"] is None else f"{one['rtt_ms_p50']:.0f} ms",
            f"{one['rounds_share']:.1%}",
            *(format_bytes(one["wire_bytes"][way]) for way in ("up", "down")),
        ]
        rows.append("".join(f"<td>{escape(cell)}</td>" for cell in cells))
    head = "".join(f"<th>{head}</th>" for head in heads)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    empty = "" if rows else '<p class="note">No learner joined.</p>'
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>{empty}'


def _warnings(warnings: Mapping[str, int]) -> str:
    if not warnings:
        return ""
    shown = list(warnings.items())[:MOST_WARNINGS]
    items = (
        f"<li>{escape(text)}{f' ({count} times)' if count > 1 else ''}</li>"
        for text, count in shown
    )
    left = len(warnings) - len(shown)
    more = f'<p class="note">{left} more are on the tape.</p>' if left else ""
    return f"<h2>Warnings</h2><ul>{''.join(items)}</ul>{more}"


def _faults(faults: Sequence[str]) -> str:
    if not faults:
        return ""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in faults[:MOST_FAULTS])
    left = len(faults) - MOST_FAULTS
    more = f'<p class="note">{left} more are on the tape.</p>' if left > 0 else ""
    return f"<h2>Faults and what followed</h2><ul>{items}</ul>{more}"


def _number(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:,.4g}" if isinstance(value, int | float) else str(value)


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.3g} ms"
