"""How an operator's command reaches a running syncer: by address or run folder, bounded."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, Self

from dd_lightning.transport.address import Address, parse_address
from dd_lightning.transport.keys import OPERATOR, key_file, load_dial_keys
from dd_lightning.transport.operator_channel import Declined, OperatorChannel
from dd_lightning.transport.rendezvous import lookup

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # a folder's syncer is on this machine
UNREACHABLE = 1
KEYS_FOLDER = "keys"  # of a run that the launcher started with launcher.keys=true


def add_arguments(parser: argparse.ArgumentParser, timeout_s: float) -> None:
    """What every command that asks a syncer takes."""
    parser.add_argument(
        "target", help="tcp://HOST:PORT as the syncer prints it, or a run folder on this machine"
    )
    about = "an operator's key file, where the run has keys; default: that in the run folder"
    parser.add_argument("--key", type=Path, metavar="FILE", help=about)
    parser.add_argument("--timeout", type=float, default=timeout_s, help="seconds for an answer")


def address_of(target: str) -> str:
    """The address itself, or that of the syncer of a run folder.

    Raises:
        ValueError: neither an address nor a folder in which a syncer has run.
    """
    if "://" in target:
        return str(parse_address(target))
    file = Path(target) / "syncer" / "ports.json"
    if not file.is_file():
        raise ValueError(
            f"target is {target!r}, which holds no syncer/ports.json; allowed: tcp://HOST:PORT as "
            "the syncer prints it, or the folder of a run on this machine."
        )
    ports = json.loads(file.read_text())
    found = parse_address(ports.get("address") or f"tcp://127.0.0.1:{ports['store']}")
    return str(Address(EVERYWHERE.get(found.host, found.host), found.port))


def key_of(target: str, given: Path | None) -> Path | None:
    """The key file to use: the one given, else what the launcher made in a run folder."""
    made = key_file(Path(target) / KEYS_FOLDER, OPERATOR, OPERATOR)
    return made if given is None and made.is_file() else given


class Asker:
    """Asks one syncer; connects when needed, and anew after a failure. Used in a `with` block."""

    def __init__(self, address: str, timeout_s: float, key: Path | None = None) -> None:
        if not timeout_s > 0:
            raise ValueError(f"--timeout is {timeout_s:g}; allowed: seconds above 0.")
        self.address, self.timeout_s = address, timeout_s
        self._keys = load_dial_keys(key) if key is not None else None
        self._channel: OperatorChannel | None = None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Self:
        """From what `add_arguments` has added. Raises ValueError for what is wrong in it."""
        key = key_of(arguments.target, arguments.key)
        return cls(address_of(arguments.target), arguments.timeout, key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()

    def ask(self, what: str) -> dict[str, Any]:
        """The answer's body, within the timeout, connecting included.

        Raises:
            Declined: the syncer says why it does not.
            OSError: it cannot be reached, or did not answer.
        """
        deadline = time.monotonic() + self.timeout_s
        try:
            if self._channel is None:
                found = lookup(self.address, self.timeout_s)
                left_s = max(0.01, deadline - time.monotonic())
                self._channel = OperatorChannel(found, connect_timeout_s=left_s, keys=self._keys)
            return self._channel.ask(what, max(0.01, deadline - time.monotonic()))
        except Declined:
            raise
        except BaseException:
            self._drop()
            raise

    def ask_or_tell(self, what: str) -> dict[str, Any] | None:
        """As `ask`; None where there is no answer, once stderr says why in one line."""
        try:
            return self.ask(what)
        except OSError as error:
            print(_unreachable(self.address, error), file=sys.stderr)
            return None

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _unreachable(address: str, error: OSError) -> str:
    """One line that says what to look at."""
    cause = " ".join(str(error).split())
    if isinstance(error, Declined):
        return cause
    return (
        f"no answer of a syncer at {address} ({cause}). It may have ended or be starting, or the "
        "address is not the one that it printed (RUN/syncer/ports.json has it); what a run that "
        "ended was, `dd-lightning report RUN` tells."
    )
