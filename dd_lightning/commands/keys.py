"""`dd-lightning keys`: key files for an encrypted run, and where each of them goes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import zmq

from dd_lightning.commands.parsing import OneLineParser
from dd_lightning.transport.keys import (
    ALLOWED_FILE,
    LEARNER,
    SYNCER_FILE,
    add_keys,
    fingerprint,
    key_file,
    load_dial_keys,
    new_keys,
)

WHERE = f"""\
where the files go:
  {SYNCER_FILE}, {ALLOWED_FILE}   to the syncer's machine:
      dd-lightning syncer --key {SYNCER_FILE} --allow {ALLOWED_FILE} --listen tcp://0.0.0.0:29400
  learner-ID.key            to the machine of that learner alone:
      DD_KEY=learner-0.key python train.py    (or DecoupledDiLoCoStrategy(..., key="learner-0.key"))
  operator-NAME.key         to whoever runs `dd-lightning status` or `checkpoint`, with --key

Copy them by a way you trust (scp, a secret store): a learner's file holds the syncer's public key,
which is how it knows the right syncer. On one machine `launcher.keys=true` does all this."""


def main(argv: list[str]) -> int:
    """Make keys.

    Raises:
        ValueError: a file is there already, an id is given twice, or ZeroMQ has no CURVE.
    """
    arguments = _parser().parse_args(argv)
    if not zmq.has("curve"):
        raise ValueError(
            "this pyzmq was built without CURVE, so it can make no keys; install one from PyPI: "
            "pip install --force-reinstall pyzmq"
        )
    folder, learners = arguments.dir, _learners(arguments.learners, arguments.learner)
    if arguments.action == "add":
        files = add_keys(folder, learners)
    else:
        files = new_keys(folder, learners, arguments.operator)
    public = load_dial_keys(key_file(folder, LEARNER, learners[0])).syncer
    if arguments.json:
        said = {"dir": str(folder), "files": [path.name for path in files]}
        print(json.dumps(said | {"learners": learners, "fingerprint": fingerprint(public)}))
        return 0
    for path in files:
        print(path)
    print(f"fingerprint of the syncer's key: {fingerprint(public)}")
    print(f"\n{WHERE}")
    return 0


def _learners(listed: str | None, named: list[str]) -> list[str]:
    """Ids of `--learners 0,1,2` and each `--learner ID`; "0" where neither is given."""
    ids = [part.strip() for part in (listed or "").split(",") if part.strip()] + named
    for learner in ids:
        if not 1 <= len(learner) <= 200 or not learner.isprintable():
            raise ValueError(
                f"--learner is {learner[:50]!r}; allowed: an id of 1 to 200 printable characters."
            )
    return ids or ["0"]


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="dd-lightning keys",
        description=__doc__,
        epilog=WHERE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="new | add")
    for name, about in (
        ("new", "keys of a new run: syncer, learners, operator, allow-list"),
        ("add", "keys of more learners of a run, added to its allow-list"),
    ):
        action = actions.add_parser(
            name,
            help=about,
            description=about,
            epilog=WHERE,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add = action.add_argument
        add("--dir", type=Path, default=Path("keys"), help="folder of the files (default: keys)")
        add("--learners", metavar="ID,ID,...", help="ids of the learners, such as 0,1,2")
        add("--learner", action="append", default=[], metavar="ID", help="one more; may be given "
            "again, and is for ids with a comma")  # fmt: skip
        if name == "new":
            add("--operator", default="operator", metavar="NAME", help="name of the operator")
        add("--json", action="store_true", help="one JSON object")
    return parser
