"""`dd-lightning COMMAND`: one module each, imported only when its command is called."""

from __future__ import annotations

import importlib
import os
import sys

COMMANDS = {
    "doctor": ("dd_lightning.commands.doctor", "what this machine has, and what is missing"),
    "launch": ("dd_lightning.launch.app", "run one experiment (or a sweep, -m) on this machine"),
    "syncer": ("dd_lightning.syncer.command", "run the syncer alone; learners dial in"),
    "status": ("dd_lightning.commands.status", "a running run, live, from any machine"),
    "checkpoint": ("dd_lightning.commands.checkpoint", "a consistent cut of a running run"),
    "report": ("dd_lightning.commands.report", "summary, figures and report.html from a tape"),
    "estimate": ("dd_lightning.commands.estimate", "bytes, times and memory of a run beforehand"),
    "replay": ("dd_lightning.commands.replay", "a run played again from its tape, bit for bit"),
    "goodput": ("dd_lightning.commands.goodput", "share of a fleet's time that trains, by size"),
    "keys": ("dd_lightning.commands.keys", "key files for an encrypted run"),
    "export": ("dd_lightning.commands.export", "a syncer checkpoint as a Lightning checkpoint"),
}
WRONG_SETTING = 2


def usage() -> str:
    """What `dd-lightning --help` prints."""
    lines = [f"  {name:<10} {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        ["usage: dd-lightning COMMAND [ARGUMENTS]", "", "commands (each with --help):", *lines]
    )


def main(argv: list[str] | None = None) -> int:
    """Run a command; its exit code, 2 for a wrong setting (one line on stderr)."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else WRONG_SETTING
    name, *rest = arguments
    if name not in COMMANDS:
        return _refuse(f"command is {name!r}; allowed: {' | '.join(COMMANDS)}.")
    module = importlib.import_module(COMMANDS[name][0])
    try:
        return module.main(rest) or 0
    except ValueError as error:
        if os.environ.get("HYDRA_FULL_ERROR", "") not in ("", "0"):
            raise
        return _refuse(" ".join(str(error).split()))


def _refuse(text: str) -> int:
    print(text, file=sys.stderr, flush=True)
    return WRONG_SETTING


if __name__ == "__main__":
    sys.exit(main())
