"""The proxy's faults of single routes, on real sockets: held, delivered, altered; nobody else's."""

import asyncio
import json
import subprocess
import sys
import time

import pytest

from dd_lightning.network import WanProfile
from dd_lightning.network.probe import AckServer, request_times
from dd_lightning.network.proxy import Route, ShapingProxy

pytestmark = pytest.mark.integration

WAIT_S = 60.0
NONE = {"name": "none", "regions": ["local"], "syncer_region": "local"}


async def echo(reader, writer):
    while data := await reader.read(2**16):
        writer.write(data)
    writer.close()


class Talk:
    """Learners 0 and 1 behind one controlled proxy, each with a connection that is echoed."""

    async def __aenter__(self):
        self.server = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = self.server.sockets[0].getsockname()[1]
        routes = [Route(str(k), f"127.0.1.{k + 1}", (port,), "127.0.0.1") for k in range(2)]
        profile = WanProfile.from_config(NONE)
        self.proxy = ShapingProxy(profile, routes, seed=1, controlled=True)
        await self.proxy.start()
        self.ends = [await asyncio.open_connection(f"127.0.1.{k + 1}", port) for k in range(2)]
        return self

    async def __aexit__(self, *_):
        for _, writer in self.ends:
            writer.close()
        await self.proxy.close()
        self.server.close()

    async def said(self, learner, data):
        """(what comes back of `data`, after how many seconds)."""
        reader, writer = self.ends[learner]
        began = time.monotonic()
        writer.write(data)
        back = await reader.readexactly(len(data))
        return back, time.monotonic() - began


def run(test):
    async def inside():
        async with Talk() as talk:
            await asyncio.wait_for(test(talk), WAIT_S)

    asyncio.run(inside())


def test_a_cut_holds_bytes_and_heals_by_itself():
    async def test(talk):
        await talk.said(0, b"warm")
        await talk.said(1, b"warm")
        talk.proxy.control({"do": "cut", "learner": "1", "seconds": 1.0})
        held = asyncio.ensure_future(talk.said(1, b"held" * 1000))
        back, took_s = await talk.said(0, b"not held")
        assert back == b"not held" and not held.done()
        back, took_s = await held
        assert back == b"held" * 1000 and took_s >= 1.0

    run(test)


def test_a_collapsed_link_is_slow_and_only_that_one():
    async def test(talk):
        talk.proxy.control({"do": "throttle", "learner": "1", "seconds": 30, "share": 0.001})
        slow = asyncio.ensure_future(talk.said(1, bytes(30_000)))
        await talk.said(0, bytes(300_000))
        assert not slow.done()
        _, took_s = await slow
        assert took_s >= 2 * 0.2  # 30 kB at 1 Mbit/s, both ways

    run(test)


def test_corrupt_bytes_come_through_changed_and_in_number():
    async def test(talk):
        data = bytes(10_000)
        talk.proxy.control({"do": "corrupt", "learner": "1", "seconds": 30, "flips": 1})
        assert sum(byte != 0 for byte in (await talk.said(1, data))[0]) == 1
        assert (await talk.said(1, data))[0] == data
        assert (await talk.said(0, data))[0] == data

    run(test)


def test_an_unknown_learner_or_command_is_refused():
    async def test(talk):
        with pytest.raises(ValueError, match="learner '2' has no route here"):
            talk.proxy.control({"do": "cut", "learner": "2", "seconds": 1})
        with pytest.raises(ValueError, match="no command"):
            talk.proxy.control({"do": "explode", "learner": "1"})
        assert (await talk.said(1, b"as before"))[0] == b"as before"

    run(test)


def test_without_control_a_profile_that_shapes_nothing_is_refused():
    with pytest.raises(ValueError, match="shapes nothing"):
        ShapingProxy(WanProfile.from_config(NONE), [Route("0", "127.0.1.1", (1,), "127.0.0.1")])


def test_the_process_takes_commands_on_its_stdin(tmp_path):
    with AckServer() as server:
        route = {"learner": "0", "listen_host": "127.0.1.1", "target_host": server.host}
        routes = [{**route, "ports": [server.port]}]
        start = time.monotonic()  # of the outage's clock: it is over
        config = {"profile": NONE, "routes": routes, "controlled": True, "start": start}
        file = tmp_path / "proxy.json"
        file.write_text(json.dumps(config))
        command = [sys.executable, "-m", "dd_lightning.network.proxy", "--config", str(file)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, **pipes, text=True) as proxy:
            try:
                assert json.loads(proxy.stdout.readline()) == {"ready": True}
                cut = json.dumps({"do": "cut", "learner": "0", "seconds": 1.5})
                proxy.stdin.write(f"nonsense\n[1]\n{cut}\n")
                proxy.stdin.flush()
                said = [proxy.stderr.readline() for _ in range(3)]
                assert ["refused" in line for line in said] == [True, True, False], said
                assert "did" in said[2]
                assert request_times(("127.0.1.1", server.port), [1000], 1)[1000][0] >= 1.0
            finally:
                proxy.terminate()
                proxy.communicate(timeout=WAIT_S)
            assert proxy.returncode == 0
