"""A consistent cut of a run of groups: one sharded, one under manual optimization. Slow: it starts
four groups of processes.
"""

import contextlib
import os
import signal
import threading
import time

import pytest

from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.protocol.tape import read_tape
from dd_lightning.syncer.run import SyncerRun
from dd_lightning.syncer.settings import SyncerSettings
from tests.conformance.jobs import JOB, JOB_S, _learner, said
from tests.trainers import WAIT_S

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

KINDS = ({"inner": "fsdp2"}, {"inner": "ddp", "manual": True})


def execute(folder, jobs, cut=None):
    """One start of the syncer with both learners; without `cut` one is taken, then all ends. Its
    manifest."""
    algorithm = {"preset": "diloco", "fragments": 2, "sync_every": 4, "overlap": 1}
    algorithm |= {"wait": "never", "quorum": 1}
    # learners start slowly where others work too
    timeouts = {"rejoin": JOB_S, "reanchor": 100.0, "round": 110.0, "flush": 120.0, "start": JOB_S}
    config = SyncerConfig.load(
        {"algorithm": algorithm, "learners": 2, "timeouts": timeouts, "run_id": "r"}
    )
    run, found, errors = folder / "run", [], []
    settings = SyncerSettings("tcp://127.0.0.1:0", run, cut is not None, config, cut=cut)

    def guarded(function, *arguments):
        try:
            function(*arguments)
        except BaseException as error:
            errors.append(error)
            os.kill(os.getpid(), signal.SIGINT)

    def ask(syncer):
        deadline = time.monotonic() + JOB_S
        while sum(event["event"] == "merge" for event in read_tape(run / "tape.jsonl")) < 4:
            assert time.monotonic() < deadline, "nothing is merged"
            time.sleep(0.05)
        found.append(syncer.server.request_cut().result(WAIT_S))
        syncer.server.request_stop("thrown away")

    with contextlib.ExitStack() as close:
        syncer = SyncerRun(settings, close)
        works = [(_learner(job), syncer.address) for job in jobs]
        works += [(ask, syncer)] if cut is None else []
        threads = [threading.Thread(target=guarded, args=work, daemon=True) for work in works]
        for thread in threads:
            thread.start()
        syncer.execute()
    for thread in threads:
        thread.join(WAIT_S)
    if errors:
        raise errors[0]
    return found[0] if found else None


def test_groups_go_on_from_a_cut(tmp_path):
    lives = [tmp_path / "first", tmp_path / "second"]
    for life in lives:
        life.mkdir()
    common = JOB | {"learners": 2, "steps": 3000}
    jobs = [common | kind | {"learner": str(i)} for i, kind in enumerate(KINDS)]
    manifest = execute(tmp_path, [job | {"folder": str(lives[0])} for job in jobs])
    rows = manifest["learners"]
    assert not manifest["without"] and set(rows) == {"0", "1"}
    again = [
        job | {"folder": str(lives[1]), "checkpoint": row["file"], "steps": row["step"] + 6}
        for job, row in zip(jobs, rows.values(), strict=True)
    ]
    execute(tmp_path, again, cut="c1")
    sharded, manual = ([said(life, learner) for life in lives] for learner in (0, 1))
    # as the step left it that was recorded: what was applied in it included
    assert sharded[1]["digests"][0] == sharded[0]["digests"][rows["0"]["step"]]
    recorded = manual[0]["optimizers"][rows["1"]["step"] - 1]
    assert manual[1]["continued"]["optimizer"] == recorded
    for learner in (0, 1):
        ranks = [said(lives[1], learner, rank)["digests"] for rank in range(2)]
        assert ranks[0] == ranks[1] and len(ranks[0]) == 1 + 6
    ledgers = [event for event in read_tape(tmp_path / "run" / "tape.jsonl") if
               event["event"] == "ledger"][-2:]  # fmt: skip
    for row in [row for ledger in ledgers for row in ledger["fragments"]]:
        assert row["processed"] == row["merged"] + row["lost"] and row["pending"] == 0
