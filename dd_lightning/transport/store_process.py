"""The process that serves the rendezvous store: a TCPStore on a socket its parent has bound.

Run as a file (`python store_process.py --fd N --host H --port P --parent PID`), so that it imports
torch and nothing else. Values come as JSON objects, one a line, on standard input; each is answered
by "ok". It ends with its parent: standard input closes, a signal on Linux, or another parent's pid.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
from datetime import timedelta

REPUBLISH_S = 1.0  # also how soon a value that a stranger changed is right again
STORE_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Asks Linux for a signal at the parent's end; elsewhere the loop looks at the pid."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the parent has ended")


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the rendezvous store (started by a syncer)")
    parser.add_argument("--fd", type=int, required=True, help="listening socket, inherited")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="pid to end with")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    end_with_parent(options.parent)
    from torch.distributed import TCPStore

    store = TCPStore(
        options.host,
        options.port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        master_listen_fd=options.fd,
    )
    serve(store, options.parent)


def serve(store: object, parent: int) -> None:
    """Publishes what standard input says, again and again, until the parent is gone."""
    values: dict[str, str] = {}
    buffered = b""
    while os.getppid() == parent:
        ready, _, _ = select.select([0], [], [], REPUBLISH_S)
        if ready:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, buffered = (buffered + data).split(b"\n")
            for line in lines:
                values.update(json.loads(line))
        for key, value in values.items():
            store.set(key, value)
        if ready and not buffered:
            os.write(1, b"ok\n")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the store's own thread need not be waited for
