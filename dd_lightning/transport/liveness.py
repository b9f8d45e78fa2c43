"""When anything last came over a TCP connection, as the kernel knows it.

A message may take minutes on a slow link; its bytes prove the path alive long before it is there.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

# struct tcp_info (Linux): eight bytes of flags, then 32-bit numbers, of which we read these
_UNACKED, _LAST_DATA_RECEIVED, _LAST_ACK_RECEIVED = 24, 52, 56
_TCP_INFO_BYTES = 60


def since_heard_s(fd: int) -> float | None:
    """Seconds since the other end last sent data, or acknowledged some of what is under way to it.
    None: this system does not tell, or `fd` is no TCP connection any more.

    Acknowledgements count only while data is under way: an upload may fill the link for so long
    that answers come late. A proxy's or tunnel's own stop soon in an outage, as it takes no more.
    """
    if sys.platform != "linux":
        return None
    try:
        copy = os.dup(fd)  # a socket object of our own: the descriptor stays ZeroMQ's
    except OSError:
        return None
    try:
        with socket.socket(fileno=copy) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return None
    if len(info) < _TCP_INFO_BYTES:
        return None
    (unacked,) = struct.unpack_from("=I", info, _UNACKED)
    (data_ms,) = struct.unpack_from("=I", info, _LAST_DATA_RECEIVED)
    (ack_ms,) = struct.unpack_from("=I", info, _LAST_ACK_RECEIVED)
    return min(data_ms, ack_ms if unacked else data_ms) / 1000.0
