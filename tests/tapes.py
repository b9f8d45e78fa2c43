"""Synthetic tapes: a builder, and a tape small enough to compute every figure by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema

from dd_lightning.protocol.tape import FIELDS

SCHEMA = json.loads((Path(__file__).parent / "schema" / "summary.schema.json").read_text())
DIGEST = "ab" * 32


def assert_valid(summary: dict[str, Any]) -> None:
    """The promised schema, and nothing that JSON lacks."""
    jsonschema.validate(summary, SCHEMA)
    json.dumps(summary, allow_nan=False)


@dataclass
class Tape:
    """Events in order; refuses one that the real writer would refuse."""

    events: list[dict[str, Any]] = field(default_factory=list)

    def add(self, event: str, t_s: float, **fields: Any) -> None:
        missing = set(FIELDS[event]) - set(fields)
        assert not missing, f"{event} lacks {missing}"
        self.events.append({"event": event, "t_s": t_s, **fields})

    def start(self, learners: int, elements: list[int], **config: Any) -> None:
        config = {"mode": "processes", "learners": learners, "task": {"name": "text"}, **config}
        self.add("run", 0.0, schema=1, config=config, seed=7, versions={"torch": "2.14.1"})
        self.add("syncer_start", 0.1, epoch=1, versions=[[1, 0] for _ in elements])
        names = [[f"layer{i}.weight"] for i in range(len(elements))]
        self.add("layout", 0.5, fragments=names, averaged=[], elements=elements, fingerprint="f0")

    def join(self, t_s: float, learner: str, generation: int = 1, **fields: Any) -> None:
        fields = {
            "cause": "new",
            "continues": False,
            "state_from": "cold",
            "state_step": 0,
            "data_position": 0,
            "strategy": "SingleDeviceStrategy",
            "ranks": 1,
            "incarnation": f"{learner}-{generation}",
            "planned": True,
            **fields,
        }
        self.add("join", t_s, learner=learner, generation=generation, **fields)

    def state(
        self, t_s: float, learner: str, state: str, generation: int = 1, **fields: Any
    ) -> None:
        self.add("state", t_s, learner=learner, generation=generation, state=state, **fields)

    def stats(
        self, t_s: float, learner: str, step: int, odometer: int, generation: int = 1, **fields: Any
    ) -> None:
        fields = {
            "incarnation": f"{learner}-{generation}",
            "last_report_s": t_s,
            "step_seconds_p50": 0.1,
            "step_seconds_p99": 0.2,
            "rtt_ms_p50": 10.0,
            "rho": None,
            "steps_unreported_max": 1,
            **fields,
        }
        self.add(
            "learner_stats",
            t_s,
            learner=learner,
            generation=generation,
            step=step,
            odometer=odometer,
            **fields,
        )

    def round_open(
        self, t_s: float, number: int, fragment: int, roster: list[list[Any]], epoch: int = 1
    ) -> None:
        self.add(
            "round_open",
            t_s,
            epoch=epoch,
            round=number,
            fragment=fragment,
            roster=roster,
            quorum=1,
        )

    def contribution(
        self, t_s: float, number: int, fragment: int, learner: str, tokens: int, **fields: Any
    ) -> None:
        fields = {
            "epoch": 1,
            "generation": 1,
            "step": 10,
            "steps": 10,
            "base_version": [1, 0],
            "digest": "00000000",
            "verdict": "accepted",
            "weight": float(tokens),
            "bytes": 1000,
            "final": False,
            "staleness": 0,
            **fields,
        }
        self.add(
            "contribution",
            t_s,
            round=number,
            fragment=fragment,
            learner=learner,
            tokens=tokens,
            **fields,
        )

    def merge(
        self, t_s: float, number: int, fragment: int, version: int, who: list[str], **fields: Any
    ) -> None:
        fields = {
            "epoch": 1,
            "quorum_s": 0.2,
            "grace_s": 0.1,
            "agreement": 0.8,
            "digest": "0123456789abcdef",
            "weights": [1.0] * len(who),
            "tokens_merged": 0,
            "reanchor": False,
            "last": False,
            "outer_norm": 0.5,
            "opened_s": t_s - 0.4,
            **fields,
        }
        version_key = [fields["epoch"], version]
        self.add(
            "merge",
            t_s,
            round=number,
            fragment=fragment,
            version=version_key,
            contributors=who,
            **fields,
        )

    def lost(self, t_s: float, learner: str, fragment: int, tokens: int, cause: str) -> None:
        self.add(
            "lost",
            t_s,
            learner=learner,
            generation=1,
            fragment=fragment,
            tokens=tokens,
            cause=cause,
        )

    def evaluation(self, t_s: float, loss: float | None, **fields: Any) -> None:
        fields = {"file": "step-1-0.ckpt", "metrics": {}, "checkpoint_t_s": t_s, **fields}
        self.add("evaluation", t_s, loss=loss, **fields)


def small_tape() -> list[dict[str, Any]]:
    """Two learners, two fragments of 300 and 100 elements, three merges; learner 1 is killed at
    t = 6 and joins again. `test_report_summary.py` computes its figures by hand."""
    tape = Tape()
    tape.start(2, [300, 100])
    tape.join(1.0, "0")
    tape.join(1.5, "1")
    tape.state(2.1, "0", "training", step=1, odometer=100, first_step_started_s=2.0)
    tape.state(3.1, "1", "training", step=1, odometer=100, first_step_started_s=3.0)
    both = [["0", 1], ["1", 1]]
    tape.round_open(4.0, 1, 0, both)
    tape.contribution(4.3, 1, 0, "0", 1000)
    tape.contribution(4.4, 1, 0, "1", 600)
    tape.merge(4.5, 1, 0, 1, ["0", "1"])
    tape.lost(4.7, "1", 0, 100, "overlap")
    tape.round_open(5.0, 2, 1, both)
    tape.stats(5.0, "0", 30, 3000, seconds_stepping=2.9, bytes_up=5000, bytes_down=2500, loss=2.0)
    tape.contribution(5.4, 2, 1, "0", 2000)
    tape.stats(6.0, "1", 20, 2000, seconds_stepping=3.0, bytes_up=1000, bytes_down=800, loss=3.0)
    tape.add("dead", 6.0, learner="1", generation=1, cause="connection closed")
    tape.merge(6.1, 2, 1, 1, ["0"])
    tape.join(7.0, "1", 2, state_from="checkpoint", state_step=10, cause="restart")
    tape.lost(7.0, "1", 0, 1300, "dead")
    tape.lost(7.0, "1", 1, 2000, "dead")
    tape.state(8.1, "1", "training", 2, step=11, odometer=100, first_step_started_s=8.0)
    tape.round_open(8.5, 3, 0, [["0", 1], ["1", 2]])
    tape.contribution(8.8, 3, 0, "0", 2000)
    tape.merge(9.0, 3, 0, 2, ["0"])
    tape.contribution(9.2, 3, 0, "1", 400, generation=2, verdict="late", staleness=None)
    tape.state(10.0, "0", "finishing", step=80, odometer=8000)
    tape.stats(12.0, "0", 80, 8000, seconds_stepping=7.5, bytes_up=9000, bytes_down=4500, loss=1.0)
    tape.stats(
        12.0, "1", 50, 4000, 2, seconds_stepping=3.8, bytes_up=2000, bytes_down=900, loss=1.5
    )
    tape.state(12.0, "1", "finishing", 2, step=50, odometer=4000)
    tape.add("leave", 13.0, learner="0", generation=1, cause="finished")
    tape.add("leave", 13.5, learner="1", generation=2, cause="finished")
    for learner, fragments in (
        ("0", [(8000, 3000, 0, 5000), (8000, 2000, 6000, 0)]),
        ("1", [(6000, 600, 1400, 4000), (6000, 0, 2000, 4000)]),
    ):
        names = ("processed", "merged", "lost", "pending")
        ledger = [dict(zip(names, entry, strict=True)) for entry in fragments]
        tape.add("ledger", 14.0, learner=learner, fragments=ledger)
    tape.add("run_end", 15.0, status="finished", parameters_sha256=DIGEST, seconds=15.0)
    tape.evaluation(15.1, 5.5, initial=True, checkpoint_t_s=0.5, tokens_merged=0)
    tape.evaluation(15.1, 4.0, checkpoint_t_s=6.2, tokens_merged=2600)
    tape.evaluation(15.1, 3.25, final=True, checkpoint_t_s=14.5, metrics={"bits_per_byte": 1.5})
    return tape.events
