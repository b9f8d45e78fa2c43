"""Where the syncer is and who this learner is: from arguments, else from the environment."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from dd_lightning.transport.keys import load_dial_keys

_ADDRESS = re.compile(r"^tcp://(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):(\d{1,5})$")

_TEACH = """{given}. Give the strategy the address that `dd-lightning syncer` prints:

    Trainer(strategy=DecoupledDiLoCoStrategy("tcp://127.0.0.1:29400"))

or set it for the string form:

    DD_SYNCER=tcp://127.0.0.1:29400  with  Trainer(strategy="decoupled_diloco")"""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a learner needs to know before it joins."""

    syncer: str
    learner: str
    via: str
    key: str = ""  # path of its key file, "" for a plain channel


def identify(syncer: str | None, learner: str | int | None, key: str | None) -> Identity:
    """Arguments first, then DD_SYNCER, DD_LEARNER, DD_KEY, DD_VIA. A learner without an id goes by
    its host's name, so that it is the same learner after a restart.

    Raises:
        ValueError: no address, one that is not tcp://HOST:PORT, no usable key file, no usable id.
    """
    address = syncer or os.environ.get("DD_SYNCER", "")
    if not address:
        raise ValueError(_TEACH.format(given="no syncer address: syncer=None, DD_SYNCER not set"))
    match = _ADDRESS.match(address)
    if match is None or not 0 < int(match.group(2)) < 65536:
        given = f"syncer is {address!r}; allowed: tcp://HOST:PORT, port 1 to 65535"
        raise ValueError(_TEACH.format(given=given))
    key = str(key or os.environ.get("DD_KEY", ""))
    if key:
        load_dial_keys(Path(key))  # what is wrong with it shows now, not at the first connection
    if learner is None:
        learner = os.environ.get("DD_LEARNER") or socket.gethostname()
    name = str(learner)
    if not 1 <= len(name) <= 200 or not name.isprintable():
        raise ValueError(
            f"learner is {name[:50]!r}; allowed: an id of 1 to 200 printable characters, the same "
            "after a restart (learner=... or DD_LEARNER)."
        )
    return Identity(address, name, os.environ.get("DD_VIA", ""), key)
