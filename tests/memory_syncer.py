"""A syncer without sockets: the real core and merger behind channels in memory.

For tests of the learner's side with real Trainers as threads; the wire's encoding is real too.
"""

from __future__ import annotations

import contextlib
import threading
import time
from contextlib import contextmanager

from dd_lightning.algorithm import CODECS, build_outer_optimizer, resolve
from dd_lightning.protocol import actions as act
from dd_lightning.protocol.messages import (
    Contribution,
    Fragment,
    Initial,
    decode_from_learner,
    decode_from_syncer,
    encode,
)
from dd_lightning.protocol.syncer_core import SyncerCore
from dd_lightning.syncer.merger import Merger
from dd_lightning.syncer.payload import PayloadError, PayloadReader
from dd_lightning.syncer.theta import Theta
from dd_lightning.transport.frames import Arrival, Disconnected

TICK_S = 0.002


class MemoryChannel:
    """What `transport.LearnerChannel` is for the comm thread."""

    def __init__(self, syncer, session):
        self.syncer, self.session = syncer, session
        self._events, self._condition, self._woken = [], threading.Condition(), False

    def poll(self, timeout_s):
        with self._condition:
            self._condition.wait_for(lambda: self._events or self._woken, timeout_s)
            events, self._events, self._woken = self._events, [], False
            return events

    def put(self, event):
        with self._condition:
            self._events.append(event)
            self._condition.notify()

    def send(self, message, payload=None):
        return self.syncer.receive(self, encode(message), payload)

    def can_upload(self):
        return True

    def wake(self):
        with self._condition:
            self._woken = True
            self._condition.notify()

    def close(self):
        self.syncer.closed(self)


class MemorySyncer:
    """`addresses` of channels are what `peer_address` says; `reachable = False` refuses dials."""

    def __init__(self, config, peer_address="127.0.0.1"):
        self.core = SyncerCore(config, run_id="run", epoch=1)
        self.config, self.peer_address = config, peer_address
        self.tape, self.done, self.reachable = [], False, True
        self.uploaded = []  # (message type, bytes of its payload)
        self.merger = self.theta = None
        self._initial, self._channels, self._sessions = {}, {}, 0
        self._lock, self._stop = threading.RLock(), threading.Event()
        self._started = time.monotonic()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    @contextmanager
    def running(self):
        self._ticker.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._ticker.join(5)

    def now(self):
        return time.monotonic() - self._started

    def dial(self):
        if not self.reachable:
            raise ConnectionRefusedError("nobody listens")
        with self._lock:
            self._sessions += 1
            channel = MemoryChannel(self, str(self._sessions))
            self._channels[channel.session] = channel
            return channel

    def cut(self):
        """End every connection."""
        with self._lock:
            for channel in list(self._channels.values()):
                channel.put(Disconnected(channel.session, "cut"))
                self.closed(channel)

    def events(self, kind):
        with self._lock:
            return [fields for event, fields in self.tape if event == kind]

    def receive(self, channel, header, payload):
        with self._lock:
            if channel.session not in self._channels:
                return False
            message = decode_from_learner(header)
            if payload is not None:
                self.uploaded.append((type(message).__name__, memoryview(payload).nbytes))
            try:
                payload = self._decode(message, payload)
            except PayloadError as error:
                self.core.refuse_payload(channel.session, message, error.reason, self.now())
            else:
                self.core.receive(channel.session, message, self.now(), payload, self.peer_address)
            self._carry_out()
            return True

    def closed(self, channel):
        with self._lock:
            if self._channels.pop(channel.session, None) is not None:
                self.core.disconnected(channel.session, self.now())
                self._carry_out()

    def _tick(self):
        while not self._stop.wait(TICK_S):
            with self._lock:
                self.core.tick(self.now())
                self._carry_out()

    def _decode(self, message, payload):
        if not isinstance(message, Contribution | Initial):
            return payload  # of a piece of inner state
        codec = resolve("codec", self.config.algorithm.codec, CODECS)
        reader = PayloadReader(self.core.run.layout, codec)
        whole = isinstance(message, Initial)
        return reader.decode(message.fragment, message.payload, payload, whole=whole)

    def _carry_out(self):
        while actions := self.core.take():
            for action in actions:
                getattr(self, "_" + type(action).__name__.lower())(action)

    def _send(self, action, payload=None):
        channel = self._channels.get(action.session)
        if channel is not None:
            message = decode_from_syncer(encode(action.message))
            channel.put(Arrival(action.session, message, payload, 0))

    def _sendfragment(self, action):
        published = self.merger.published(action.fragment)
        message = Fragment(
            generation=action.generation,
            fragment=action.fragment,
            version=action.version,
            round=action.round,
            merged_upto=action.merged_upto,
            payload=published.payload,
        )
        self._send(act.Send(action.session, message), published.data)

    def _merge(self, job):
        merged = self.merger.merge(job, self.optimizer)
        self.core.merged(job, merged.result, self.now())

    def _setinitial(self, action):
        self._initial |= action.payload
        layout = self.core.run.layout
        if all(name in self._initial for names in layout.fragments for name in names):
            self.theta = Theta(layout, self._initial)
            self.merger = Merger(
                self.theta,
                self.config.algorithm,
                list(self.core.run.versions),
                lambda: True,
            )
            self.optimizer = build_outer_optimizer(
                self.theta.root.parameters(), self.config.algorithm.outer
            )
        self.core.initialized(action.fragment, self.now())

    def _relaystate(self, action):
        self._send(act.Send(action.session, action.message), action.payload)

    def _record(self, action):
        self.tape.append((action.event, action.fields))

    def _writecheckpoint(self, action):
        self.core.checkpointed(action.state, self.now())

    def _closesession(self, action):
        channel = self._channels.get(action.session)
        if channel is not None:
            channel.put(Disconnected(channel.session, "cut"))
            self.closed(channel)

    def _warn(self, action):
        self.tape.append(("warning", {"text": action.text}))

    def _done(self, action):
        self.done = True

    def parameters(self):
        """Copies of Θ by name."""
        with self._lock:
            return {n: p.detach().clone() for n, p in self.theta.root.named_parameters()}


@contextmanager
def memory_syncers(monkeypatch):
    """A function that makes a syncer of a configuration; every strategy then reaches it."""
    with contextlib.ExitStack() as stack:

        def start(config, **options):
            running = MemorySyncer(config, **options)
            dialer = "dd_lightning.learner.beginning.dialer"
            monkeypatch.setattr(dialer, lambda *_, key: running.dial)
            return stack.enter_context(running.running())

        yield start
