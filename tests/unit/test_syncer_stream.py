"""The job stream under a real Trainer: order, no job held back, end and failure."""

from __future__ import annotations

import threading

import pytest

from dd_lightning.syncer.stream import RoundStream
from dd_lightning.syncer.trainer import make_trainer
from tests.syncer_jobs import config_of, contribution, job, layout_of, module_of, values_of

pytestmark = pytest.mark.unit
WAIT_S = 20.0


def held(module, fragment, seed, version):
    names = layout_of(module.config).fragments[fragment]
    values = {n: v for n, v in values_of(seed).items() if n in names}
    return contribution("0", fragment, values, base=(1, version - 1))


def test_a_merge_is_delivered_before_the_next_job_comes(tmp_path) -> None:
    stream, done = RoundStream(4), threading.Semaphore(0)
    merges = []

    def deliver(merged) -> None:
        merges.append(merged.job.version)
        done.release()

    module = module_of(config_of(), deliver=deliver)

    def feed() -> None:
        try:
            for version in range(1, 4):
                stream.put(job(0, (1, version), held(module, 0, version, version)))
                if not done.acquire(timeout=WAIT_S):
                    raise TimeoutError("the merge waits for the next job")
            stream.end()
        except Exception as error:
            stream.fail(error)

    feeder = threading.Thread(target=feed)
    feeder.start()
    trainer = make_trainer(tmp_path)
    trainer.fit(module, stream)
    feeder.join(WAIT_S)
    assert merges == [(1, 1), (1, 2), (1, 3)]
    assert trainer.global_step == 3
    assert trainer.callback_metrics["merge/contributors"] == 1


def test_jobs_before_the_end_are_done_and_later_ones_dropped(tmp_path) -> None:
    stream = RoundStream(4)
    merges = []
    module = module_of(config_of(), deliver=lambda merged: merges.append(merged.job.version))
    for version in (1, 2):
        stream.put(job(0, (1, version), held(module, 0, version, version)))
    stream.end()
    stream.put(job(0, (1, 3), held(module, 0, 3, 3)))
    make_trainer(tmp_path).fit(module, stream)
    assert merges == [(1, 1), (1, 2)]


def test_a_failure_ends_fit_with_that_error(tmp_path) -> None:
    stream = RoundStream(4)
    stream.fail(RuntimeError("the server broke"))
    with pytest.raises(RuntimeError, match="the server broke"):
        make_trainer(tmp_path).fit(module_of(config_of()), stream)
