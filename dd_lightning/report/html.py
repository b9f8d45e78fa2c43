"""`report.html`: one file that opens anywhere, offline; every text from the run is escaped."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from dd_lightning.report.comparison import FORMULA, compare_bytes, format_bytes

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

CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --pale: #5b636d; --line: #d9dde2; --back: #fff;
  --card: #f5f7f9; --good: #00735a; --bad: #b3400a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaee; --pale: #9aa4af; --line: #333a42;
  --back: #14171b; --card: #1d2228; --good: #4cc9a6; --bad: #ff9a6b; } }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem; font: 16px/1.5 system-ui, sans-serif;
  color: var(--ink); background: var(--back); }
h1 { font-size: 1.1rem; color: var(--pale); font-weight: 600; margin: 0; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
.answer { font-size: 1.35rem; line-height: 1.4; margin: .4rem 0 1.2rem; }
.finished { color: var(--good); } .failed, .interrupted { color: var(--bad); }
.tiles { display: flex; flex-wrap: wrap; gap: .6rem; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .5rem .9rem; min-width: 7.5rem; }
.tile b { display: block; font-size: 1.2rem; } .tile span, .note { color: var(--pale);
  font-size: .88rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
th { color: var(--pale); font-weight: 600; font-size: .88rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem; }
figure { margin: 0; background: #fff; border: 1px solid var(--line); border-radius: .5rem;
  padding: .6rem; color: #222; } figure img { width: 100%; } figcaption { font-size: .9rem; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .8rem; overflow-x: auto; font-size: .85rem; }
@media (max-width: 30rem) { .figures { grid-template-columns: 1fr; } }
"""


@dataclass(frozen=True, slots=True)
class Report:
    """What the page shows. `warnings`: text to how often it was given."""

    summary: Mapping[str, Any]
    parameters: int  # trainable elements of Θ
    config: Mapping[str, Any]
    warnings: Mapping[str, int] = field(default_factory=dict)
    faults: Sequence[str] = ()  # one sentence each: what was injected, what followed
    figures: Sequence[Path] = ()
    note: str = ""  # said above the figures, e.g. why there are none

    @property
    def is_data_parallel(self) -> bool:
        """Whether this is the baseline, which has neither syncer nor contributions."""
        algorithm = self.config.get("algorithm")
        return isinstance(algorithm, Mapping) and algorithm.get("preset") == "data_parallel"


def answer(report: Report) -> str:
    """The run in one sentence, as plain text."""
    summary = report.summary
    loss, count = summary["loss"], summary["learners"]
    who = f"{count} learner{'s' if count > 1 else ''}"
    first, last = loss["initial"], loss["validation"]
    if first is not None and last is not None:
        verb = "brought" if last <= first else "moved"
        did = f"{who} {verb} the validation loss from {first:.3f} to {last:.3f}"
    else:
        did = f"{who} made {summary['rounds']} merges; no validation loss was measured"
    said = (
        f"{did} in {format_seconds(summary['seconds'])}, at {summary['goodput']:.1%} goodput"
        f" with {summary['tokens_merged_share']:.1%} of the tokens merged"
    )
    compared = compare_bytes(summary, report.parameters)
    if report.is_data_parallel:
        moved = summary["bytes"]["up"]
        said += f"; {format_bytes(moved)} went from member to member"
    elif compared["ratio"] is not None:
        said += (
            f"; {format_bytes(compared['sent'])} crossed the wire, where data-parallel training "
            f"would have sent {format_bytes(compared['data_parallel'])} "
            f"({compared['ratio']:.3g} times as much)"
        )
    return f"{said}."


def render_html(report: Report) -> str:
    """The whole page. It references nothing outside itself."""
    summary = report.summary
    status, task = escape(summary["status"]), escape(summary["task"] or "a run")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{task}: {status}</title>
<style>{CSS}</style>
</head>
<body>
<h1>dd_lightning · {task} · {escape(summary["mode"])} · seed {summary["seed"]}</h1>
<p class="answer"><b class="{status}">{status.capitalize()}:</b> {escape(answer(report))}</p>
{_tiles(report)}
<h2>Learners</h2>
{_learners(summary)}
{_faults(report.faults)}
{_warnings(report.warnings)}
<h2>Figures</h2>
{f'<p class="note">{escape(report.note)}</p>' if report.note else ""}
<div class="figures">{"".join(_figure(path) for path in report.figures)}</div>
<h2>Bytes compared</h2>
<p class="note">Data-parallel: {escape(FORMULA)}; parameters = {report.parameters:,}. This run: all
bytes that {_counted(report)}.</p>
<h2>Parameters</h2>
<p class="note">SHA-256 of Θ: <code>{escape(summary["parameters_sha256"] or "none")}</code></p>
<h2>Summary and configuration</h2>
<details><summary>Versions</summary>{_json(summary["versions"])}</details>
<details><summary>Configuration</summary>{_json(report.config)}</details>
<details><summary>summary.json</summary>{_json(summary)}</details>
</body>
</html>
"""


def _counted(report: Report) -> str:
    if report.is_data_parallel:
        return "members sent (up) and received (down), so that each is counted twice"
    return "the syncer's sockets received and sent"


def _tiles(report: Report) -> str:
    summary = report.summary
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


def _figure(path: Path) -> str:
    title = escape(TITLES.get(path.stem, path.stem))
    data = base64.b64encode(path.read_bytes()).decode()
    return (
        f'<figure><img alt="{title}" src="data:image/png;base64,{data}">'
        f"<figcaption>{title}</figcaption></figure>"
    )


def _json(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, indent=1, ensure_ascii=False))}</pre>"


def _number(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:,.4g}" if isinstance(value, int | float) else str(value)


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.3g} ms"


def format_seconds(seconds: float) -> str:
    """`42.1 s`, `5 min 08 s`, `2 h 05 min`."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
