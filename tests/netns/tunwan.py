"""User-space netem: two TUN devices in two namespaces, a packet forwarder between them.

Per direction: serialization at `rate` (one shared drop-tail queue), Bernoulli loss per packet,
propagation delay, half-normal jitter that keeps the order, outages. The kernel's own TCP runs over
it. Good to about 300 Mbit/s. A process of its own: `python -m tests.netns.tunwan JSON`, which says
"ready"; then a line of JSON on stdin is an order, answered by one. Ends with its stdin.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import count

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000
PACKET_BYTES = 2048
PACKETS_AT_A_TIME = 64
LONGEST_WAIT_S = 0.05
ADDRESSES = ("10.78.0.1", "10.78.0.2")


@dataclass(frozen=True, slots=True)
class Shape:
    """What the link is like, the same in both directions.

    Args:
        rate_bit_s: of the shared pipe, packets' headers included; 0: as fast as it can.
        delay_s: one way.
        jitter_s: scale of the half-normal extra delay of a packet.
        loss: share of packets lost, 0..1.
        queue_bytes: more than this is dropped at the pipe's entrance.
    """

    rate_bit_s: float = 0.0
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    queue_bytes: int = 8_000_000
    seed: int = 0


@dataclass(slots=True)
class Way:
    """One direction: when a packet arrives at the other end, or that it does not."""

    shape: Shape
    rng: random.Random
    free_s: float = 0.0
    last_s: float = 0.0

    def admit(self, now: float, num_bytes: int) -> float | None:
        """Its arrival, s; None: lost."""
        shape = self.shape
        start = max(now, self.free_s)
        if shape.rate_bit_s:
            if (start - now) * shape.rate_bit_s / 8 > shape.queue_bytes:
                return None
            start += num_bytes * 8 / shape.rate_bit_s
        self.free_s = start
        if self.rng.random() < shape.loss:
            return None
        jitter_s = abs(self.rng.gauss(0, shape.jitter_s)) if shape.jitter_s else 0.0
        self.last_s = max(self.last_s, start + shape.delay_s + jitter_s)
        return self.last_s


class Forwarder:
    """Carries packets between the two ends. Losing its process loses what is under way."""

    def __init__(self, ends: tuple[int, int], shape: Shape) -> None:
        rng = random.Random(shape.seed)
        self._other = {ends[0]: ends[1], ends[1]: ends[0]}
        self._ways = {end: Way(shape, rng) for end in ends}
        self._number = count()
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._is_cut_until = 0.0  # monotonic, s
        self._late_s: list[float] = []  # of packets since the last `lateness`

    def take_in(self, end: int) -> None:
        """What has come at one end."""
        for _ in range(PACKETS_AT_A_TIME):
            try:
                packet = os.read(end, PACKET_BYTES)
            except BlockingIOError:
                return
            now = time.monotonic()
            if now < self._is_cut_until:
                continue
            due = self._ways[end].admit(now, len(packet))
            if due is not None:
                heapq.heappush(self._under_way, (due, next(self._number), self._other[end], packet))

    def deliver(self) -> float:
        """Hand over what is due; seconds until the next."""
        while self._under_way:
            due, _, end, packet = self._under_way[0]
            if due > (now := time.monotonic()):
                return min(due - now, LONGEST_WAIT_S)
            heapq.heappop(self._under_way)
            self._late_s.append(now - due)
            with contextlib.suppress(BlockingIOError):  # a full device drops, as a router would
                os.write(end, packet)
        return LONGEST_WAIT_S

    # ------------------------------------------------------------------ orders

    def cut(self, seconds: float = float("inf")) -> float:
        """Deliver nothing for so long, or until `heal`; the wall time of the begin."""
        self._is_cut_until = time.monotonic() + seconds
        return time.time()

    def heal(self) -> float:
        """Deliver again; the wall time."""
        self._is_cut_until = 0.0
        return time.time()

    def lateness(self) -> float:
        """Seconds by which one packet in ten was late since the last time this was asked."""
        late, self._late_s = sorted(self._late_s), []
        return late[int(len(late) * 0.9)] if late else 0.0


def open_tun(namespace: str, device: str, address: str) -> int:
    """A device in a namespace, up; its descriptor."""
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
    for command in (
        ("addr", "add", f"{address}/24", "dev", device),
        ("link", "set", device, "mtu", "1500", "txqueuelen", "10000", "up"),
    ):
        subprocess.run(["ip", "-n", namespace, *command], check=True, capture_output=True)
    return tun


def main() -> None:
    """Forward until stdin is closed."""
    given = json.loads(sys.argv[1])
    with contextlib.suppress(PermissionError):  # only makes it more punctual on a busy machine
        os.nice(-15)
    where = zip(given["namespaces"], given["devices"], ADDRESSES, strict=True)
    ends = [open_tun(*end) for end in where]
    forwarder = Forwarder((ends[0], ends[1]), Shape(**given["shape"]))
    orders = {"cut": forwarder.cut, "heal": forwarder.heal, "lateness": forwarder.lateness}
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([*ends, sys.stdin], [], [], forwarder.deliver())
        for source in ready:
            if source is not sys.stdin:
                forwarder.take_in(source)
            elif line := sys.stdin.readline():
                what, *arguments = json.loads(line)
                print(json.dumps(orders[what](*arguments)), flush=True)
            else:
                return


if __name__ == "__main__":
    main()
