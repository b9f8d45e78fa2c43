"""The shaping proxy on loopback: times, sharing, order, closes, back-pressure, whose address."""

import asyncio
import contextlib
import hashlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dd_lightning.network import WanProfile
from dd_lightning.network.probe import AckServer, expected_request_s, request_times
from dd_lightning.network.proxy import Route, ShapingProxy
from tests.timing import ATTEMPTS, assert_times

pytestmark = pytest.mark.integration

WAIT_S = 100.0  # bound on every wait of these tests
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def profile(outages: tuple[dict[str, Any], ...] = (), **link: Any) -> WanProfile:
    values = {"rtt_ms": 80, "mbit_s": 100, "slow_start": False, **link}
    if "up_mbit_s" in values:
        del values["mbit_s"]
    return WanProfile.from_config(
        {"name": "test", "regions": ["a", "c", "b"], "syncer_region": "b", "outages": outages}
        | {"links": {"a-b": values, "c-b": values}, "learner_regions": ["a", "c"]}
    )


def run(test: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(test, WAIT_S))


def route(learner: int, port: int, region: str = "a") -> Route:
    return Route(str(learner), f"127.0.1.{learner + 1}", (port,), "127.0.0.1", region)


@asynccontextmanager
async def shaped(
    wan: WanProfile, handler: Handler, regions: str = "a"
) -> AsyncIterator[tuple[ShapingProxy, int]]:
    """A server behind a proxy with one learner per letter of `regions`."""

    ended: list[asyncio.Task[Any] | None] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(asyncio.current_task())
        try:
            await handler(reader, writer)
        finally:
            await hang_up(writer)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    proxy = ShapingProxy(wan, [route(k, port, region) for k, region in enumerate(regions)])
    await proxy.start()
    try:
        yield proxy, port
    finally:
        await proxy.close()
        server.close()
        await asyncio.gather(*filter(None, ended), return_exceptions=True)


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):  # the other end was faster
        await writer.wait_closed()


@asynccontextmanager
async def dial(
    learner: int, port: int
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(f"127.0.1.{learner + 1}", port)
    try:
        yield reader, writer
    finally:
        await hang_up(writer)


async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read to the end, then say so."""
    while await reader.read(2**16):
        pass
    writer.write(b"k")
    await writer.drain()


async def send_all(learner: int, port: int, size: int) -> float:
    """Seconds from the dial until the server has said that it read everything."""
    begin = time.monotonic()
    async with dial(learner, port) as (reader, writer):
        writer.write(bytes(size))
        writer.write_eof()
        assert await reader.read() == b"k"
        return time.monotonic() - begin


SIZES = {10_000: 0.082, 100_000: 0.090, 1_000_000: 0.166, 8_000_000: 0.757}


def test_warm_requests_agree_with_kernel_tcp_and_the_model() -> None:
    """80 ms, 100 Mbit/s against the times measured over a TUN link, within 5 % + 10 ms."""
    wan = profile(slow_start=True)
    warm_up = max(SIZES)

    async def measure(server: AckServer) -> dict[int, list[float]]:
        proxy = ShapingProxy(wan, [route(0, server.port)])
        await proxy.start()
        address = ("127.0.1.1", server.port)
        try:
            return await asyncio.to_thread(request_times, address, SIZES, 2, warm_up)
        finally:
            await proxy.close()

    def shortest() -> list[float]:
        with AckServer() as server:
            measured = run(measure(server))
            assert server.sources == ["127.0.1.1"]
        return [min(measured[size]) for size in SIZES]

    model = [expected_request_s(wan, "a", size, warm_up) for size in SIZES]
    assert_times(shortest, list(SIZES.values()), model, rel=0.05, add=0.01)


@pytest.mark.parametrize(("regions", "share"), [("aa", 2), ("ac", 1)])
def test_only_learners_of_one_region_share_its_bandwidth(regions: str, share: int) -> None:
    size = 2_000_000
    evenness: list[float] = []

    async def both() -> list[float]:
        async with shaped(profile(), swallow, regions) as (_, port):
            begin = time.monotonic()
            times = await asyncio.gather(*(send_all(k, port, size) for k in range(2)))
            evenness.append(min(times) / max(times))
            return [time.monotonic() - begin]

    wire = size * 8 * 1500 / 1448 / 100e6
    # handshake, round trip, bytes
    assert_times(lambda: run(both()), [0.16 + share * wire], rel=0.1)
    assert max(evenness) > 0.9


def test_up_and_down_have_their_own_rates_and_counters() -> None:
    up, down = 250_000, 2_500_000

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(up)
        writer.write(b"k")
        await reader.readexactly(1)
        writer.write(bytes(down))
        await writer.drain()

    async def times() -> tuple[float, float]:
        wan = profile(up_mbit_s=10, down_mbit_s=100)
        async with shaped(wan, answer) as (proxy, port):
            marks = [time.monotonic()]
            async with dial(0, port) as (reader, writer):
                for data, size in ((bytes(up), 1), (b"k", down)):
                    writer.write(data)
                    await reader.readexactly(size)
                    marks.append(time.monotonic())
                assert proxy.bytes() == {"0": {"up": up + 1, "down": down + 1}}
            return marks[1] - marks[0], marks[2] - marks[1]

    wire = 250_000 * 8 * 1500 / 1448 / 10e6
    # the first with the handshake
    assert_times(lambda: run(times()), [0.16 + wire, 0.08 + wire], rel=0.1)


def test_bytes_arrive_whole_and_in_order_under_jitter_and_loss() -> None:
    data = random.Random(0).randbytes(3_000_000)

    async def digest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(hashlib.sha256(await reader.readexactly(len(data))).digest())
        writer.write(data)
        await writer.drain()

    async def exchange() -> tuple[bytes, bytes]:
        wan = profile(jitter_ms=20, loss=0.02, tcp="bbr", rtt_ms=20)
        async with shaped(wan, digest) as (_, port), dial(0, port) as (reader, writer):
            writer.write(data)
            return await reader.readexactly(32), await reader.readexactly(len(data))

    assert run(exchange()) == (hashlib.sha256(data).digest(), data)


def test_outage_holds_bytes_and_the_close() -> None:
    """A close in an outage is seen after it; another region's learner notices nothing."""
    begin_s, seconds = 0.5, 1.0
    outage = {"region": "a", "start_s": begin_s, "seconds": seconds}

    async def scenario() -> bool:
        """Whether everything happened in time; false where the machine was too busy."""
        seen: dict[str, float] = {}

        async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            learner = writer.get_extra_info("peername")[0]
            await reader.readexactly(1)
            seen[f"{learner} opened"] = time.monotonic()
            while await reader.read(2**16):
                seen[f"{learner} bytes"] = time.monotonic()
            seen[f"{learner} closed"] = time.monotonic()

        least = time.monotonic()  # the outage's clock starts between this and `most`
        async with shaped(profile((outage,)), note, "ac") as (_, port):
            most = time.monotonic()
            writers = []
            for learner in range(2):
                _, writer = await asyncio.open_connection(f"127.0.1.{learner + 1}", port)
                writer.write(b"x")
                writers.append(writer)
            await asyncio.sleep(most + begin_s + 0.1 - time.monotonic())  # into the outage
            for writer in writers:
                writer.write(bytes(1000))
                await hang_up(writer)
            sent = time.monotonic()
            while len(seen) < 6:
                await asyncio.sleep(0.01)
        over = least + begin_s + seconds
        if sent > over:
            return False
        assert seen["127.0.1.1 bytes"] >= over
        assert seen["127.0.1.1 closed"] >= seen["127.0.1.1 bytes"]
        return (
            seen["127.0.1.1 opened"] < least + begin_s
            and seen["127.0.1.1 bytes"] <= sent + 2.1 * seconds + 1
            and seen["127.0.1.2 closed"] < over
        )

    assert any(run(scenario()) for _ in range(ATTEMPTS))


def test_a_dial_given_up_in_an_outage_never_arrives_and_a_new_one_does_not_wait_for_it() -> None:
    begin_s, seconds = 0.0, 1.5
    outage = {"region": "a", "start_s": begin_s, "seconds": seconds}

    async def scenario() -> tuple[int, float]:
        """Connections that the syncer saw, and seconds from the link's return to its hearing."""
        heard: list[float] = []

        async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.append(time.monotonic())
            await reader.read()

        async with shaped(profile((outage,)), note) as (_, port):
            over = time.monotonic() + begin_s + seconds
            for _ in range(3):  # each given up before its SYN is tried again (after 3 s)
                async with dial(0, port) as (_, writer):
                    writer.write(b"x")
                    await asyncio.sleep(0.3)
            await asyncio.sleep(over + 0.05 - time.monotonic())
            async with dial(0, port) as (_, writer):
                writer.write(b"x")
                while not heard:
                    await asyncio.sleep(0.01)
                first = heard[0]
                await asyncio.sleep(over + 2.5 - time.monotonic())  # past every later try
        return len(heard), first - over

    connections, after_s = run(scenario())
    assert connections == 1
    assert after_s < 1.2  # a try of a SYN of the first dials comes 1.5 s after the link's return


def test_a_reset_travels_as_bytes_do() -> None:
    """A learner that is killed with unread bytes resets; the syncer's end breaks later."""
    broken: list[float] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(bytes(1000))
                await writer.drain()
                await asyncio.sleep(0.01)
        except ConnectionError:
            broken.append(time.monotonic())

    async def scenario() -> float:
        async with shaped(profile(), talk) as (proxy, port), dial(0, port) as (reader, writer):
            await reader.readexactly(5000)
            killed = time.monotonic()
            writer.transport.abort()
            while not broken:
                await asyncio.sleep(0.01)
            while proxy._connections:
                await asyncio.sleep(0.01)
            return killed

    killed = run(scenario())
    assert broken[0] - killed >= 0.04


def test_memory_is_bounded_when_the_receiver_does_not_read() -> None:
    """The sender is stopped; what the proxy holds is what its flow may hold."""
    release = asyncio.Event()
    total = 64 * 2**20

    async def stubborn(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        size = 0
        while data := await reader.read(2**20):
            size += len(data)
        writer.write(size.to_bytes(8))
        await writer.drain()

    async def scenario() -> None:
        wan = profile(rtt_ms=10, mbit_s=2000, tcp="none")
        async with shaped(wan, stubborn) as (proxy, port), dial(0, port) as (reader, writer):
            writer.write(bytes(total))
            writer.write_eof()
            (connection,) = proxy._connections
            flow = connection.flows["up"]
            before = -1
            while proxy.bytes()["0"]["up"] != before or flow.room() >= flow.chunk:
                before = proxy.bytes()["0"]["up"]
                await asyncio.sleep(0.2)
            assert flow.room() >= 0 and flow.capacity < 16 * 2**20
            assert before < total / 4  # the rest is still the sender's
            release.set()
            assert int.from_bytes(await reader.read()) == total
            assert flow.room() == flow.capacity

    run(scenario())


def test_a_new_connection_costs_a_round_trip() -> None:
    async def scenario() -> float:
        async with shaped(profile(), swallow) as (_, port):
            return await send_all(0, port, 10)

    assert_times(lambda: [run(scenario())], [0.16], rel=0.0, add=0.02)


def test_new_connections_do_not_hold_up_the_others() -> None:
    """Handshakes take a round trip of their own, not of the pipe that all share."""

    async def scenario() -> float:
        async with shaped(profile(rtt_ms=400, mbit_s=1000), swallow, "aa") as (_, port):
            sending = asyncio.create_task(send_all(0, port, 10_000_000))
            while not sending.done():
                async with dial(1, port):
                    await asyncio.sleep(0.02)
            return await sending

    assert_times(lambda: [run(scenario())], [0.8 + 80e6 * 1500 / 1448 / 1e9], rel=0.1)


def test_a_syncer_that_is_away_is_a_closed_connection() -> None:
    async def scenario() -> None:
        server = await asyncio.start_server(swallow, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        proxy = ShapingProxy(profile(), [route(0, port)])
        await proxy.start()
        try:
            async with dial(0, port) as (reader, _):
                begin = time.monotonic()
                with pytest.raises(ConnectionError):
                    await reader.readexactly(1)
                assert time.monotonic() - begin >= 0.08
        finally:
            await proxy.close()

    run(scenario())


def test_what_cannot_work_is_refused() -> None:
    none = WanProfile.from_config({"name": "none", "regions": ["x"], "syncer_region": "x"})
    assert not none.needs_proxy and none.table() == []
    with pytest.raises(ValueError, match="connect straight to the syncer"):
        ShapingProxy(none, [route(0, 1)])
    with pytest.raises(ValueError, match="listen_host of its own"):
        ShapingProxy(profile(), [route(0, 1), route(0, 2)])
    with pytest.raises(ValueError, match="an address of its own"):
        Route("0", "127.0.0.1", (1,), "127.0.0.1")
    with pytest.raises(ValueError, match=r"1\.\.65535"):
        Route("0", "127.0.1.1", (0,), "127.0.0.1")


@pytest.mark.parametrize("host", ["127.0.1.1", "192.0.2.1"])  # in use; not on this machine
def test_an_address_that_cannot_be_bound_is_named(host: str) -> None:
    async def scenario() -> None:
        server = await asyncio.start_server(swallow, "127.0.1.1", 0)
        port = server.sockets[0].getsockname()[1]
        proxy = ShapingProxy(profile(), [Route("7", host, (port,), "127.0.0.1")])
        try:
            with pytest.raises(ValueError, match=rf"learner 7 cannot listen on {host}:{port}"):
                await proxy.start()
        finally:
            server.close()

    run(scenario())
