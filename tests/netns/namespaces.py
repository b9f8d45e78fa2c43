"""Two fresh namespaces joined by the link of `tunwan.py`, removed whatever happens. Needs root."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from tests.netns.tunwan import ADDRESSES as ADDRESSES
from tests.netns.tunwan import Shape as Shape

_numbers = count()


def unavailable() -> str:
    """Why no such link can be made here, or ""."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "needs root on Linux"
    if not os.path.exists("/dev/net/tun"):
        return "needs /dev/net/tun"
    try:
        tried = subprocess.run(["ip", "netns", "list"], capture_output=True, check=False)
    except FileNotFoundError:
        return "needs iproute2"
    return "" if tried.returncode == 0 else "needs iproute2 with network namespaces"


def ip(*arguments: str) -> None:
    """Run `ip`."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Link:
    """The link's process, from the outside."""

    def __init__(self, names: tuple[str, str], devices: tuple[str, str], shape: Shape) -> None:
        self.names = names
        given = {"namespaces": names, "devices": devices, "shape": dataclasses.asdict(shape)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.netns.tunwan", json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._hear()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the link has ended; its own message is above"
        return line

    def cut(self, seconds: float | None = None) -> float:
        """Both ways, for so long or until `heal`; the wall time of its begin."""
        return self._do("cut", *([] if seconds is None else [seconds]))

    def heal(self) -> float:
        """The link is back; the wall time."""
        return self._do("heal")

    def lateness(self) -> float:
        """Seconds by which one packet in ten was late since this was last asked."""
        return self._do("lateness")

    def _do(self, *order: Any) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return float(self._hear())

    def close(self) -> None:
        """End the process; its devices go with it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


@contextmanager
def joined_namespaces(shape: Shape) -> Iterator[Link]:
    """A link between two fresh namespaces, which are removed afterwards."""
    stem = f"ddt{os.getpid()}x{next(_numbers)}"  # a device's name may have 15 characters
    names = devices = (f"{stem}a", f"{stem}b")
    made: list[str] = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        link = Link(names, devices, shape)
        try:
            yield link
        finally:
            link.close()
    finally:
        for name in made:
            ip("netns", "del", name)


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Sockets that this thread makes meanwhile belong to the namespace, and stay there."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    other = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        assert libc.setns(other, 0) == 0, os.strerror(ctypes.get_errno())
        yield
    finally:
        back = libc.setns(own, 0)
        os.close(own)
        os.close(other)
        assert back == 0, "this thread is left in the namespace of a test"
