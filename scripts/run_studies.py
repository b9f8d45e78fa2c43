"""Runs studies and brings docs/results up to date: figures, and each study's part of README.md.

python scripts/run_studies.py [merge_rule heterogeneous ...] [--jobs 2] [--keep FOLDER]
"""

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dd_lightning.report.answer import format_seconds
from dd_lightning.report.read import runs_in
from dd_lightning.report.study_report import report_study

HOME = Path(__file__).resolve().parent.parent
RESULTS = HOME / "docs" / "results"
PAGE = RESULTS / "README.md"
TOOK = "took.txt"
UNPUBLISHED = "pareto.png"  # the table says it
BEGIN, END = "<!-- results of {} -->", "<!-- end of {} -->"


def play(name: str, sweep: Path, jobs: int) -> None:
    """Run the study's one command, and note beside the runs how long it took."""
    command = [sys.executable, "-m", "dd_lightning.cli", "launch", f"experiment={name}"]
    command += [f"hydra.launcher.n_jobs={jobs}", f"hydra.sweep.dir={sweep}"]
    began, before = time.monotonic(), cpu_s()
    subprocess.run(command, check=True, stdout=sys.stderr)
    took, used = time.monotonic() - began, cpu_s() - before
    said = f"{format_seconds(took)} with {jobs} at a time, {format_seconds(used)} of one core"
    (sweep / TOOK).write_text(said)


def cpu_s() -> float:
    """Seconds of CPU of children that have ended, joblib's among them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def publish(name: str, sweep: Path) -> None:
    """Copy the figures; put table, figures and command between the page's two marks."""
    runs = runs_in(sweep)
    study = report_study(sweep, runs)
    lines = [study.table]
    figures = (file for file in study.files if file.suffix == ".png" and file.name != UNPUBLISHED)
    for figure in figures:
        target = RESULTS / f"{name}_{figure.name}".replace("_study.png", ".png")
        shutil.copyfile(figure, target)
        lines.append(f"![{name.replace('_', ' ')}]({target.name})\n")
    seeds = sorted({seed for row in study.json["rows"] for seed in row["seeds"]})
    said = f"seeds {', '.join(map(str, seeds))}; {len(runs)} runs; {(sweep / TOOK).read_text()}"
    lines.append(f"`dd-lightning launch experiment={name}` ({said})\n")
    write_between(name, lines)


def write_between(name: str, lines: list[str]) -> None:
    """Put lines between the page's two marks of that name.

    Raises:
        ValueError: the page has none.
    """
    text, begin, end = PAGE.read_text(), BEGIN.format(name), END.format(name)
    if begin not in text or end not in text:
        raise ValueError(f"{PAGE} has no {begin} ... {end}: add the study's question there first.")
    before, rest = text.split(begin)
    PAGE.write_text(before + begin + "\n" + "\n".join(lines) + end + rest.split(end)[1])


def main() -> None:
    """Play and publish one study after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", metavar="STUDY")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--keep", type=Path, help="of runs; those there are not repeated")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.keep or Path(temporary)).absolute()
        for name in arguments.names:
            if not (folder / name / TOOK).exists():
                play(name, folder / name, arguments.jobs)
            publish(name, folder / name)


if __name__ == "__main__":
    main()
