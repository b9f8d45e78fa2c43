"""Two network namespaces joined by a link in user space, over which the kernel's own TCP runs.

Each has a TUN device; packets between them are delayed, and dropped during a cut. Needs root.
`python -m tests.tun_link NAMESPACE_A NAMESPACE_B ONE_WAY_S`: prints "ready"; "cut" and "heal" on
stdin are answered by the wall time at which it was done.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

ADDRESSES = ("10.78.0.1", "10.78.0.2")
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000
PACKET_BYTES = 2048
LONGEST_WAIT_S = 0.05


def unavailable() -> str:
    """Why no such link can be made here, or ""."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "needs root on Linux"
    if not os.path.exists("/dev/net/tun"):
        return "needs /dev/net/tun"
    tried = subprocess.run(["ip", "netns", "list"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "needs iproute2 with network namespaces"


def ip(*arguments: str) -> None:
    """Run `ip`."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Link:
    """The link's process, from the outside."""

    def __init__(self, names: tuple[str, str], one_way_s: float) -> None:
        self.names = names
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.tun_link", *names, str(one_way_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._say()

    def _say(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the link has ended; its own message is above"
        return line

    def cut(self) -> float:
        """Both ways, until `heal`; the wall time."""
        return self._do("cut")

    def heal(self) -> float:
        """The link is back; the wall time."""
        return self._do("heal")

    def _do(self, what: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return float(self._say())

    def close(self) -> None:
        """End the process; its devices go with it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


@contextmanager
def joined_namespaces(one_way_s: float) -> Iterator[Link]:
    """A link between two fresh namespaces, which are removed afterwards."""
    names = (f"ddt{os.getpid()}a", f"ddt{os.getpid()}b")
    made: list[str] = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        link = Link(names, one_way_s)
        try:
            yield link
        finally:
            link.close()
    finally:
        for name in made:
            ip("netns", "del", name)


def _open_tun(namespace: str, device: str, address: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    other = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        assert libc.setns(other, 0) == 0, os.strerror(ctypes.get_errno())
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
        assert libc.setns(own, 0) == 0, os.strerror(ctypes.get_errno())
    finally:
        os.close(own)
        os.close(other)
    ip("-n", namespace, "addr", "add", f"{address}/24", "dev", device)
    ip("-n", namespace, "link", "set", device, "mtu", "1500", "txqueuelen", "10000", "up")
    return tun


class _Forwarder:
    def __init__(self, ends: tuple[int, int], one_way_s: float) -> None:
        self._other = {ends[0]: ends[1], ends[1]: ends[0]}
        self._one_way_s = one_way_s
        self.is_cut = False
        self._number = count()
        self._under_way: list[tuple[float, int, int, bytes]] = []

    def forward(self, source: int) -> None:
        """Take in what has come at one end."""
        while True:
            try:
                packet = os.read(source, PACKET_BYTES)
            except BlockingIOError:
                return
            if not self.is_cut:
                due = time.monotonic() + self._one_way_s
                item = (due, next(self._number), self._other[source], packet)
                heapq.heappush(self._under_way, item)

    def deliver(self) -> float:
        """Hand over what is due; seconds until the next."""
        while self._under_way:
            due, _, end, packet = self._under_way[0]
            if due > (now := time.monotonic()):
                return min(due - now, LONGEST_WAIT_S)
            heapq.heappop(self._under_way)
            os.write(end, packet)
        return LONGEST_WAIT_S


def main() -> None:
    """Forward until stdin is closed."""
    names, one_way_s = sys.argv[1:3], float(sys.argv[3])
    ends = [_open_tun(name, f"ddt{i}", ADDRESSES[i]) for i, name in enumerate(names)]
    forwarder = _Forwarder((ends[0], ends[1]), one_way_s)
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([*ends, sys.stdin], [], [], forwarder.deliver())
        for source in ready:
            if source is not sys.stdin:
                forwarder.forward(source)
            elif line := sys.stdin.readline():
                forwarder.is_cut = line.strip() == "cut"
                print(time.time(), flush=True)
            else:
                return


if __name__ == "__main__":
    main()
