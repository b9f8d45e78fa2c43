"""The simulated link against the proxy on loopback: the same requests, the same profile.

The proxy's link model is the simulator's; what is compared is the way to it: sockets, an event
loop's timers and lanes on wall time, against flows on virtual time.
"""

from __future__ import annotations

import asyncio
from statistics import median
from typing import Any

import pytest

from dd_lightning.network.probe import AckServer, request_times
from dd_lightning.network.proxy import Route, ShapingProxy
from tests.simulated_requests import simulated_times
from tests.timing import assert_times
from tests.virtual_links import profile

pytestmark = pytest.mark.integration

WAIT_S = 60.0
SIZES = [10_000, 100_000, 1_000_000]


def measured(wan: Any, sizes: list[int], **options: Any) -> dict[int, list[float]]:
    async def through(server: AckServer) -> dict[int, list[float]]:
        proxy = ShapingProxy(wan, [Route("0", "127.0.1.1", (server.port,), server.host)])
        await proxy.start()
        try:
            address = ("127.0.1.1", server.port)
            return await asyncio.to_thread(request_times, address, sizes, **options)
        finally:
            await proxy.close()

    with AckServer() as server:
        return asyncio.run(asyncio.wait_for(through(server), WAIT_S))


@pytest.mark.parametrize(
    ("link", "sizes", "options", "rel"),
    [
        ({}, [*SIZES, 4_000_000], {"repeats": 2, "warm_up_bytes": 4_000_000}, 0.05),
        ({}, SIZES, {"repeats": 2, "warm_up_bytes": 1_000_000, "idle_s": 0.5}, 0.15),
        ({"window_mib": 0.25}, [2_000_000], {"repeats": 1, "warm_up_bytes": 500_000}, 0.15),
    ],
    ids=["warm", "after idle", "window"],
)
def test_requests_take_as_long_as_simulated(link, sizes, options, rel) -> None:
    wan = profile(**link)

    def shortest() -> list[float]:
        return [min(times) for times in measured(wan, sizes, **options).values()]

    simulated = simulated_times(wan, sizes, **options)
    assert_times(shortest, [median(simulated[size]) for size in sizes], rel=rel, add=0.01)


def test_an_outage_costs_as_much_as_simulated() -> None:
    begin_s, seconds = 0.8, 1.0
    wan = profile(({"region": "a", "start_s": begin_s, "seconds": seconds},))
    options = {"sizes": [100_000], "repeats": 20}
    for times in (measured(wan, **options), simulated_times(wan, **options)):
        assert seconds - 0.04 <= max(times[100_000]) <= 2.1 * seconds + 1.0
