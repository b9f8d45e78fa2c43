"""`summary.json`, computed from the tape alone (figures: `design.md`, "Promised interfaces").

Any prefix of a tape gives a valid summary: a run that was cut short has one too.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dd_lightning.report.lives import Lives, Times, times
from dd_lightning.report.losses import Losses
from dd_lightning.report.observer import Event, Observer, finite, spread
from dd_lightning.report.rounds import Rounds
from dd_lightning.report.tokens import KINDS, Tokens

STATUSES = ("finished", "failed", "interrupted")
MODES = ("processes", "simulate")


class RunFacts(Observer):
    """What a tape says of the run as a whole: configuration, seed, end, duration."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.seed = 0
        self.versions: dict[str, str] = {}
        self.status: str | None = None
        self.parameters_sha256: str | None = None
        self.seconds = 0.0

    def feed(self, event: Event) -> None:
        if event["event"] not in ("evaluation", "run_end"):  # appended after the syncer's exit
            self.seconds = max(self.seconds, finite(event["t_s"]) or 0.0)
        super().feed(event)

    def on_run(self, event: Event) -> None:
        self.config = dict(event["config"] or {})
        self.seed = int(event["seed"] or 0)
        self.versions = dict(event["versions"] or {})

    def on_syncer_start(self, event: Event) -> None:
        self.status = self.parameters_sha256 = None  # a resumed run has not ended yet

    def on_run_end(self, event: Event) -> None:
        self.status = event["status"]
        digest = event.get("parameters_sha256")
        if isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest):
            self.parameters_sha256 = digest
        self.seconds = finite(event.get("seconds")) or max(self.seconds, event["t_s"])

    @property
    def planned(self) -> int | None:
        """Number of learners the run was planned with."""
        learners = self.config.get("learners")
        return learners if isinstance(learners, int) and learners > 0 else None

    @property
    def task(self) -> str:
        """Name of the task; "" for a syncer that was started alone."""
        task = self.config.get("task")
        return str(task.get("name", "") if isinstance(task, Mapping) else task or "")

    @property
    def mode(self) -> str:
        """`processes` unless the run says `simulate`."""
        mode = self.config.get("mode")
        return mode if mode in MODES else MODES[0]


class RunReader:
    """All observers of a tape that the summary needs, fed together in one pass."""

    def __init__(self) -> None:
        self.facts, self.lives, self.rounds = RunFacts(), Lives(), Rounds()
        self.tokens, self.losses = Tokens(), Losses()

    def feed(self, event: Event) -> None:
        """Take the next event of the tape."""
        for observer in (self.facts, self.lives, self.rounds, self.tokens, self.losses):
            observer.feed(event)

    def summary(self, status: str | None = None) -> dict[str, Any]:
        """The summary of what was read so far.

        `status`: what the launcher knows; else what the tape says; else "failed" (no run_end).
        """
        facts, lives, rounds = self.facts, self.lives, self.rounds
        clock = times(lives, facts.planned)
        learners = self._learners(clock)
        totals = self.tokens.totals([entry["ledger"] for entry in learners.values()])
        merges = spread(rounds.per_fragment)
        steps = [entry["steps"] for entry in learners.values()]
        train = [life.loss for life in lives.learners.values() if life.loss is not None]
        return {
            "status": status or facts.status or "failed",
            "mode": facts.mode,
            "task": facts.task,
            "seconds": facts.seconds,
            "learners": facts.planned or max(1, len(learners)),
            "seed": facts.seed,
            "rounds": rounds.num_merges,
            "effective_h": statistics.median(steps) / merges["mean"]
            if steps and merges["mean"]
            else None,
            "per_learner": learners,
            "merges_per_fragment": merges,
            "contributors": rounds.contributor_spread,
            "goodput": clock.goodput,
            "uptime": clock.uptime,
            "tokens_merged_share": totals["merged"] / totals["processed"]
            if totals["processed"]
            else 0.0,
            "bytes": {
                way: sum(entry["wire_bytes"][way] for entry in learners.values())
                for way in ("up", "down")
            },
            "loss": {
                "initial": self.losses.initial,
                "validation": self.losses.validation,
                "train_last": statistics.fmean(train) if train else None,
            },
            "metrics": self.losses.metrics,
            "parameters_sha256": facts.parameters_sha256,
            "versions": facts.versions,
        }

    def _learners(self, clock: Times) -> dict[str, dict[str, Any]]:
        return {
            name: self._learner(name, clock) for name in sorted(self.lives.learners, key=_order)
        }

    def _learner(self, name: str, clock: Times) -> dict[str, Any]:
        life = self.lives.learners[name]
        ledger = self.tokens.ledger(name, life.odometer)
        totals = self.tokens.totals([ledger])
        tokens = {kind: _divide(totals[kind], self.tokens.scale) for kind in KINDS}
        return {
            "strategy": life.strategy,
            "ranks": life.ranks,
            "steps": life.steps,
            "steps_unreported_max": life.steps_unreported_max,
            "tokens": tokens["processed"] if ledger else life.odometer,
            "tokens_merged": tokens["merged"],
            "tokens_lost": tokens["lost"],
            "tokens_pending": tokens["pending"] if ledger else life.odometer,
            "ledger": ledger,
            "joins": life.joins,
            "seconds_stepping": life.seconds_stepping,
            "seconds_alive": clock.alive[name],
            **life.measured,
            "wire_bytes": {"up": life.bytes_up, "down": life.bytes_down},
            "rounds_share": self.rounds.share(name),
        }


def summarize(
    events: Iterable[Event],
    *,
    status: str | None = None,
    evaluations: Iterable[Event] = (),
) -> dict[str, Any]:
    """The summary of a tape, in one pass; memory grows with learners, fragments and rounds only.

    Args:
        status: finished | failed | interrupted; None: what the tape says, "failed" if it does not.
        evaluations: `evaluation` events that are not on the tape (yet).

    Raises:
        ValueError: `status` is none of the three.
    """
    if status is not None and status not in STATUSES:
        raise ValueError(f"status is {status!r}; allowed: {' | '.join(STATUSES)}, or None.")
    reader = RunReader()
    for event in events:
        reader.feed(event)
    for event in evaluations:
        reader.feed({"t_s": 0.0, **event, "event": "evaluation"})
    return reader.summary(status)


def write_summary(run_dir: str | os.PathLike[str], summary: Mapping[str, Any]) -> Path:
    """Write `summary.json` in one rename, so that no reader sees half of it."""
    path = Path(run_dir) / "summary.json"
    write_atomically(path, json.dumps(summary, indent=1, allow_nan=False).encode() + b"\n")
    return path


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary name beside `path`, then rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)


def _divide(total: int, scale: int) -> int | float:
    whole, rest = divmod(total, scale)
    return total / scale if rest else whole


def _order(name: str) -> tuple[int, int, str]:
    """Learners "0", "1", ... "10" by number, then named ones by name."""
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)
