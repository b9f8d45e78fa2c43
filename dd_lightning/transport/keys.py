"""Key files and the key objects that the channels take. Files are YAML for people to read.

A run has one pair for its syncer and one for everybody who dials in: learners, operators. A file of
the latter also holds the syncer's public key, which so travels with it, by hand, and is never taken
from the rendezvous store. The public keys of all who may come in stand in `allowed.yaml`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml
import zmq
from zmq.utils import z85

SYNCER, LEARNER, OPERATOR = "syncer", "learner", "operator"
SYNCER_FILE, ALLOWED_FILE = "syncer.key", "allowed.yaml"
KEY_CHARS = 40  # of a key in Z85, the form ZeroMQ takes
SECRET_MODE = 0o600
OTHERS = stat.S_IRWXG | stat.S_IRWXO
MAKE = "Make one with `dd-lightning keys new`."

_SYNCER_HEAD = """\
# SECRET key of the syncer of a dd_lightning run. It stays on the syncer's machine:
#   dd-lightning syncer --key {name} --allow {allowed} --listen tcp://0.0.0.0:29400 ...
"""
_DIAL_HEAD = """\
# SECRET key of {who} of a dd_lightning run, and the syncer's public key. Copy it
# to that machine alone, by a way you trust; it stays readable by its user only (chmod 600).
#   {use}
"""
_ALLOWED_HEAD = """\
# Public keys of all who may come in, for `dd-lightning syncer --allow`. Nothing here is secret.
# A running syncer takes up what is added; who is taken out is refused at the next connection.
"""
_USE = {
    LEARNER: "DD_KEY={name} python train.py",
    OPERATOR: "dd-lightning status tcp://HOST:PORT --key {name}",
}


@dataclass(frozen=True, slots=True)
class DialKeys:
    """What one who dials in holds: a pair of its own and the syncer's public key (Z85)."""

    kind: str
    name: str
    public: bytes
    secret: bytes = field(repr=False)
    syncer: bytes
    file: str = ""  # where it was read, for messages

    @property
    def fingerprint(self) -> str:
        """Of the syncer's key, as the store gives it as a hint."""
        return fingerprint(self.syncer)


@dataclass(frozen=True, slots=True)
class SyncerKeys:
    """The syncer's pair (Z85) and where its allow-list is: a file, or a folder of them."""

    public: bytes
    secret: bytes = field(repr=False)
    allow: Path

    @property
    def fingerprint(self) -> str:
        """A short hash of the public key, for people and for the store."""
        return fingerprint(self.public)


def fingerprint(public: bytes) -> str:
    """16 hex digits of the SHA-256 of a public key given in Z85."""
    return hashlib.sha256(z85.decode(public)).hexdigest()[:16]


# ------------------------------------------------------------------------- reading


def load_syncer_keys(key: Path, allow: Path) -> SyncerKeys:
    """From a syncer's key file; the allow-list is read once, so that an error shows now.

    Raises:
        ValueError: a file is missing, unreadable, open to others or no such file.
    """
    values = _read_secret(key, (SYNCER,))
    read_allowed(allow)
    return SyncerKeys(*_pair(key, values), allow)


def load_dial_keys(path: Path) -> DialKeys:
    """From the key file of a learner or operator.

    Raises:
        ValueError: the file is missing, unreadable, open to others or no such file.
    """
    values = _read_secret(path, (LEARNER, OPERATOR))
    syncer = _key(path, values, "syncer")
    public, secret = _pair(path, values)
    name = str(values.get("name", ""))
    return DialKeys(values["kind"], name, public, secret, syncer, str(path))


def read_allowed(allow: Path) -> dict[bytes, str]:
    """Public key to name, of `allow`: one file, or every *.yaml in a folder.

    Raises:
        ValueError: nothing is there, or it is no allow-list.
    """
    files = sorted(allow.glob("*.yaml")) if allow.is_dir() else [allow]
    if not files:
        raise ValueError(f"--allow is {str(allow)!r}, a folder without *.yaml; allowed: "
                         f"{ALLOWED_FILE}, or a folder that holds such files. {MAKE}")  # fmt: skip
    found: dict[bytes, str] = {}
    for file in files:
        values = _read_yaml(file)
        keys = values.get("allowed")
        if not isinstance(keys, Mapping) or "secret" in values:
            raise ValueError(
                f"{file} is no allow-list; allowed: a mapping `allowed` of names to public keys, "
                f"as in the {ALLOWED_FILE} that `dd-lightning keys new` writes."
            )
        found |= {_key(file, keys, name): str(name) for name in keys}
    return found


def _read_secret(path: Path, kinds: Sequence[str]) -> dict[str, Any]:
    values = _read_yaml(path)
    if values.get("kind") not in kinds:
        raise ValueError(
            f"the key file {path} is of kind {values.get('kind')!r}; allowed here: "
            f"{' | '.join(kinds)}. The syncer takes {SYNCER_FILE}, each learner its own file."
        )
    if os.name == "posix" and path.stat().st_mode & OTHERS:
        raise ValueError(
            f"the key file {path} can be read or written by others; allowed: by its user alone. "
            f"If nobody has copied it: chmod 600 {path}. Otherwise make new keys."
        )
    return values


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the file {path} cannot be read: {error.strerror}. {MAKE}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ValueError(f"the file {path} is no YAML, so no key file of ours. {MAKE}") from None
    if not isinstance(values, dict):
        raise ValueError(f"the file {path} holds no mapping, so it is no key file. {MAKE}")
    return values


def _key(path: Path, values: Mapping[Any, Any], name: Any) -> bytes:
    value = values.get(name)
    if isinstance(value, str) and len(value) == KEY_CHARS:
        with contextlib.suppress(KeyError, struct.error):  # no digit of Z85; above 32 bits
            z85.decode(value)
            return value.encode()
    raise ValueError(
        f"{name!r} in {path} is no key; allowed: {KEY_CHARS} characters of Z85 in quotes, as "
        "`dd-lightning keys new` writes them."
    )


def _pair(path: Path, values: Mapping[str, Any]) -> tuple[bytes, bytes]:
    public, secret = _key(path, values, "public"), _key(path, values, "secret")
    if zmq.curve_public(secret) != public:
        raise ValueError(f"`public` and `secret` in {path} do not belong together. {MAKE}")
    return public, secret


# ------------------------------------------------------------------------- making


def new_keys(folder: Path, learners: Sequence[str], operator: str) -> list[Path]:
    """Makes all keys of a run: the syncer's, one per learner, an operator's, and the allow-list.

    Raises:
        ValueError: a file is there already (nothing is written then), or an id is given twice.
    """
    public, secret = zmq.curve_keypair()
    syncer = folder / SYNCER_FILE
    head = _SYNCER_HEAD.format(name=SYNCER_FILE, allowed=ALLOWED_FILE)
    text = _text(head, kind=SYNCER, public=public, secret=secret)
    dialing = [(LEARNER, learner) for learner in learners] + [(OPERATOR, operator)]
    return _write(folder, dialing, public, {}, {syncer: text})


def add_keys(folder: Path, learners: Sequence[str]) -> list[Path]:
    """Makes keys of more learners beside those of a run, and lets them in.

    Raises:
        ValueError: `folder` has no keys of a run, or one of these learners' already.
    """
    public = _key(folder / SYNCER_FILE, _read_secret(folder / SYNCER_FILE, (SYNCER,)), "public")
    allowed = {name: key for key, name in read_allowed(folder / ALLOWED_FILE).items()}
    return _write(folder, [(LEARNER, learner) for learner in learners], public, allowed, {})


def key_file(folder: Path, kind: str, name: str) -> Path:
    """Where the key of this learner or operator is in the folder of a run's keys."""
    return folder / (f"{kind}-{quote(name, safe='')}.key")


def _write(
    folder: Path,
    dialing: Sequence[tuple[str, str]],
    syncer: bytes,
    allowed: dict[str, bytes],
    files: dict[Path, str],
) -> list[Path]:
    for kind, name in dialing:
        path = key_file(folder, kind, name)
        if path in files:
            raise ValueError(f"the {kind} {name!r} is given twice; allowed: each id once.")
        public, secret = zmq.curve_keypair()
        head = _DIAL_HEAD.format(who=f"{kind} {name}", use=_USE[kind].format(name=path.name))
        files[path] = _text(head, kind=kind, name=name, public=public, secret=secret, syncer=syncer)
        allowed[f"{kind} {name}"] = public
    adding = folder / SYNCER_FILE not in files
    listed = folder / ALLOWED_FILE
    for path in [*files, *([] if adding else [listed])]:
        if path.exists():
            raise ValueError(
                f"{path} is there already, and keys are never overwritten; allowed: a folder "
                "without it (--dir), or `dd-lightning keys add` for more learners of that run."
            )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path, text in files.items():
        _create(path, text, SECRET_MODE)
    keys = {name: key.decode() for name, key in allowed.items()}
    partial = listed.with_name(listed.name + ".partial")
    partial.write_text(_ALLOWED_HEAD + _dump({"allowed": keys}), encoding="utf-8")
    os.replace(partial, listed)  # a syncer may be reading it
    return [*files, listed]


def _text(head: str, **values: str | bytes) -> str:
    plain = {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()}
    return head + _dump(plain)


def _dump(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(values), sort_keys=False, width=200, default_style="'")


def _create(path: Path, text: str, mode: int) -> None:
    """Never over an existing file, and never readable by others, not even for a moment."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
