"""`study.html` of a multirun: its question and answer, figures, the table, how to play it again."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from dd_lightning.report.page import as_json, figure, render_page
from dd_lightning.report.pareto import costs_of, front, points
from dd_lightning.report.study import Group, Spread, Study, short
from dd_lightning.report.study_measures import measure_of
from dd_lightning.report.study_table import as_json as study_json
from dd_lightning.report.study_table import cell, markdown

TITLES = {
    "study": "What was swept",
    "pareto": "What a loss costs",
    "curves": "Validation loss on the way",
    "timeline": "Who computes, waits and sends",
}
WORDS = {"seconds": "time", "bytes": "bytes", "faults": "faults withstood"}
MOST_OF_A_FRONT = 4


def question(study: Study) -> str:
    """The experiment's own (`study.question`), else one made of what was swept."""
    if study.plan.question:
        return study.plan.question
    names = [short(name).replace("_", " ") for name in study.swept]
    if not names:
        return "How far do runs of one configuration differ by their seed?"
    verb = "does" if len(names) == 1 else "do"
    return f"What {verb} {' and '.join(names)} change?"


def answer(study: Study) -> str:
    """Lowest and highest group by what is drawn first, beside the seeds' spread, and the fronts."""
    name = study.plan.drawn[0]
    ranked = [group for group in study.groups if group.measures[name] is not None]
    ranked.sort(key=lambda group: group.measures[name].mean)  # type: ignore[union-attr]
    runs = sum(len(group.runs) for group in study.groups)
    missing = sum(group.unfinished for group in study.groups)
    said = [f"{runs} runs of {len(study.groups)} settings"]
    said[0] += f", {missing} more did not finish" if missing else ""
    if len(ranked) > 1:
        said.append(_between(study, name, ranked[0], ranked[-1]))
    for cost in costs_of(study):
        best = front(points(study, cost), cost)
        names = [named(study, point.group) for point in best[:MOST_OF_A_FRONT]]
        more = f" and {len(best) - len(names)} more" if len(best) > len(names) else ""
        said.append(f"On the front of loss and {WORDS[cost]}: {'; '.join(names)}{more}")
    return " ".join(f"{one}." for one in said)


def _between(study: Study, name: str, low: Group, high: Group) -> str:
    """`Validation loss of Θ from 1.64 ± 0.01 (lan) to 1.70 ± 0.02 (us_eu)`, and what seeds do."""
    label = measure_of(name).label
    low_spread, high_spread = low.measures[name], high.measures[name]
    assert low_spread is not None and high_spread is not None  # they were ranked by it
    ends = [
        f"{cell(name, spread, len(group.runs))} ({named(study, group)})"
        for group, spread in ((low, low_spread), (high, high_spread))
    ]
    said = f"{label[:1].upper()}{label[1:]}: from {ends[0]} to {ends[1]}"
    seeds = _largest_std([group.measures[name] for group in study.groups])
    if not seeds:
        return said
    return f"{said}, {(high_spread.mean - low_spread.mean) / seeds:.1f} times the spread over seeds"


def _largest_std(spreads: Sequence[Spread | None]) -> float:
    return max((spread.std or 0.0 for spread in spreads if spread is not None), default=0.0)


def named(study: Study, group: Group) -> str:
    """The group by the values that were swept."""
    words = (
        f"{short(name)} {group.settings[name]}".replace("_", " ")
        if _is_number(group.settings[name])
        else str(group.settings[name]).replace("_", " ")
        for name in study.swept
    )
    return ", ".join(words) or "all runs"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def render_study(study: Study, folder: Path, figures: Sequence[Path]) -> str:
    """The whole page."""
    drawn = "".join(figure(path, TITLES.get(path.stem, path.stem)) for path in figures)
    first = next((group.runs[0] for group in study.groups if group.runs), None)
    seeds = sorted({run.summary["seed"] for group in study.groups for run in group.runs})
    seen = dict.fromkeys((first.summary["task"], first.summary["mode"])) if first else ()
    what = " · ".join(
        ["study", *(str(one) for one in seen), f"seeds {', '.join(map(str, seeds)) or 'none'}"]
    )
    body = f"""<div class="figures">{drawn}</div>
<h2>Means ± sample standard deviation over the runs of a setting</h2>
<div class="wide">{_table(markdown(study))}</div>
<p class="note">The same with least and most: study.csv; each run: study_runs.csv and report.html in
its folder below {escape(str(folder))}.</p>
<h2>All values</h2>
<details><summary>JSON</summary>{as_json(study_json(study))}</details>"""
    return render_page(
        f"study: {question(study)}", what, question(study), escape(answer(study)), body
    )


def _table(text: str) -> str:
    """The Markdown table as HTML."""
    head, _, *rows = [line.strip("| \n").split(" | ") for line in text.splitlines()]
    lines = ["".join(f"<th>{escape(one)}</th>" for one in head)]
    lines += ["".join(f"<td>{escape(one)}</td>" for one in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
