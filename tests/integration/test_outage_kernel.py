"""After an outage, over the kernel's own TCP: the learner is back before its old connection."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dd_lightning.protocol.tape import read_tape
from tests.netns.namespaces import ADDRESSES, Shape, joined_namespaces, unavailable
from tests.syncer_process import END_S, Syncer, until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.netns,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
]

ONE_WAY_S = 0.04
STEP_S = 0.02
BACKOFF = 4  # TCP's timeouts so far, each twice the one before: the next is over 4 s away
BOUND_S = 2.0  # beyond a round trip
NAMES = ("0", "1")
SETTINGS = (
    "learners=2",
    "insecure=true",
    "algorithm=short_run",
    "algorithm.fragments=2",
    "algorithm.sync_every=12",
)
PLAIN = """
import socket, sys, threading, time
def tell_backoff():
    last = 0
    while True:
        info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 12)
        if info[4] != last:
            print("timeout", int.from_bytes(info[8:], sys.byteorder) / 1e6, flush=True)
            print("backoff", last := info[4], flush=True)
        time.sleep(0.01)
if sys.argv[1] == "listen":
    listener = socket.create_server((sys.argv[2], 7)); print("ready", flush=True)
    with listener.accept()[0] as end:
        while data := end.recv(64): end.sendall(data)
else:
    end = socket.create_connection((sys.argv[2], 7)); print("ready", flush=True)
    threading.Thread(target=tell_backoff, daemon=True).start()
    while True:
        end.sendall(b"x" * 64); end.recv(64, socket.MSG_WAITALL)
        print("answer", time.time(), flush=True); time.sleep(0.02)
"""


class Plain:
    """A plain TCP connection that says something all the time."""

    def __init__(self, inside: Inside, near: str, far: str) -> None:
        listener = inside.start(far, "-c", PLAIN, "listen", ADDRESSES[1])
        assert listener.stdout.readline() == "ready\n"
        dialler = inside.start(near, "-c", PLAIN, "dial", ADDRESSES[1])
        assert dialler.stdout.readline() == "ready\n"
        self.answers: list[float] = []  # wall times
        self.backoff = 0
        self.timeout_s = 0.0  # from a retransmission to the next, as the kernel says
        threading.Thread(target=self._read, args=(dialler.stdout,), daemon=True).start()

    def _read(self, lines) -> None:
        for line in lines:
            what, value = line.split()
            if what == "answer":
                self.answers.append(float(value))
            elif what == "timeout":
                self.timeout_s = float(value)
            else:
                self.backoff = int(value)


class Inside:
    """Processes in namespaces, ended at the end of the test."""

    def __init__(self, logs: Path) -> None:
        self._logs, self._started = logs, []

    def start(self, namespace: str, *arguments: str) -> subprocess.Popen[str]:
        with open(self._logs / f"{len(self._started)}.err", "w") as log:
            self._started.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", namespace, sys.executable, *arguments],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                )
            )
        return self._started[-1]

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait(END_S)
            process.stdout.close()


@pytest.fixture
def inside(tmp_path):
    started = Inside(tmp_path)
    yield started
    started.end()


def of(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_tape(run_dir / "tape.jsonl") if event["event"] == kind]


def first_after(times: Callable[[], list[float]], moment: float) -> float:
    """Seconds from then to the first of the times after it."""
    until(lambda: any(at >= moment for at in times()))
    return min(at for at in times() if at >= moment) - moment


def test_the_first_contribution_after_an_outage_does_not_wait_for_tcp(tmp_path, inside) -> None:
    run_dir = tmp_path / "run"
    with joined_namespaces(Shape(delay_s=ONE_WAY_S)) as link:
        near, far = link.names
        listen = f"--listen=tcp://{ADDRESSES[1]}:0"
        syncer = Syncer(run_dir, listen, *SETTINGS, before=("ip", "netns", "exec", far))
        try:
            command = ("-m", "tests.learner_process", syncer.address, "--step-s", str(STEP_S))
            learners = [inside.start(near, *command, name) for name in NAMES]
            for learner in learners:
                assert learner.stdout.readline() == "training\n"
            plain = Plain(inside, near, far)
            until(lambda: len(of(run_dir, "merge")) >= 8 and len(plain.answers) > 50)
            began = link.cut()
            until(lambda: plain.backoff >= BACKOFF)
            timeout_s, back = plain.timeout_s, link.heal()
            started = syncer.started_s()
            after = [first_after(lambda n=n: contributed(run_dir, n, started), back) for n in NAMES]
            kernel = first_after(lambda: plain.answers, back)
        finally:
            syncer.kill()
    print(
        f"outage {back - began:.1f} s; contributions {after} s after it, plain TCP {kernel} s "
        f"({timeout_s=})"
    )
    # Not with the plain connection's own answer: where the cut lost an answer and no request, its
    # far end sends again too, and either of the two may be about to when the link is back.
    assert max(after) < 0.6 * timeout_s
    assert max(after) <= BOUND_S + 2 * ONE_WAY_S
    they_trained_on_and_lost_no_step(run_dir, (back - began) / STEP_S)


def contributed(run_dir: Path, learner: str, started: float) -> list[float]:
    """Wall times at which contributions were received."""
    found = of(run_dir, "contribution")
    return [started + event["t_s"] for event in found if event["learner"] == learner]


def they_trained_on_and_lost_no_step(run_dir: Path, steps: float) -> None:
    again = [join for join in of(run_dir, "join") if join["generation"] == 2]
    assert {join["learner"] for join in again} == set(NAMES)
    assert all(join["continues"] and join["cause"] == "re-attach" for join in again)
    for name in NAMES:
        first = next(
            event
            for event in of(run_dir, "contribution")
            if event["learner"] == name and event["generation"] == 2
        )
        assert first["verdict"] == "accepted" and first["base_version"] is not None
        assert first["steps"] > 0.3 * steps  # a busy machine makes them longer
