"""The syncer's side of the rendezvous store: binds the address and looks after the process.

TCPStore keeps whatever a stranger sends, without bound. So it lives in a child process that is
ended above `MAX_GROWTH_BYTES` and started again, as it is when it dies. The listening socket stays
ours, so the address never changes and connections wait meanwhile. Connected learners need none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from dd_lightning.transport import store_process
from dd_lightning.transport.address import Address, parse_address, require_loopback
from dd_lightning.transport.wiring import Waker

log = logging.getLogger(__name__)

MAX_GROWTH_BYTES = 256 << 20  # resident memory above the store's start
WATCH_S = 0.25  # between two looks at the memory
START_S = 60.0  # for the process to import torch and answer
STOP_S = 5.0
RESTART_S = (0.1, 5.0)  # pause before a restart: first, and at most after doubling


class StoreServer:
    """Serves `values` at `address` until `close`; see `serve_store`."""

    def __init__(self, listener: socket.socket, address: Address, values: dict[str, str]) -> None:
        self.address = str(address)
        self.pid: int | None = None  # of the process now serving
        self.starts = 0
        self._listener = listener
        self._where = address
        self._values = dict(values)
        self._lock = threading.Lock()
        self._outdated = False
        self._closing = False
        self._waker = Waker()
        self._ready = threading.Event()
        # It also starts the process: Linux ends a child when the *thread* that made it ends.
        self._thread = threading.Thread(target=self._look_after, name="store-server", daemon=True)
        self._thread.start()

    def wait_ready(self, timeout_s: float = START_S) -> bool:
        """Whether the store answers (learners that come earlier just wait)."""
        return self._ready.wait(timeout_s)

    def update(self, values: dict[str, str]) -> None:
        """Publishes these values too, now and after every restart. Thread-safe."""
        with self._lock:
            self._values.update(values)
            self._outdated = True
        self._waker.wake()

    def close(self) -> None:
        """Ends the process and frees the address."""
        self._closing = True
        self._waker.wake()
        self._thread.join(STOP_S + 1.0)
        self._listener.close()
        self._waker.close()

    # ------------------------------------------------------------- in the thread from here on

    def _look_after(self) -> None:
        pause_s = RESTART_S[0]
        while not self._closing:
            process = self._start()
            try:
                reason = self._watch(process)
                if self._ready.is_set():
                    pause_s = RESTART_S[0]
            finally:
                self._ready.clear()
                self.pid = None
                _stop(process)
            if reason:
                log.warning("Rendezvous store at %s: %s; starting it again", self.address, reason)
                self._pause(pause_s)
                pause_s = min(2 * pause_s, RESTART_S[1])

    def _start(self) -> subprocess.Popen[bytes]:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._where.host, self._where.host)
        options = {
            "--fd": self._listener.fileno(),
            "--host": host,
            "--port": self._where.port,
            "--parent": os.getpid(),
        }
        script = str(Path(store_process.__file__))
        process = subprocess.Popen(
            [sys.executable, "-P", script, *(str(x) for pair in options.items() for x in pair)],
            pass_fds=[self._listener.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.pid, self.starts = process.pid, self.starts + 1
        with self._lock:
            self._outdated = True
        return process

    def _watch(self, process: subprocess.Popen[bytes]) -> str:
        """Returns why the process must be started again, or "" when closing."""
        assert process.stdout is not None
        started_s, base = time.monotonic(), None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            selector.register(self._waker.reader, selectors.EVENT_READ)
            while not self._closing:
                if not self._publish(process):
                    return "the process has died"
                ready = [key.fileobj for key, _ in selector.select(WATCH_S)]
                self._waker.clear()
                if process.stdout in ready and not os.read(process.stdout.fileno(), 4096):
                    return f"the process has died (exit status {process.wait(STOP_S)})"
                if process.stdout in ready and base is None:
                    base = resident_bytes(process.pid)
                    self._ready.set()
                if base is None and time.monotonic() - started_s > START_S:
                    return f"no sign of life within {START_S:g} s"
                if base is not None and resident_bytes(process.pid) - base > MAX_GROWTH_BYTES:
                    return f"grew by more than {MAX_GROWTH_BYTES >> 20} MiB (strangers' values?)"
        return ""

    def _publish(self, process: subprocess.Popen[bytes]) -> bool:
        assert process.stdin is not None
        with self._lock:
            if not self._outdated:
                return True
            self._outdated = False
            line = json.dumps(self._values).encode() + b"\n"
        try:
            os.write(process.stdin.fileno(), line)
        except BrokenPipeError:
            return False
        return True

    def _pause(self, pause_s: float) -> None:
        deadline = time.monotonic() + pause_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._waker.reader, selectors.EVENT_READ)
            while not self._closing and (remaining := deadline - time.monotonic()) > 0:
                selector.select(remaining)
                self._waker.clear()


def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGKILL)  # it holds nothing that is worth a goodbye
    process.wait(STOP_S)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/statm").exists():
            return 0
        shown = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False
        ).stdout.strip()
        return 1024 * int(shown) if shown else 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def serve_store(listen: str, values: dict[str, str], insecure: bool = False) -> StoreServer:
    """Serves `values` at `listen` (port 0: any free port, known at once as `.address`).

    Raises ValueError if the port is taken, or if others could reach it without `insecure`.
    """
    address = parse_address(listen)
    require_loopback(address.host, insecure)
    try:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        listener = socket.create_server((address.host, address.port), family=family, backlog=128)
    except OSError as error:
        raise ValueError(
            f"The syncer cannot listen on {address}: {error.strerror or error}. Stop what uses "
            f"port {address.port}, give another one, or tcp://{address.host}:0 for any free port."
        ) from None
    bound = Address(address.host, listener.getsockname()[1])
    return StoreServer(listener, bound, values)
