"""A learner without a model or Lightning, for tests of the syncer over a LearnerChannel."""

from __future__ import annotations

import time
import uuid
from collections import deque
from typing import Any

import torch

from dd_lightning.protocol.messages import (
    Applied,
    Contribution,
    Finish,
    FinishNow,
    Fragment,
    Initial,
    Join,
    Nothing,
    Progress,
    Pull,
    Received,
    Released,
    Welcome,
)
from tests.syncer_jobs import TENSORS, encode, values_of

TOKENS = 10  # of a step
STEP_S = 0.01
POLL_S = 0.005


class ScriptedLearner:
    """Adds `drift` to every parameter in each step; answers pulls, applies by overwriting."""

    def __init__(self, channel: Any, learner: str, steps: int, drift: float = 0.01) -> None:
        self.channel, self.learner = channel, learner
        self.steps, self.drift = steps, drift
        self.values = {name: value.clone() for name, value in values_of(0).items()}
        self.step = self.odometer = 0
        self.welcome: Welcome | None = None
        self.released = False
        self.told_to_finish = ""
        self.versions: dict[int, tuple[int, int]] = {}
        self.counts: dict[int, int] = {}  # c_steps
        self.sent: dict[int, Contribution] = {}  # the unsettled snapshot
        self.pulls: list[Pull] = []
        self.uploads: deque[tuple[Initial | Contribution, memoryview]] = deque()
        self._finish_sent = False

    def join(self) -> None:
        """Ask to be admitted."""
        self.channel.send(
            Join(
                learner=self.learner,
                incarnation=uuid.uuid4().hex,
                number=1,
                tensors=TENSORS,
                strategy="Scripted",
            )
        )

    def run(self, timeout_s: float) -> None:
        """Until released; raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        self.join()
        while not self.released:
            if time.monotonic() > deadline:
                raise TimeoutError(f"learner {self.learner} at step {self.step} is not released")
            self.turn()

    def turn(self) -> None:
        """Take what has come, then one step if it may."""
        for event in self.channel.poll(POLL_S):
            message = getattr(event, "message", None)
            if message is None:
                raise ConnectionError("the syncer closed the connection")
            self._receive(message, event.payload)
        loaded = self.welcome is not None and len(self.versions) == len(self.welcome.fragments)
        if loaded and self.step < self.steps and not self.told_to_finish:
            self._step()
        elif loaded and not self._finish_sent and not self.released:
            self._finish_sent = True
            self._say(Finish, step=self.step, odometer=self.odometer)
        self._answer()
        while self.uploads and self.channel.send(*self.uploads[0]):
            self.uploads.popleft()

    def _step(self) -> None:
        time.sleep(STEP_S)  # a step takes time: pulls and fragments arrive between steps
        self.step += 1
        self.odometer += TOKENS
        for name, value in self.values.items():
            if "running" not in name:
                value += self.drift
        for fragment in self.counts:
            self.counts[fragment] += 1
        self._say(
            Progress,
            step=self.step,
            odometer=self.odometer,
            step_seconds=(STEP_S,),
            seconds_stepping=self.step * STEP_S,
            losses=(1.0,),
        )

    def _say(self, kind: type, **fields: Any) -> None:
        assert self.welcome is not None
        self.channel.send(kind(generation=self.welcome.generation, **fields))

    def _receive(self, message: Any, payload: Any) -> None:
        if isinstance(message, Welcome):
            self.welcome = message
            if message.send_initial:
                self._send_initial(message)
        elif isinstance(message, Fragment):
            self._apply(message, payload)
        elif isinstance(message, Pull):
            self.pulls.append(message)
        elif isinstance(message, FinishNow):
            self.told_to_finish = message.reason
        elif isinstance(message, Released):
            self.released = True

    def _send_initial(self, welcome: Welcome) -> None:
        for fragment, names in enumerate(welcome.fragments):
            header, data = encode({name: self.values[name] for name in names})
            initial = Initial(generation=welcome.generation, fragment=fragment, payload=header)
            self.uploads.append((initial, data))
            self.versions[fragment] = (welcome.epoch, 0)
            self.counts[fragment] = 0

    def _apply(self, message: Fragment, payload: memoryview) -> None:
        fragment = message.fragment
        self._say(Received, fragment=fragment, version=message.version)
        if message.version <= self.versions.get(fragment, (-1, -1)):
            return
        flat, start = torch.frombuffer(bytearray(payload), dtype=torch.float32), 0
        for part in message.payload.parts:
            self.values[part.name].view(-1).copy_(flat[start : start + part.length])
            start += part.length
        sent, count = self.sent.pop(fragment, None), self.counts.get(fragment, 0)
        settled = sent is not None and message.merged_upto == (sent.epoch, sent.round)
        before = count - (sent.steps if settled else 0)
        self.versions[fragment], self.counts[fragment] = message.version, 0
        self._say(
            Applied,
            step=self.step,
            fragment=fragment,
            version=message.version,
            odometer=self.odometer,
            steps=0,
            tokens=0,
            tokens_before=before * TOKENS,
            settled=(sent.epoch, sent.round) if settled else None,
        )

    def _answer(self) -> None:
        waiting, self.pulls = self.pulls, []
        for pull in waiting:
            count = self.counts.get(pull.fragment, 0)
            current = pull.base == "held" or self.versions.get(pull.fragment, (-1, -1)) >= pull.base
            if pull.final and count == 0:
                self._say(
                    Nothing,
                    epoch=pull.epoch,
                    round=pull.round,
                    fragment=pull.fragment,
                    odometer=self.odometer,
                )
            elif not current or count == 0:
                self.pulls.append(pull)
            else:
                self._contribute(pull, count)

    def _contribute(self, pull: Pull, count: int) -> None:
        assert self.welcome is not None
        names = self.welcome.fragments[pull.fragment]
        header, data = encode({name: self.values[name] for name in names})
        sent = self.sent.get(pull.fragment)
        if sent is not None and sent.round == pull.round:
            return  # answered; this test's channel loses nothing
        message = Contribution(
            generation=self.welcome.generation,
            epoch=pull.epoch,
            round=pull.round,
            fragment=pull.fragment,
            step=self.step,
            steps=count,
            tokens=count * TOKENS,
            odometer=self.odometer,
            base=self.versions[pull.fragment],
            payload=header,
            fingerprint=self.welcome.fingerprint,
            final=pull.final,
        )
        self.sent[pull.fragment] = message
        self.uploads.append((message, data))
