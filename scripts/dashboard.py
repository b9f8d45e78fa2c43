"""Aim's web pages for the runs made with logger=aim, until Ctrl-C: `make dashboard`.

`aim up` starts a server process that outlives it; here both are one session, ended as one.
"""

import argparse
import socket
import sys
from pathlib import Path

from dd_lightning.launch.interrupt import Interrupt
from dd_lightning.launch.processes import Child, end_all, scrubbed_environment

WATCH_S = 0.2
END_S = 3.0
NO_RUNS = (
    "{repo} has no .aim: no run was logged there yet. Do: make demo, or dd-lightning launch "
    "'logger=[csv,aim]' ... from that folder; or give the folder with --repo."
)


def main() -> int:
    """Serve until SIGINT or SIGTERM; 1 where Aim ends by itself, 2 where there is nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repo", type=Path, default=Path("."), help="folder that holds .aim")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=43800)
    arguments = parser.parse_args()
    if not (arguments.repo / ".aim").is_dir():
        print(NO_RUNS.format(repo=arguments.repo.absolute()), file=sys.stderr)
        return 2
    command = [str(Path(sys.executable).with_name("aim")), "up", "--repo", str(arguments.repo)]
    command += ["--host", arguments.host, "--port", str(arguments.port)]
    log = arguments.repo / ".aim" / "dashboard.log"
    said = False
    with Interrupt() as interrupt:
        child = Child("aim", command, log, scrubbed_environment(threads=1))
        print(f"Aim starts, which takes some seconds (Ctrl-C ends it; log: {log})", flush=True)
        while not interrupt.requested and child.wait(WATCH_S) is None:
            if not said and _answers(arguments.host, arguments.port):
                print(f"http://{arguments.host}:{arguments.port}", flush=True)
                said = True
        end_all([[child]], END_S, END_S)
    if not interrupt.requested:
        print(f"{child.description()}:\n{child.tail()}", file=sys.stderr)
    return 0 if interrupt.requested else 1


def _answers(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(WATCH_S)
        return probe.connect_ex((host, port)) == 0


if __name__ == "__main__":
    sys.exit(main())
