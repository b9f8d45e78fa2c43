"""`dd-lightning status tcp://HOST:PORT|RUN_DIR`: a running run, live, from any machine."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dd_lightning.commands.asking import UNREACHABLE, Asker, add_arguments
from dd_lightning.commands.parsing import OneLineParser
from dd_lightning.protocol.tape import clean
from dd_lightning.report.live import plain_line, render

TIMEOUT_S = 5.0
EVERY_S = 1.0  # between two looks of --watch
NARROWEST = 150  # columns where stdout is no terminal: a file wraps nothing


class Show(Protocol):
    """Shows one look at the run after the other."""

    def status(self, status: dict[str, Any]) -> None: ...
    def away(self, text: str) -> None: ...


class Lines:
    """`--json`: one object a line. Else one plain line each."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def status(self, status: dict[str, Any]) -> None:
        print(_json(status) if self._as_json else plain_line(status), flush=True)

    def away(self, text: str) -> None:
        print(_json({"away": text}) if self._as_json else text, flush=True)


class Redrawn:
    """The tables, redrawn in place; over the last of them a line while the syncer is away."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._last: dict[str, Any] = {}

    def status(self, status: dict[str, Any]) -> None:
        self._last = status
        self._live.update(render(status), refresh=True)

    def away(self, text: str) -> None:
        self._live.update(Group(Text(text, style="bold red"), render(self._last)), refresh=True)


def _json(value: Any) -> str:
    return json.dumps(clean(value), allow_nan=False)


def _watch(asker: Asker, first: dict[str, Any], show: Show) -> None:
    """Until Ctrl-C. What was last heard stays in sight while the syncer is away."""
    show.status(first)
    heard_s = time.monotonic()
    while True:
        time.sleep(EVERY_S)
        try:
            status = asker.ask("status")
        except OSError as error:
            away_s = time.monotonic() - heard_s
            cause = " ".join(str(error).split())
            show.away(f"the syncer is away since {away_s:.0f} s: {cause}")
            continue
        heard_s = time.monotonic()
        show.status(status)


def _show_watched(asker: Asker, first: dict[str, Any], as_json: bool) -> None:
    if as_json or not sys.stdout.isatty():
        _watch(asker, first, Lines(as_json))
        return
    with Live(auto_refresh=False) as live:
        _watch(asker, first, Redrawn(live))


def main(argv: list[str]) -> int:
    """Show the run; exit code 1 with one line on stderr when no syncer answers.

    Raises:
        ValueError: the target is neither an address nor a run folder.
    """
    parser = OneLineParser(prog="dd-lightning status", description=__doc__)
    add_arguments(parser, TIMEOUT_S)
    parser.add_argument("--watch", action="store_true", help="refresh until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="one JSON object (a line, --watch)")
    arguments = parser.parse_args(argv)
    try:
        with Asker.of(arguments) as asker:
            status = asker.ask_or_tell("status")
            if status is None:
                return UNREACHABLE
            if arguments.watch:
                _show_watched(asker, status, arguments.json)
            elif arguments.json:
                print(_json(status))
            else:
                width = None if sys.stdout.isatty() else NARROWEST
                Console(width=width).print(render(status))
    except KeyboardInterrupt:
        return 0 if arguments.watch else 130
    return 0
