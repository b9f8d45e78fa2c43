"""A run over real sockets in one process: the syncer in the main thread, learners as threads."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

from dd_lightning.protocol.tape import read_tape
from dd_lightning.syncer.run import SyncerRun
from dd_lightning.syncer.settings import SyncerSettings
from tests.trainers import WAIT_S


def run_over_sockets(folder, config, *learners):
    """Run functions of (address) until the syncer is done; the tape's events. The first error of a
    learner is raised here."""
    settings = SyncerSettings("tcp://127.0.0.1:0", folder, False, config)
    errors = []

    def guarded(function, address):
        try:
            function(address)
        except BaseException as error:
            errors.append(error)
            os.kill(os.getpid(), signal.SIGINT)  # the syncer is not to wait for it

    with contextlib.ExitStack() as close:
        syncer = SyncerRun(settings, close)
        threads = [
            threading.Thread(target=guarded, args=(f, syncer.address), daemon=True)
            for f in learners
        ]
        for thread in threads:
            thread.start()
        outcome = syncer.execute()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "a learner does not end"
    if errors:
        raise errors[0]
    assert outcome.status == "finished"
    return list(read_tape(folder / "tape.jsonl"))
