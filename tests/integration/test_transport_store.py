"""The rendezvous store: what a lookup finds, how long it may take, what strangers can do."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest

from dd_lightning.protocol.messages import PROTOCOL_VERSION
from dd_lightning.transport import store_server
from dd_lightning.transport.frames import Arrival
from dd_lightning.transport.rendezvous import (
    ProtocolMismatch,
    Rendezvous,
    RendezvousError,
    RendezvousTimeout,
    lookup,
    parse_address,
    rendezvous_values,
    serve_store,
)
from tests.transport_samples import (
    connected,
    count,
    free_port,
    goodbye,
    open_descriptors,
    silent_port,
    until,
)

pytestmark = pytest.mark.integration

LOOKUP_S = 60.0  # the store's process imports torch, on a busy machine
BABBLE_S = 3.0  # where the answer never makes sense, so that all of it may be waited
FOUND = Rendezvous("127.0.0.1", 4321, "run-1", PROTOCOL_VERSION, "")


@pytest.fixture(scope="module")
def shared():
    """One store for the tests that leave it as it was."""
    server = serve_store("tcp://127.0.0.1:0", rendezvous_values("run-1", 4321))
    assert server.wait_ready()
    yield server
    server.close()


@pytest.fixture
def store(shared):
    yield shared
    shared.update(rendezvous_values("run-1", 4321))


def stranger(address):
    from torch.distributed import TCPStore

    where = parse_address(address)
    return TCPStore(
        where.host,
        where.port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=LOOKUP_S),
    )


def eventually(condition):
    deadline = time.monotonic() + LOOKUP_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_lookup_finds_what_is_served(store):
    assert not store.address.endswith(":0")
    assert lookup(store.address, LOOKUP_S) == FOUND
    store.update(rendezvous_values("run-1", 99, "print", "far.example"))
    eventually(lambda: lookup(store.address, LOOKUP_S).channel_port == 99)
    assert lookup(store.address, LOOKUP_S) == Rendezvous(
        "far.example", 99, "run-1", PROTOCOL_VERSION, "print"
    )


def test_it_listens_on_its_address_only(store):
    port = parse_address(store.address).port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 1.0).close()


@pytest.mark.parametrize(
    ("key", "value", "error", "cause"),
    [
        ("dd/channel_port", "", RendezvousError, "not a port"),
        ("dd/channel_port", "70000", RendezvousError, "not a port"),
        ("dd/protocol", "77", ProtocolMismatch, "version '77'.*Install the same version"),
        ("dd/run_id", "", RendezvousError, "run_id is empty"),
        ("dd/run_id", "a\nb", RendezvousError, "nonsense"),
        ("dd/run_id", "\u00e9", RendezvousError, "nonsense|empty"),
        ("dd/run_id", "x" * 1000, RendezvousError, "nonsense"),
        ("dd/run_id", "x" * 1_000_000, RendezvousError, "sent over"),
    ],
)
def test_nonsense_in_the_store_is_named(store, key, value, error, cause):
    store.update({key: value})
    caught = None

    def told():
        nonlocal caught
        try:
            lookup(store.address, LOOKUP_S)
        except error as refusal:
            caught = str(refusal)
        return caught is not None and re.search(cause, caught)

    eventually(told)
    assert store.address in caught


def test_a_stranger_in_the_store_harms_nobody(store):
    with connected() as (syncer, learner):
        intruder = stranger(store.address)
        intruder.set("dd/channel_port", "1")
        intruder.delete_key("dd/run_id")
        for i in range(100):
            intruder.set(f"junk/{i}", "x" * 1000)
        with socket.create_connection(("127.0.0.1", parse_address(store.address).port)) as raw:
            raw.sendall(os.urandom(4096))
        assert learner.send(goodbye())
        assert until(syncer, count(Arrival, 1))[0].session == learner.session
        # and what was changed is right again soon
        eventually(lambda: lookup(store.address, LOOKUP_S) == FOUND)


def test_a_store_that_dies_is_started_again(store):
    before, starts = store.pid, store.starts
    os.kill(before, signal.SIGKILL)
    assert lookup(store.address, LOOKUP_S) == FOUND
    assert store.starts == starts + 1
    assert store.pid != before


def test_a_store_that_a_stranger_fills_is_started_again(store):
    starts = store.starts
    assert store.wait_ready()
    with patch.object(store_server, "MAX_GROWTH_BYTES", 16 << 20):
        intruder = stranger(store.address)
        with pytest.raises(RuntimeError):  # until its connection breaks
            for i in range(10_000):
                intruder.set(f"junk/{i}", "x" * (1 << 20))
        eventually(lambda: store.starts > starts)
    assert lookup(store.address, LOOKUP_S) == FOUND


def test_closed_and_silent_ports_are_bounded():
    threads = threading.active_count()
    closed = free_port()
    with pytest.raises(RendezvousError, match=f"127.0.0.1:{closed}: Connection refused"):
        lookup(f"tcp://127.0.0.1:{closed}", LOOKUP_S)
    with silent_port() as silent:
        with pytest.raises(RendezvousTimeout, match=f"127.0.0.1:{silent}: no answer"):
            lookup(f"tcp://127.0.0.1:{silent}", 0.5)
        # the client is gone too, although the port stays silent
        eventually(lambda: threading.active_count() <= threads)


def test_a_server_that_closes_or_babbles():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer(data):
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                try:
                    connection.sendall(data)
                except ConnectionError:
                    return

        for data, cause in ((b"", "closed the connection"), (b"\xff" * (1 << 20), "127.0.0.1")):
            thread = threading.Thread(target=answer, args=(data,))
            thread.start()
            with pytest.raises(OSError, match=cause) as caught:
                lookup(f"tcp://127.0.0.1:{server.getsockname()[1]}", BABBLE_S)
            assert isinstance(caught.value, RendezvousError | RendezvousTimeout)
            thread.join(LOOKUP_S)


def test_a_proxy_whose_syncer_is_away_is_told_without_a_store_client(monkeypatch):
    """It accepts, then passes the close on. No TCPStore client, hence no stack traces either."""
    from dd_lightning.transport import rendezvous

    monkeypatch.setattr(rendezvous, "_Client", None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        closing = threading.Thread(target=lambda: server.accept()[0].close())
        closing.start()
        with pytest.raises(RendezvousError, match=f"127.0.0.1:{port}: closed the connection"):
            lookup(f"tcp://127.0.0.1:{port}", 30.0, silence_s=30.0)
        closing.join()


def test_silence_is_what_a_store_begins_with(store):
    assert lookup(store.address, LOOKUP_S, silence_s=0.05) == FOUND


def test_a_port_in_use_and_an_open_host(store):
    port = parse_address(store.address).port
    with pytest.raises(ValueError, match=f"Stop what uses port {port}"):
        serve_store(store.address, {})
    with pytest.raises(ValueError, match="insecure: true"):
        serve_store("tcp://0.0.0.0:0", {})


def test_close_ends_the_process_and_frees_the_address():
    # clients of the tests before, whose server was none, give up first
    eventually(lambda: all(t.name != "rendezvous" for t in threading.enumerate()))
    descriptors, threads = open_descriptors(), threading.active_count()
    server = serve_store("tcp://127.0.0.1:0", {})
    assert server.wait_ready()
    pid = server.pid
    server.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert (open_descriptors(), threading.active_count()) == (descriptors, threads)
    with socket.create_server(("127.0.0.1", parse_address(server.address).port)):
        pass


PARENT = """
import json, os, time
from dd_lightning.transport.rendezvous import serve_store
server = serve_store("tcp://127.0.0.1:0", {})
assert server.wait_ready()
print(json.dumps([server.pid, server.address]), flush=True)
time.sleep(600)
"""


def test_the_process_ends_with_a_killed_parent():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        try:
            pid, address = json.loads(parent.stdout.readline())
        finally:
            parent.kill()
    where = parse_address(address)

    def refused():
        try:
            socket.create_connection((where.host, where.port), 1.0).close()
        except ConnectionRefusedError:
            return True
        return False

    eventually(refused)
    eventually(lambda: not running(pid))


def running(pid):
    """Not gone and not a zombie that waits for whoever adopted it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
