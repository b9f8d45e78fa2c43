"""What a step boundary costs a learner of several ranks when nothing is due: its one all-reduce.

`python scripts/bench_group.py [--ranks 2] [--boundaries 3000]`, on the CPUs of this machine.
"""

import argparse
import os
import socket
import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dd_lightning.learner.group import Group

WARM_UP = 100
WAIT = timedelta(seconds=60)


class NoStop:
    """Nobody sends SIGTERM."""

    told = False

    def obey(self) -> None:
        raise AssertionError("nobody was told to stop")


def rank(number: int, ranks: int, boundaries: int, port: int) -> None:
    """One rank; the first one prints."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=number, world_size=ranks, timeout=WAIT)
    group, times = Group(WAIT, NoStop()), []  # type: ignore[arg-type] (what it needs of one)
    for _ in range(WARM_UP + boundaries):
        begun = time.perf_counter()
        group.agree(1, True)
        times.append(1e3 * (time.perf_counter() - begun))
    percentiles = statistics.quantiles(times[WARM_UP:], n=10)
    if number == 0:
        print(
            f"ms a boundary, {ranks} ranks: median {percentiles[4]:.3f}, p90 {percentiles[8]:.3f}"
        )
    dist.destroy_process_group()


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--boundaries", type=int, default=3000)
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank, (arguments.ranks, arguments.boundaries, port), arguments.ranks)


if __name__ == "__main__":
    main()
