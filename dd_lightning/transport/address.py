"""Addresses as a user writes them: `tcp://host:port`."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

EXAMPLE = "Write it as tcp://host:port, for example tcp://127.0.0.1:29400."


@dataclass(frozen=True, slots=True)
class Address:
    """A host (without brackets) and a TCP port; prints as `tcp://host:port`."""

    host: str
    port: int

    def __str__(self) -> str:
        return (
            f"tcp://[{self.host}]:{self.port}"
            if ":" in self.host
            else (f"tcp://{self.host}:{self.port}")
        )


def parse_address(text: str) -> Address:
    """Raises ValueError that shows what was given and how to write it."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"The address {text!r} cannot be read: {error}. {EXAMPLE}") from None
    if parts.scheme != "tcp":
        raise ValueError(f"The address {text!r} does not begin with tcp://. {EXAMPLE}")
    if not parts.hostname:
        raise ValueError(f"The address {text!r} has no host. {EXAMPLE}")
    if port is None:
        raise ValueError(f"The address {text!r} has no port. {EXAMPLE}")
    if parts.path or parts.query or parts.fragment or parts.username:
        raise ValueError(f"The address {text!r} has more than a host and a port. {EXAMPLE}")
    return Address(parts.hostname, port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a socket bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_loopback(host: str, allowed: bool) -> None:
    """Raises ValueError for a host that others can reach, unless `allowed` (keys, `insecure`)."""
    if not allowed and not is_loopback(host):
        raise ValueError(
            f"Listening on {host} without keys would let anybody who reaches this machine read and "
            "change the run. Make keys with `dd-lightning keys new` and give the syncer --key and "
            "--allow; or, on a network you trust, set `insecure: true`."
        )
