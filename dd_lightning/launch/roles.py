"""The command line, environment and log file of each process of a run, and how it says it is ready.

syncer, one proxy (unless network=none), M learners, one evaluator. Learner k dials 127.0.1.(k+1)
where the proxy listens under the syncer's own port numbers.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from dd_lightning.launch.interrupt import Interrupt
from dd_lightning.launch.keys import ensure_keys, learner_environment, syncer_arguments
from dd_lightning.launch.processes import Child, scrubbed_environment
from dd_lightning.launch.settings import Settings, parse_listen
from dd_lightning.syncer.checkpoint import newest_checkpoint
from dd_lightning.transport.rendezvous import lookup

CONFIG = "config.yaml"
SYNCER_CONFIG = "syncer.yaml"
CUTS = "cuts"  # folder of consistent cuts, the syncer's and each learner's
PROXY_CONFIG = "proxy.json"
READY_POLL_S = 0.05


class ChildFailed(RuntimeError):
    """A process ended, or did not get ready; the message holds its log's last lines."""

    def __init__(self, child: Child, said: str = "") -> None:
        super().__init__(f"{said or child.description()}; end of {child.log}:\n{child.tail()}")


def write_configs(settings: Settings, folder: Path) -> None:
    """`config.yaml` (everything, resolved) and `syncer.yaml` (what the syncer is started with)."""
    folder.mkdir(parents=True, exist_ok=True)
    dump = yaml.safe_dump(settings.values, sort_keys=False, allow_unicode=True)
    (folder / CONFIG).write_text(dump)
    dump = yaml.safe_dump(settings.syncer.to_dict(), sort_keys=False, allow_unicode=True)
    (folder / SYNCER_CONFIG).write_text(dump)
    if settings.launcher["keys"]:
        ensure_keys(folder, settings.learner_ids)


class Roles:
    """Starts the processes of one run in its folder."""

    def __init__(self, settings: Settings, folder: Path, interrupt: Interrupt) -> None:
        self.settings = settings
        self.folder = folder
        self._interrupt = interrupt
        self.address = ""  # of the syncer's store, once it listens
        self._cut = settings.cut
        self._since_s = time.time()
        self._threads = settings.launcher["threads_per_process"]

    def start_syncer(self, resume: bool = False, nice: int = 0) -> Child:
        """Start the syncer; it listens when `syncer_ready` returns.

        Args:
            resume: go on with the run of the folder, on the same ports.
            nice: added to the launcher's own, here and below.
        """
        command = _python("-m", "dd_lightning.cli", "syncer")
        command += ["--listen", self.settings.launcher["listen"], "--run-dir", str(self.folder)]
        command += ["--config", str(self.folder / SYNCER_CONFIG), *(["--resume"] if resume else [])]
        if resume and self._cut is not None and not self._has_checkpoint_of_its_own():
            command += ["--cut", self._cut]
        command += syncer_arguments(self.folder)
        for name, own in self.settings.loggers.items():
            command += ["--logger", f"{name}={json.dumps(own)}"]
        launched = {"DD_LAUNCHED": "1"}  # the summary is the launcher's, who knows the evaluations
        return self._child("syncer", command, self.folder / "syncer.log", launched, nice=nice)

    def _has_checkpoint_of_its_own(self) -> bool:
        """One that was written since this launch: those before it may be later than the cut."""
        newest = newest_checkpoint(self.folder / "syncer")
        return newest is not None and newest.stat().st_mtime > self._since_s

    def syncer_ready(self, syncer: Child) -> None:
        """Wait until the syncer has printed its address.

        Raises:
            ChildFailed: it ended, or `timeouts.connect` passed.
        """
        timeout_s = self.settings.syncer.timeouts.connect
        said = first_json(syncer, "listening", timeout_s, self._interrupt)
        self.address = said["listening"]

    def start_proxy(self, again: bool = False, nice: int = 0) -> Child:
        """Start the proxy for all learners; `proxy_ready` waits until it listens.

        Args:
            again: with the ports of its first start; the syncer may be away.
        """
        path = self.folder / PROXY_CONFIG
        if not again:
            self._write_proxy_config(path)
        command = _python("-m", "dd_lightning.network.proxy", "--config", str(path))
        controlled = self.settings.faults.needs_proxy
        log = self.folder / "proxy.log"
        return self._child("proxy", command, log, keep_stdin=controlled, nice=nice)

    def proxy_ready(self, proxy: Child) -> None:
        """Wait until the proxy listens.

        Raises:
            ChildFailed: it ended, or did not listen within `timeouts.connect`.
        """
        first_json(proxy, "ready", self.settings.syncer.timeouts.connect, self._interrupt)

    def _write_proxy_config(self, path: Path) -> None:
        timeouts = self.settings.syncer.timeouts
        host, port = parse_listen(self.address)
        channel = lookup(self.address, timeouts.connect).channel_port
        routes = [
            {
                "learner": learner,
                "listen_host": proxy_host(learner),
                "ports": [port, channel],
                "target_host": host,
            }
            for learner in self.settings.learner_ids
        ]
        config = {
            "profile": self.settings.values["network"],
            "routes": routes,
            "seed": self.settings.values["seed"],
            "controlled": self.settings.faults.needs_proxy,
            "start": time.monotonic(),  # a proxy that is started again keeps the outages' times
        }
        path.write_text(json.dumps(config, indent=1))

    def start_learner(self, learner: str, nice: int = 0) -> Child:
        """Start (or start again) one learner."""
        environment = {"DD_SYNCER": self.address, "DD_LEARNER": learner}
        if self.settings.proxied:
            host = proxy_host(learner)
            port = parse_listen(self.address)[1]
            environment |= {"DD_SYNCER": f"tcp://{host}:{port}", "DD_VIA": host}
        environment |= learner_environment(self.folder, learner)
        module = "dd_lightning.launch.learner"
        command = _python("-m", module, str(self.folder / CONFIG), "--learner", learner)
        own = self.folder / "learners" / learner
        if self._cut is not None and (cut := own / CUTS / f"{self._cut}.ckpt").is_file():
            command += ["--checkpoint", str(cut)]
        log = own / "learner.log"
        return self._child(f"learner {learner}", command, log, environment, nice=nice)

    def start_evaluator(self) -> Child:
        """Start the evaluator; closing its stdin asks for the last evaluation."""
        module = "dd_lightning.launch.evaluator"
        command = _python("-m", module, str(self.folder / CONFIG))
        return self._child("evaluator", command, self.folder / "evaluator.log", keep_stdin=True)

    def _child(
        self,
        name: str,
        command: list[str],
        log: Path,
        extra: dict[str, str] | None = None,
        keep_stdin: bool = False,
        nice: int = 0,
    ) -> Child:
        environment = scrubbed_environment(self._threads, extra)
        return Child(name, command, log, environment, keep_stdin, nice)


def proxy_host(learner: str) -> str:
    """The loopback address of this learner's proxy."""
    return f"127.0.1.{int(learner) + 1}"


def first_json(child: Child, key: str, timeout_s: float, interrupt: Interrupt) -> dict[str, Any]:
    """The first line of a child that is a JSON object with `key` in it.

    Raises:
        ChildFailed: it ended first, nothing came within `timeout_s`, or the user interrupted.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        ended = child.exit_code() is not None  # asked first: what it wrote before counts
        if (said := child.said(key)) is not None:
            return said
        if ended:
            raise ChildFailed(child)
        if time.monotonic() >= deadline:
            raise ChildFailed(child, f"{child.name} was not ready within {timeout_s:g} s")
        if interrupt.requested:
            raise ChildFailed(child, f"interrupted before {child.name} was ready")
        time.sleep(READY_POLL_S)


def _python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]
