"""`dd-lightning checkpoint tcp://HOST:PORT|RUN_DIR`: a consistent cut of a running run."""

from __future__ import annotations

import json

from dd_lightning.commands.asking import UNREACHABLE, Asker, add_arguments
from dd_lightning.commands.parsing import OneLineParser

TIMEOUT_S = 60.0


def main(argv: list[str]) -> int:
    """Print the cut's id and files; exit code 1 with the reason on stderr when there is none.

    Raises:
        ValueError: the target is neither an address nor a run folder.
    """
    parser = OneLineParser(prog="dd-lightning checkpoint", description=__doc__)
    add_arguments(parser, TIMEOUT_S)
    parser.add_argument("--json", action="store_true", help="one JSON object: the cut's manifest")
    arguments = parser.parse_args(argv)
    with Asker.of(arguments) as asker:
        done = asker.ask_or_tell("checkpoint")
    if done is None:
        return UNREACHABLE
    if arguments.json:
        print(json.dumps(done, indent=1))
        return 0
    print(f"cut {done['cut']}")
    for file in done.get("files", ()):
        print(f"  {file}")
    return 0
