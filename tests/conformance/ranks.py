"""Two processes that stay: the ranks of one learner after another, since each start takes 10 s.

Their process group lasts as long as they do. What fails on one rank ends both, since the other may
wait for it in a collective; the next job starts them anew.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.trainers import WAIT_S

RANKS = 2
ASKED, DONE, FAILED = "asked", "done", "failed"
JOB_S = 4 * WAIT_S  # on every silence of the ranks


class Ranks:
    """The host's end; one job at a time."""

    def __init__(self):
        self._ranks: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self._folder: TemporaryDirectory | None = None

    def run(self, function, *arguments, answer=None):
        """What `function(*arguments)` returns on each rank.

        Args:
            answer: of a question of the ranks (see `ask`), what they are told.

        Raises:
            AssertionError: it raised on a rank.
        """
        self.start()
        connections = [connection for _, connection in self._ranks]
        # as processes get their arguments: tensors are shared, by one process each
        jobs = [ForkingPickler.dumps((function, arguments)) for _ in connections]
        try:
            for connection, job in zip(connections, jobs, strict=True):
                connection.send_bytes(job)
            return self._results(connections, answer)
        except BaseException:
            self.close()
            raise

    def _results(self, connections, answer):
        results = {}
        while len(results) < RANKS:
            ready = wait([c for c in connections if c not in results], JOB_S)
            if not ready:
                raise TimeoutError(f"the ranks say nothing for {JOB_S} s")
            kind, value = pickle.loads(ready[0].recv_bytes())
            if kind == ASKED:
                told = pickle.dumps(answer(value))
                for connection in connections:
                    connection.send_bytes(told)
            elif kind == DONE:
                results[ready[0]] = value
            else:
                raise AssertionError(f"rank {connections.index(ready[0])}:\n{value}")
        return [results[connection] for connection in connections]

    def start(self):
        """If they are not there."""
        if self._ranks:
            return
        context = multiprocessing.get_context("spawn")
        self._folder = TemporaryDirectory()
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            arguments = (rank, theirs, self._folder.name)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()  # a rank that is gone is an EOFError then
            self._ranks.append((process, ours))
        self.run(os.getpid)  # which they answer once they have found each other

    def close(self):
        """End them."""
        ranks, self._ranks = self._ranks, []
        for process, connection in ranks:
            process.kill()
            process.join()
            connection.close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


# ---------------------------------------------------------------------- in the ranks

_host: list[Connection] = []


def serve(rank, connection, folder):
    """Do what comes until this process is ended."""
    import torch.distributed as dist

    own = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in own.items()})
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(folder) / 'store'}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=WAIT_S),
    )
    _host.append(connection)
    while True:
        try:
            function, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return  # the tests have ended
        try:
            answer = (DONE, function(*arguments))
        except BaseException:
            answer = (FAILED, traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))


def leads():
    """Whether this is rank 0."""
    return os.environ["RANK"] == "0"


def ask(kind, value=None):
    """Called on every rank: what the host answers to rank 0's question."""
    if leads():
        _host[0].send_bytes(pickle.dumps((ASKED, (kind, value))))
    return pickle.loads(_host[0].recv_bytes())
