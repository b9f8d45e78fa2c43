"""Where speed or failures go with the data, how far does a merge move? From runs of
`experiment=bias`, and draws of outer gradients at the fault-free run's Θ.

python scripts/study_bias.py MULTIRUN          (brings docs/results/README.md up to date)
"""

import argparse
import logging
import shutil
import warnings
from pathlib import Path

import torch
from run_studies import RESULTS, write_between

from dd_lightning.protocol.tape import read_tape
from dd_lightning.report.bias import BiasRow, bias_table, draw_bias, losses_beside
from dd_lightning.report.read import runs_in
from dd_lightning.report.study import Group, read_study
from dd_lightning.simulate.merge_bias import Merge, measure_moves, merges_on, share_of
from dd_lightning.syncer.checkpoint import checkpoints

UNLUCKY, OWN_GROUP = "3", "validation_loss_group_lightning"
REFERENCE = ("tokens", "equal")
DRAWS, SAMPLES, SKIPPED = 12, 24, 8  # merges skipped: while the inner learning rate grows
FIGURE, COMMAND = "bias_update.png", "`python scripts/study_bias.py MULTIRUN` "


def kind_of(group: Group) -> tuple[str, str]:
    """Its rule and its condition."""
    return str(group.settings["study.arm"]), str(group.settings["arm"])


def merges_of(group: Group) -> list[Merge]:
    """Of all its seeds."""
    tapes = [read_tape(run.folder / "tape.jsonl") for run in group.runs]
    return [merge for tape in tapes for merge in merges_on(tape, SKIPPED)]


def main() -> None:
    """Measure, draw and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("multirun", type=Path, help="folder of the runs of experiment=bias")
    folder = parser.parse_args().multirun
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # Lightning's advice about loaders, and what it found
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
    groups = {kind_of(group): group for group in read_study(runs_in(folder)).groups}
    merges = {kind: merges_of(group) for kind, group in groups.items()}
    first = groups[REFERENCE].runs[0]
    thetas = checkpoints(first.folder / "syncer")[:-1:2]  # without version 0; the newest is first
    sizes = {"draws": DRAWS, "samples": SAMPLES}
    moved = measure_moves(first.config, thetas, merges, REFERENCE, **sizes)
    rows = []
    for kind, group in groups.items():
        one, share = moved[kind], share_of(merges[kind], UNLUCKY)
        own, others = losses_beside(group, groups[REFERENCE], OWN_GROUP)
        numbers = (share, one.length, one.cosine, one.bias, one.spread)
        rows.append(BiasRow(*kind, *numbers, own, others))
    shutil.copyfile(draw_bias(rows, folder / FIGURE), RESULTS / FIGURE)
    said = f"({len(thetas)} Θ, {DRAWS} draws of each learner at each)\n"
    write_between(
        "bias_update", [bias_table(rows), f"![bias of a merge]({FIGURE})\n", COMMAND + said]
    )


if __name__ == "__main__":
    main()
