"""A real syncer over sockets, beside whatever the test's main thread does."""

from __future__ import annotations

import contextlib
import socket
import threading
from unittest import mock

from torch.distributed import TCPStore

from dd_lightning.protocol.tape import read_tape
from dd_lightning.syncer.run import SyncerRun
from dd_lightning.syncer.settings import SyncerSettings
from tests.trainers import WAIT_S


class StoreHere:
    """The rendezvous store in this process: one of its own takes longer to start than a run."""

    def __init__(self, listen, values, insecure):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            self._store = TCPStore(
                "127.0.0.1",
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        self.address = f"tcp://127.0.0.1:{port}"
        for name, value in values.items():
            self._store.set(name, value)

    def close(self):
        """The server ends with the object."""
        self._store = None


class ThreadRun(SyncerRun):
    """Signals go to the main thread only."""

    def _take_signals(self):
        return contextlib.nullcontext()

    def _callbacks(self):
        return []


class LiveSyncer:
    """Of one run; what it has, as `MemorySyncer` shows it. A context, left when the run is over."""

    def __init__(self, folder, config):
        self._folder, self._config = folder, config
        self._close = contextlib.ExitStack()
        self.uploaded = []  # (message type, bytes of its payload)
        self._error = None

    def __enter__(self):
        settings = SyncerSettings("tcp://127.0.0.1:0", self._folder, False, self._config)
        with mock.patch("dd_lightning.syncer.run.serve_store", StoreHere):
            self._run = ThreadRun(settings, self._close)
        self.address = self._run.address
        channel = self._run._channel
        poll = channel.poll
        channel.poll = lambda timeout_s: self._noted(poll(timeout_s))
        self._thread = threading.Thread(target=self._execute, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind, error, trace):
        if kind is not None:
            self._run.server.request_stop("a learner failed")
        self._thread.join(WAIT_S)
        self._close.close()
        assert not self._thread.is_alive(), "the syncer does not end"
        if kind is None and self._error is not None:
            raise self._error

    def _execute(self):
        try:
            self._run.execute()
        except BaseException as error:
            self._error = error

    def _noted(self, events):
        for event in events:
            if getattr(event, "payload", None) is not None:
                self.uploaded.append((type(event.message).__name__, event.payload.nbytes))
        return events

    def events(self, kind):
        """Of the tape, once the run is over."""
        self._thread.join(WAIT_S)
        return [event for event in read_tape(self._folder / "tape.jsonl") if event["event"] == kind]

    @property
    def theta(self):
        """By canonical name."""
        return self._run._module.merger.theta.by_name

    def parameters(self):
        """Copies of Θ's."""
        return {name: tensor.detach().clone() for name, tensor in self.theta.items()}
