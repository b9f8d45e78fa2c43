"""TCP proxy that shapes what goes between learners and the syncer, as a WAN profile says.

One process for all learners. Each has its own local address, from which the proxy also dials the
syncer: there a learner that bypassed its proxy is seen. Needs no root and leaves nothing behind.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from dd_lightning.network.connection import Connection, Side, bound_buffers
from dd_lightning.network.control import PathFaults, unshaped
from dd_lightning.network.lane import Flow, capacity_bytes, chunk_bytes
from dd_lightning.network.link import SYN_RTO_S, Direction, LinkModel
from dd_lightning.network.profiles import WanProfile
from dd_lightning.network.pump import Pump

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0  # for the proxy's own dial to the syncer, which is on this machine
STATS_EVERY_S = 1.0
WARN_EVERY_S = 60.0
DIRECTIONS: tuple[Direction, ...] = ("up", "down")
BACKLOG = 64


@dataclass(frozen=True, slots=True)
class Route:
    """Where one learner finds the syncer.

    Args:
        learner: the learner's id.
        listen_host: local IP address of this learner's proxy, such as 127.0.1.1, unlike all others.
        ports: listened on there and dialled on the target: the store's and the channels' ports.
        target_host: IP address that the syncer listens on; not a wildcard, which takes every
            address's port.
        region: of the learner; None: by its position in the list of routes.
    """

    learner: str
    listen_host: str
    ports: tuple[int, ...]
    target_host: str
    region: str | None = None

    def __post_init__(self) -> None:
        if not self.ports or not all(0 < port < 65536 for port in self.ports):
            raise ValueError(
                f"route of learner {self.learner}: ports={self.ports}; give the ports that the "
                "syncer listens on, each in 1..65535"
            )
        if self.listen_host == self.target_host:
            raise ValueError(
                f"route of learner {self.learner}: listen_host and target_host are both "
                f"{self.listen_host}; the proxy needs an address of its own, such as 127.0.1.1"
            )


class ShapingProxy:
    """Shapes every connection of every route; `start()`, then `close()`.

    Learners of one region share its up and down pipe. What a failure loses: nothing in an outage
    (bytes and closes are held), everything on its way when the proxy itself is closed.

    Args:
        start: `time.monotonic()` at which the outages' clocks begin; None: at `start()`.
        controlled: faults of single routes may be ordered (`control`); a profile that shapes
            nothing is then allowed.

    Raises:
        ValueError: a profile that shapes nothing, or two routes with one address.
    """

    def __init__(
        self,
        profile: WanProfile,
        routes: Sequence[Route],
        seed: int = 0,
        start: float | None = None,
        controlled: bool = False,
    ) -> None:
        if not profile.needs_proxy and controlled:
            profile = unshaped(profile)
        if not profile.needs_proxy:
            raise ValueError(
                f"network {profile.name} shapes nothing: connect straight to the syncer, or choose "
                "a profile with links"
            )
        hosts = [route.listen_host for route in routes]
        if not routes or len(set(hosts)) != len(hosts):
            raise ValueError(f"each route needs a listen_host of its own; given: {hosts}")
        self._profile = profile
        self._routes = tuple(routes)
        self._regions = {
            route.learner: route.region or profile.region_of(index)
            for index, route in enumerate(routes)
        }
        self._model = LinkModel(profile, seed)
        self._start = start
        self._seed = seed
        self._controlled = controlled
        self._faults: dict[str, PathFaults] = {}  # by learner, where controlled
        self._bytes = {route.learner: {"up": 0, "down": 0} for route in routes}
        self._pump: Pump | None = None
        self._warned_at: dict[str, float] = {}
        self._servers: list[asyncio.Server] = []
        self._connections: set[Connection] = set()
        self._dials: set[asyncio.Task[None]] = set()

    def bytes(self) -> dict[str, dict[str, int]]:
        """Payload handed over so far: `{learner: {"up": n, "down": n}}`."""
        return {learner: dict(counts) for learner, counts in self._bytes.items()}

    async def start(self) -> None:
        """Listen on every route.

        Raises:
            ValueError: an address of a route cannot be listened on.
        """
        loop = asyncio.get_running_loop()
        self._model.start = loop.time() if self._start is None else self._start
        if self._controlled:
            self._faults = {
                learner: PathFaults(
                    self._profile.link(region),
                    region,
                    self._model.start,
                    Random(f"{self._seed}:faults:{learner}"),
                )
                for learner, region in self._regions.items()
            }
        self._pump = Pump(self._model, loop)
        try:
            for route in self._routes:
                for port in route.ports:
                    await self._listen(route, port)
        except BaseException:
            await self.close()
            raise

    def control(self, command: Mapping[str, Any]) -> None:
        """Begin a fault of the route of `command["learner"]` (see `control.py`).

        Raises:
            ValueError: the learner has no route here, or the command is none.
        """
        learner = command.get("learner")
        if learner not in self._faults:
            raise ValueError(f"learner {learner!r} has no route here; {list(self._faults)} have")
        self._faults[learner].apply(command, asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Stop listening and drop all connections, with what is on its way."""
        for server in self._servers:
            server.close()
        for dial in list(self._dials):
            dial.cancel()
        await asyncio.gather(*self._dials, return_exceptions=True)
        for connection in list(self._connections):
            connection.abort()
        if self._pump is not None:
            self._pump.close()
        await asyncio.sleep(0)  # transports finish closing in the next turn of the loop

    async def _listen(self, route: Route, port: int) -> None:
        listener = _socket(route.listen_host)  # accepted sockets inherit its buffer sizes
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((route.listen_host, port))
        except OSError as error:
            listener.close()
            raise ValueError(
                f"the proxy of learner {route.learner} cannot listen on "
                f"{route.listen_host}:{port} ({error.strerror}). Each learner needs an address of "
                "its own: on Linux all of 127.0.0.0/8 is there; elsewhere add one (macOS: `sudo "
                f"ifconfig lo0 alias {route.listen_host}`) or run with network=none. Where the "
                "address is in use, the syncer must listen on one address instead of all."
            ) from error
        server = await asyncio.get_running_loop().create_server(
            lambda: self._accept(route, port), sock=listener, backlog=BACKLOG
        )
        self._servers.append(server)

    def _accept(self, route: Route, port: int) -> Side:
        """A learner dials: its side of a new connection; the syncer's follows after a handshake."""
        assert self._pump is not None
        region = self._regions[route.learner]
        counts = self._bytes[route.learner]

        def count(direction: Direction, num_bytes: int) -> None:
            counts[direction] += num_bytes

        faults = self._faults.get(route.learner)
        flows = {direction: self._flow(region, direction, faults) for direction in DIRECTIONS}
        alter = {"alter": faults.alter} if faults is not None else {}
        connection = Connection(
            self._pump, region, flows, count, self._connections.discard, **alter
        )
        self._connections.add(connection)
        dial = asyncio.ensure_future(self._dial(connection, route, port))
        self._dials.add(dial)
        dial.add_done_callback(self._dials.discard)
        return connection.learner_side

    def _flow(self, region: str, direction: Direction, faults: PathFaults | None) -> Flow:
        link = self._profile.link(region)
        path = self._model.path(region, direction, faults)
        return Flow(path, capacity_bytes(link, direction), chunk_bytes(link, direction))

    async def _dial(self, connection: Connection, route: Route, port: int) -> None:
        """Dial the syncer when the first packet is there; the learner's bytes wait for the answer.

        The learner's own connect() has returned by then, so it is here that a new connection costs
        its round trip (or, in an outage, the next try of a SYN: 1, 3, 7, … s after the first). A
        learner that hung up before a later try has sent none: the syncer never hears of it.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.sleep(connection.flows["up"].path.dial(began) - began)
        if loop.time() - began >= SYN_RTO_S and connection.learner_side.hung_up():
            connection.abort()
            return
        back = connection.flows["down"].path.dial(loop.time())
        try:
            outgoing = await self._connect(route, port)
        except OSError as error:  # a TimeoutError too
            self._warn_unreachable(route, port, error, loop.time())
            await asyncio.sleep(back - loop.time())
            connection.abort()
            return
        await loop.create_connection(lambda: connection.syncer_side, sock=outgoing)
        await asyncio.sleep(back - loop.time())
        connection.learner_side.open()

    def _warn_unreachable(self, route: Route, port: int, error: OSError, now: float) -> None:
        """Once a minute and learner: whoever dials comes back several times a second."""
        if now - self._warned_at.get(route.learner, float("-inf")) >= WARN_EVERY_S:
            self._warned_at[route.learner] = now
            log.warning(
                "learner %s: the syncer does not answer at %s:%s (%s)",
                *(route.learner, route.target_host, port, error),
            )

    async def _connect(self, route: Route, port: int) -> socket.socket:
        """A socket to the syncer whose source address is the learner's."""
        outgoing = _socket(route.target_host)
        try:
            outgoing.setblocking(False)
            outgoing.bind((route.listen_host, 0))
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                loop = asyncio.get_running_loop()
                await loop.sock_connect(outgoing, (route.target_host, port))
        except BaseException:
            outgoing.close()
            raise
        return outgoing


def _socket(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    bound_buffers(sock)
    return sock


def _write_stats(path: Path, proxy: ShapingProxy) -> None:
    """Replace the file at once, so that a reader never sees half of it."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(json.dumps({"learners": proxy.bytes()}))
    os.replace(draft, path)


class _Orders:
    """Commands that come as lines of JSON on stdin; a wrong one is said and changes nothing."""

    def __init__(self, proxy: ShapingProxy) -> None:
        self._proxy = proxy
        self._begun = b""  # of a line
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._read)

    def _read(self) -> None:
        data = os.read(sys.stdin.fileno(), 1 << 16)
        if not data:  # nobody is left to command
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        *lines, self._begun = (self._begun + data).split(b"\n")
        for line in lines:
            try:
                self._proxy.control(json.loads(line))
                log.info("did %s", line.decode())
            except (ValueError, TypeError, AttributeError) as error:  # no JSON, or no command
                log.error("refused %r: %s", line, error)


async def serve(config: Mapping[str, Any]) -> None:
    """Run a proxy from `{profile, routes, seed, stats_file, start, controlled}` until a signal.

    `controlled`: a line of JSON on stdin is a command (`ShapingProxy.control`).
    """
    routes = [Route(**{**route, "ports": tuple(route["ports"])}) for route in config["routes"]]
    proxy = ShapingProxy(
        WanProfile.from_config(config["profile"]),
        routes,
        config.get("seed", 0),
        config.get("start"),
        config.get("controlled", False),
    )
    stats = Path(config["stats_file"]) if config.get("stats_file") else None
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await proxy.start()
    if config.get("controlled"):
        _Orders(proxy)
    print(json.dumps({"ready": True}), flush=True)
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), STATS_EVERY_S if stats else None)
        if stats:
            _write_stats(stats, proxy)
    await proxy.close()


def main() -> None:
    """`python -m dd_lightning.network.proxy --config FILE.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        help="JSON: profile, routes, seed, stats_file, start, controlled",
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        asyncio.run(serve(json.loads(parser.parse_args().config.read_text())))
    except (ValueError, OSError) as error:
        raise SystemExit(f"proxy: {error}") from None


if __name__ == "__main__":
    main()
