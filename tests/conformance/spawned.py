"""`ddp_spawn` with ranks that are there already.

All of it is Lightning's launcher (what it pickles, runs in the ranks and takes back) but the start
of the processes, which takes 10 s; `test_group_starts.py` has one real start.
"""

from __future__ import annotations

import os

from tests.conformance.ranks import leads

PLACE = "lightning.pytorch.strategies.launchers.multiprocessing.mp"
_returned: list[object] = []


class Spawning:
    """Stands for `torch.multiprocessing` in Lightning's launcher."""

    def __init__(self, ranks, answer):
        self._ranks, self._answer = ranks, answer
        self._results = []
        self.processes = []  # of the context that `start_processes` returns

    def get_all_start_methods(self):
        return ["spawn"]

    def get_context(self, method):
        assert method == "spawn"
        return self

    def SimpleQueue(self):
        return self

    def __reduce__(self):
        return Returning, ()  # the queue, in the ranks

    def start_processes(self, function, args, nprocs, start_method, join):
        os.environ.pop("MASTER_PORT")  # Lightning has just put it there
        self._results = self._ranks.run(run_spawned, function, args, answer=self._answer)
        return self

    def join(self):
        return True

    def get(self):
        return self._results[0]


class Returning:
    """The queue in the ranks."""

    def put(self, value):
        _returned.append(value)


def run_spawned(function, arguments):
    """What rank 0 puts into the queue."""
    _returned.clear()
    function(0 if leads() else 1, *arguments)
    return _returned[0] if leads() else None
