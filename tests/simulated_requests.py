"""Requests and acknowledgements over the simulated link, as `network/probe.py` makes real ones."""

from __future__ import annotations

from collections.abc import Iterable

from dd_lightning.network.profiles import WanProfile
from dd_lightning.transport.frames import DATA
from tests.virtual_links import Links

LENGTH_BYTES, ACK_BYTES = 8, 1


def simulated_times(
    wan: WanProfile,
    sizes: Iterable[int],
    repeats: int,
    warm_up_bytes: int = 0,
    idle_s: float = 0.0,
    seed: int = 0,
) -> dict[int, list[float]]:
    """Seconds of each request, by size; arguments as of `request_times`."""
    links = Links(wan, seed)
    session = links.connect()

    def request(size: int) -> float:
        began, acked = links.time.now, []
        down = session.flows["down", DATA]

        def arrived() -> None:
            down.send(ACK_BYTES, lambda: acked.append(links.time.now))

        session.flows["up", DATA].send(LENGTH_BYTES + size, arrived)
        links.time.run(lambda: bool(acked))
        return acked[0] - began

    times: dict[int, list[float]] = {size: [] for size in sizes}
    if warm_up_bytes:
        request(warm_up_bytes)
    for _ in range(repeats):
        for size in times:
            links.play(links.time.now + idle_s)
            times[size].append(request(size))
    return times
