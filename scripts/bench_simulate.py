"""What virtual time costs: a simulated run's processor time beside that of its steps alone.

python scripts/bench_simulate.py [--learners 16] [--steps 30] [task.data.batch_size=16 ...]

Two runs, the second three times as long; figures are of their difference, so that start and end do
not count. Processor time, since wall time on a busy machine measures the machine.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path

import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from dd_lightning.launch.settings import check
from dd_lightning.launch.task import check_task
from dd_lightning.launch.view import open_view
from dd_lightning.simulate.run import SimulatedRun

PROMISED = 0.15  # of a step of 20 ms, with 16 learners
LONGER = 3


def play(folder: Path, *overrides: str) -> tuple[float, float, float]:
    """Processor seconds and wall seconds of one run, and processor seconds of its steps."""
    with initialize_config_module("dd_lightning.conf", version_base="1.3"):
        config = compose("config", ["experiment=smoke", "mode=simulate", *overrides])
    settings = check(OmegaConf.to_container(config, resolve=True))
    data = check_task(settings.values, settings.syncer.num_data_slots)
    run = SimulatedRun(settings, folder, data, open_view(folder), draw=False)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        outcome = run.execute()
    if outcome.status != "finished":
        raise RuntimeError(f"the run failed: {outcome.problems}")
    spent_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    return *spent_s, run.cpu_step_seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30, help="of each learner in the short run")
    parser.add_argument("overrides", nargs="*", help="Hydra's, for both runs")
    arguments = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    given = [f"learners={arguments.learners}", "evaluate.every_s=1000", *arguments.overrides]
    with tempfile.TemporaryDirectory() as temporary:
        short, long = (
            play(Path(temporary) / str(steps), f"trainer.max_steps={steps}", *given)
            for steps in (arguments.steps, LONGER * arguments.steps)
        )
    cpu_s, wall_s, steps_s = (after - before for before, after in zip(short, long, strict=True))
    num_steps = (LONGER - 1) * arguments.steps * arguments.learners
    print(f"learners             {arguments.learners:>8}")
    print(f"a step               {1000 * steps_s / num_steps:>8.2f} ms of processor time")
    print(f"all else, per step   {1000 * (cpu_s - steps_s) / num_steps:>8.2f} ms")
    print(f"overhead             {cpu_s / steps_s - 1:>8.1%} (promised: {PROMISED:.0%} at 20 ms)")
    print(f"processor / wall     {cpu_s / wall_s:>8.1%} (below 100%: the machine was busy)")


if __name__ == "__main__":
    main()
