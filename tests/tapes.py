"""Synthetic tapes: one small enough to compute every figure by hand, and a fleet of any size."""

from __future__ import annotations

import json
import random
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


def fleet_tape(
    learners: int = 4,
    rounds: int = 120,
    *,
    fragments: int = 4,
    seed: int = 0,
    config: dict[str, Any] | None = None,
    names: list[str] | None = None,
) -> list[dict[str, Any]]:
    """A fleet that behaves: overwrite applies, some absent, learner 1 dies half way and rejoins."""
    return _Fleet(learners, rounds, fragments, seed, config or {}, names).run()


class _Fleet:
    def __init__(
        self,
        learners: int,
        rounds: int,
        fragments: int,
        seed: int,
        config: dict[str, Any],
        names: list[str] | None,
    ) -> None:
        self.tape = Tape()
        self.names = names or [str(index) for index in range(learners)]
        self.rounds, self.fragments = rounds, fragments
        self.random = random.Random(seed)
        self.elements = [1000 + 10 * fragment for fragment in range(fragments)]
        self.tape.start(learners, self.elements, **config)
        self.generation = dict.fromkeys(self.names, 1)
        self.began = dict.fromkeys(self.names, 2.0)
        self.steps = dict.fromkeys(self.names, 0)
        self.base = dict.fromkeys(self.names, 0)  # steps of earlier incarnations
        self.mark = {name: [0] * fragments for name in self.names}  # tokens of this incarnation
        self.account = {
            name: [dict.fromkeys(("merged", "lost"), 0) for _ in range(fragments)]
            for name in self.names
        }
        self.versions = [0] * fragments
        self.merged = 0
        self.done_tokens = dict.fromkeys(self.names, 0)

    def odometer(self, name: str) -> int:
        return 64 * (self.steps[name] - self.base[name])

    def run(self) -> list[dict[str, Any]]:
        for index, name in enumerate(self.names):
            self.tape.join(1.0 + 0.1 * index, name)
            self.steps[name] = 1
            self.tape.state(
                2.1, name, "training", step=1, odometer=64, first_step_started_s=self.began[name]
            )
        self.tape.add("start", 2.1, epoch=1, training=list(self.names))
        for number in range(1, self.rounds + 1):
            now = 2.0 + number
            self._round(now, number)
            if number % 10 == 0:
                self.tape.add(
                    "checkpoint",
                    now,
                    epoch=1,
                    file=f"step-1-{number}.ckpt",
                    tokens_merged=self.merged,
                )
            if number == self.rounds // 2 and len(self.names) > 1:
                self._rejoin(now + 0.6, self.names[1])
        self._end(3.0 + self.rounds)
        return self.tape.events

    def _round(self, now: float, number: int) -> None:
        fragment = (number - 1) % self.fragments
        self.tape.round_open(now, number, fragment, [[n, self.generation[n]] for n in self.names])
        who = []
        for name in self.names:
            self.steps[name] += self.random.randint(8, 10)
            tokens = self.odometer(name) - self.mark[name][fragment]
            if self.random.random() < 0.8 or not who:
                who.append(name)
                self._contribute(now, number, fragment, name, tokens)
        self.versions[fragment] += 1
        entry = {"tokens_merged": self.merged, "outer_norm": 1.0 / number}
        self.tape.merge(now + 0.4, number, fragment, self.versions[fragment], who, **entry)
        for name in self.names:
            self._apply(now + 0.5, fragment, name, name in who)
            if number % 2 == 0:
                self._stats(now + 0.5, name, number)

    def _contribute(self, now: float, number: int, fragment: int, name: str, tokens: int) -> None:
        arrival = now + 0.05 + 0.2 * self.random.random()
        self.tape.contribution(
            arrival,
            number,
            fragment,
            name,
            tokens,
            generation=self.generation[name],
            step=self.steps[name],
            odometer=self.odometer(name),
        )
        self.account[name][fragment]["merged"] += tokens
        self.mark[name][fragment] = self.odometer(name)
        self.merged += tokens * self.elements[fragment] // sum(self.elements)

    def _apply(self, now: float, fragment: int, name: str, merged: bool) -> None:
        self.steps[name] += 1
        lost = self.odometer(name) - self.mark[name][fragment]
        self.mark[name][fragment] = self.odometer(name)
        self.tape.add(
            "apply",
            now,
            learner=name,
            generation=self.generation[name],
            step=self.steps[name],
            epoch=1,
            fragment=fragment,
            version=[1, self.versions[fragment]],
        )
        self._lose(now, name, fragment, lost, "overlap" if merged else "absent")

    def _lose(self, now: float, name: str, fragment: int, tokens: int, cause: str) -> None:
        self.account[name][fragment]["lost"] += tokens
        self.tape.lost(now, name, fragment, tokens, cause)

    def _stats(self, now: float, name: str, number: int) -> None:
        self.tape.stats(
            now,
            name,
            self.steps[name],
            self.odometer(name),
            self.generation[name],
            seconds_stepping=0.95 * (now - self.began[name]),
            bytes_up=40_000 * number,
            bytes_down=50_000 * number,
            loss=5.0 / (1 + 0.02 * number),
        )

    def _rejoin(self, now: float, name: str) -> None:
        self._stats(now, name, self.rounds // 2)
        self.tape.add("dead", now, learner=name, generation=1, cause="connection closed")
        self.tape.add(
            "fault", now, kind="kill_learner", target=name, planned={"t_s": now}, fired=True
        )
        for fragment in range(self.fragments):
            rest = self.odometer(name) - self.mark[name][fragment]
            self._lose(now, name, fragment, rest, "dead")
            self.mark[name][fragment] = 0
        self.done_tokens[name] += self.odometer(name)
        self.generation[name] += 1
        self.base[name] = self.steps[name]
        self.began[name] = now + 0.2
        self.tape.join(now + 0.1, name, self.generation[name], state_from="checkpoint")
        self.steps[name] += 1
        self.tape.state(
            now + 0.25,
            name,
            "training",
            self.generation[name],
            step=self.steps[name],
            odometer=64,
            first_step_started_s=self.began[name],
        )

    def _end(self, now: float) -> None:
        for name in self.names:
            self._stats(now, name, self.rounds)
            self.tape.state(
                now,
                name,
                "finishing",
                self.generation[name],
                step=self.steps[name],
                odometer=self.odometer(name),
            )
            processed = self.done_tokens[name] + self.odometer(name)
            self.tape.add(
                "ledger",
                now + 1,
                learner=name,
                fragments=[
                    {
                        "processed": processed,
                        **entry,
                        "pending": processed - entry["merged"] - entry["lost"],
                    }
                    for entry in self.account[name]
                ],
            )
        self.tape.add("run_end", now + 1, status="finished", parameters_sha256=DIGEST, seconds=now)
        for number in range(0, self.rounds + 1, 10):
            self.tape.evaluation(
                now + 1,
                2.0 + 3.5 / (1 + 0.05 * number),
                initial=number == 0,
                final=number + 10 > self.rounds,
                checkpoint_t_s=2.0 + number,
                tokens_merged=self.merged * number // self.rounds,
                metrics={"bits_per_byte": 2.0},
            )
