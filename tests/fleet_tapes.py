"""A synthetic fleet of any size, whose tape and ledger are consistent."""

from __future__ import annotations

import random
from typing import Any

from tests.tapes import DIGEST, Tape


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
        self.connected = dict.fromkeys(self.names, 0)  # round at which it last (re)joined
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
            bytes_up=40_000 * (number - self.connected[name]),
            bytes_down=50_000 * (number - self.connected[name]),
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
        self.connected[name] = self.rounds // 2
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
