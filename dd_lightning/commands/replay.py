"""`dd-lightning replay`: a run played again from its tape; is every merge the same, bit for bit?

Contributors and the steps of snapshots and applies are the tape's; every gradient, counter, weight
and merge is computed anew and compared, up to the first difference. Exit code: 0 equal, 1 not, 2
the tape cannot be replayed. With --merge, --outer, --quorum or --set it also answers "what if": the
same arrivals at the same steps under another merge rule, outer optimizer or quorum, reported
beside the original (validation loss of both, and each round's contributors, norm and agreement).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dd_lightning.commands.parsing import OneLineParser
from dd_lightning.simulate.what_if_settings import MERGE, OUTER, QUORUM, read_outer, read_set

TAPE = "tape.jsonl"


def main(argv: list[str] | None = None) -> int:
    """Replay and print; raises ValueError where the tape cannot be replayed."""
    arguments = _parser().parse_args(argv)
    tape = arguments.tape / TAPE if arguments.tape.is_dir() else arguments.tape
    if not tape.is_file():
        raise ValueError(
            f"tape is {str(arguments.tape)!r}; allowed: a tape.jsonl, or a run folder."
        )
    sets = [read_set(text) for text in arguments.set]
    sets += [(MERGE, arguments.merge)] if arguments.merge else []
    sets += [(OUTER, read_outer(arguments.outer))] if arguments.outer else []
    sets += [(QUORUM, arguments.quorum)] if arguments.quorum is not None else []
    found = _replay(tape, sets)
    print(json.dumps(found) if arguments.json else _in_words(found))
    return 0 if found["equal"] else 1


def _replay(tape: Path, sets: list[tuple[str, Any]]) -> dict[str, Any]:
    import torch

    from dd_lightning.launch.settings import check
    from dd_lightning.protocol.tape import read_tape
    from dd_lightning.simulate.replay import Replay
    from dd_lightning.simulate.replay_reader import ScriptReader
    from dd_lightning.simulate.what_if_report import what_if, what_if_settings

    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    script = ScriptReader().read(read_tape(tape))
    try:
        settings = check(script.config)
    except KeyError as error:
        raise ValueError(
            f"the tape's configuration has no {error}: it is of another version; replay it with "
            "the dd_lightning that wrote it."
        ) from error
    other = what_if_settings(settings, sets) if sets else None
    # sums depend on the number of threads: as many as the learners had
    torch.set_num_threads(settings.launcher["threads_per_process"])
    with tempfile.TemporaryDirectory(prefix="dd-replay-") as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the run, once more
        folder = Path(name)
        outcome = Replay(script, settings, folder / "original").play()
        equal = outcome.first_difference is None
        found: dict[str, Any] = {
            "equal": equal,
            "merges": outcome.merges,
            "first_difference": outcome.first_difference,
        }
        if other is not None and equal:  # of a run that is not as on the tape nothing follows
            found["what_if"] = what_if(script, settings, other, outcome, folder, dict(sets))
    return found


def _in_words(found: Mapping[str, Any]) -> str:
    merges = found["merges"]
    if not found["equal"]:
        where = found["first_difference"]
        learner = "" if where["learner"] is None else f", learner {where['learner']}"
        return (
            f"differs at epoch {where['epoch']}, round {where['round']}, fragment "
            f"{where['fragment']}{learner}: {where['what']} ({merges} merges were equal)"
        )
    text = f"equal: {merges} merges, and the parameters at the end"
    if "what_if" not in found:
        return text
    asked = found["what_if"]
    settings = ", ".join(f"{key}={value}" for key, value in asked["set"].items())
    rows = [f"{'':24}{'original':>12}{'what if':>12}"]
    for name, pair in asked["means"].items():
        numbers = (pair["original"], pair["what_if"])
        shown = "".join(f"{'-' if n is None else format(n, '.4f'):>12}" for n in numbers)
        rows.append(f"{name:24}{shown}")
    rounds = f"{asked['rounds_changed']} of {merges} rounds have other contributors"
    left = f", {asked['left_out']} could not be made" if asked["left_out"] else ""
    return "\n".join([text, f"what if {settings}:", *rows, rounds + left])


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="dd-lightning replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Kept in a what-if: when each contribution arrived, at which step each snapshot was "
        "taken and\neach version applied. Another quorum takes those that had arrived when the "
        "N-th did, plus the\ngrace that the round spent; re-anchors and last rounds stay as they "
        "were. Not replayed, and\nrefused by name: groups of ranks, runs resumed from a consistent "
        "cut, learners that diverged.",
    )
    parser.add_argument("tape", type=Path, help="a tape.jsonl, or the run folder that has it")
    parser.add_argument("--json", action="store_true", help="one line of JSON, with every round")
    parser.add_argument("--merge", metavar="RULE", help="what if: average | rda")
    parser.add_argument(
        "--outer", metavar="SPEC", help="what if: lr=1.0,momentum=0, or torch.optim.Adam,lr=0.01"
    )
    parser.add_argument("--quorum", metavar="N", type=int, help="what if: contributions a round")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="what if, one setting: algorithm.merge, algorithm.outer.lr, algorithm.quorum, ...",
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return parser
