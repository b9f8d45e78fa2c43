"""`dd-lightning replay`: a run played again from its tape; is every merge the same, bit for bit?

Exit code: 0 equal, 1 not, 2 the tape cannot be replayed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dd_lightning.simulate.replay import Outcome

TAPE = "tape.jsonl"


def main(argv: list[str] | None = None) -> int:
    """Replay and print; raises ValueError where the tape cannot be replayed."""
    arguments = _parser().parse_args(argv)
    tape = arguments.tape / TAPE if arguments.tape.is_dir() else arguments.tape
    if not tape.is_file():
        raise ValueError(
            f"tape is {str(arguments.tape)!r}; allowed: a tape.jsonl, or a run folder."
        )
    outcome = _replay(tape)
    equal = outcome.first_difference is None
    found = {
        "equal": equal,
        "merges": outcome.merges,
        "first_difference": outcome.first_difference,
    }
    if arguments.json:
        print(json.dumps(found))
    elif equal:
        print(f"equal: {outcome.merges} merges, and the parameters at the end")
    else:
        where = outcome.first_difference or {}
        learner = "" if where["learner"] is None else f", learner {where['learner']}"
        print(
            f"differs at epoch {where['epoch']}, round {where['round']}, fragment "
            f"{where['fragment']}{learner}: {where['what']} ({outcome.merges} merges were equal)"
        )
    return 0 if equal else 1


def _replay(tape: Path) -> Outcome:
    import torch

    from dd_lightning.launch.data_parallel import is_chosen
    from dd_lightning.launch.settings import check
    from dd_lightning.protocol.tape import read_tape
    from dd_lightning.simulate.replay import Replay
    from dd_lightning.simulate.replay_reader import ScriptReader

    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    first = next(read_tape(tape), {})
    if is_chosen(first.get("config") or {}):
        raise ValueError(
            f"{tape} is of a run with algorithm=data_parallel; allowed: a tape with merges. A "
            "simulated run is repeated exactly by its seed."
        )
    script = ScriptReader().read(read_tape(tape))
    settings = check(script.config)
    # sums depend on the number of threads: as many as the learners had
    torch.set_num_threads(settings.launcher["threads_per_process"])
    with tempfile.TemporaryDirectory(prefix="dd-replay-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the run, once more
        return Replay(script, settings, Path(folder)).play()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dd-lightning replay", description=__doc__)
    parser.add_argument("tape", type=Path, help="a tape.jsonl, or the run folder that has it")
    parser.add_argument("--json", action="store_true")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return parser
