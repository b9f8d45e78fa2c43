"""The Hydra job behind `dd-lightning launch` and `scripts/launch.py`.

A job checks its settings, runs one experiment in Hydra's job folder and returns its objective, so
`-m` and every sweeper work (`sweep`: jobs that have finished are skipped). Exit codes: 0, 1 where
the run failed, 2 for a wrong setting (one line, no traceback unless HYDRA_FULL_ERROR=1), 130 where
it was interrupted.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dd_lightning.launch import data_parallel, sweep
from dd_lightning.launch.refusals import one_line
from dd_lightning.launch.resume import read_run, without_effect
from dd_lightning.launch.run import LocalRun
from dd_lightning.launch.settings import Settings, check, named
from dd_lightning.launch.task import check_task
from dd_lightning.launch.view import open_view
from dd_lightning.report.objective import objective_of

CONFIG_PATH = "pkg://dd_lightning.conf"
FULL_ERROR = "HYDRA_FULL_ERROR"
WRONG_SETTING = 2
INTERRUPTED = 130


class RunFailed(RuntimeError):
    """A process of the run failed; what it said has been shown already."""


TOLD = (RunFailed, ValueError, HydraException, OmegaConfBaseException)  # without a traceback


def run_experiment(config: DictConfig) -> Any:
    """Check the settings, run, and return the objective (default: validation loss of the final Θ).

    A job of a sweep that has finished already is not run again: its objective is returned.

    Raises:
        ValueError: a wrong setting; nothing was started.
        RunFailed: a process of the run failed.
        KeyboardInterrupt: the run was interrupted, and has ended in order.
    """
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    values = named(values, hydra_config.runtime.choices.get("experiment"))
    if hydra_config.mode != RunMode.MULTIRUN:
        return _play(folder, values)
    is_worker = hydra_config.runtime.choices.get("hydra/launcher") == "joblib"
    with (
        sweep.ends_with_sweep() if is_worker else nullcontext(),
        sweep.open_job(folder, values, hydra_config.overrides.task) as job,
    ):
        return _play_job(job, values)


def _play_job(job: sweep.SweepJob, values: dict[str, Any]) -> Any:
    if job.finished:
        found = objective_of(job.folder, values)
        print(f"skipped: {job.folder} has finished; objective {found}", flush=True)
        return found
    resume = values["launcher"].get("resume")
    if resume is None or not job.can_go_on():
        if job.begun:
            said = f"earlier start {job.status or 'cut short'}: anew in {job.folder}, emptied"
            print(said, flush=True)
        own = HydraConfig.get()
        job.empty(keep=(str(own.output_subdir), f"{own.job.name}.log"))
        values = values | {"launcher": values["launcher"] | {"resume": None}}
    return _play(job.folder, values)


def _play(folder: Path, values: dict[str, Any]) -> Any:
    """One run in `folder`; its objective."""
    if (resume := values["launcher"].get("resume")) is not None:
        values = read_run(folder, resume)
        for sentence in without_effect(HydraConfig.get().overrides.task):
            print(f"warning: {sentence}", file=sys.stderr, flush=True)
    settings = check(values)
    data = check_task(settings.values, settings.syncer.num_data_slots)
    if settings.resume is None:
        _refuse_used(folder)
    decoupled = not data_parallel.is_chosen(settings.values)
    for sentence in settings.syncer.cautions() if decoupled else ():
        print(f"warning: {sentence}", file=sys.stderr, flush=True)
    outcome = _runner(settings)(settings, folder, data, open_view(folder)).execute()
    print(f"{outcome.status}: {folder}", flush=True)
    if outcome.status == "interrupted":
        raise KeyboardInterrupt
    if outcome.status == "failed" or outcome.problems:
        reason = outcome.problems[0].partition("; end of ")[0]
        raise RunFailed(f"the run in {folder} failed: {reason}")
    return objective_of(folder, settings.values)


def _runner(settings: Settings) -> type:
    """What plays the run; imported where it is needed: a simulated run loads much more."""
    if data_parallel.is_chosen(settings.values):
        from dd_lightning.simulate.data_parallel import DataParallelRun

        return DataParallelRun
    if settings.values["mode"] == "simulate":
        from dd_lightning.simulate.run import SimulatedRun

        return SimulatedRun
    return LocalRun


def _refuse_used(folder: Path) -> None:
    if (folder / "tape.jsonl").exists():
        raise ValueError(
            f"hydra.run.dir is {str(folder)!r}, which holds a run already; allowed: a folder "
            "without tape.jsonl, or launcher.resume=last to go on with that run."
        )


class _PastHydra(BaseException):
    """Carries an error past Hydra, which would add lines of its own to the message."""

    def __init__(self, error: ValueError | RunFailed) -> None:
        super().__init__(str(error))
        self.error = error


@hydra.main(version_base="1.3", config_path=CONFIG_PATH, config_name="config")
def _job(config: DictConfig) -> Any:
    try:
        return run_experiment(config)
    except (ValueError, RunFailed) as error:
        if HydraConfig.get().mode != RunMode.RUN:
            raise  # to the sweeper; here Hydra's line says which job it was
        raise _PastHydra(error) from error


def _leave_at_once(code: int) -> NoReturn:
    """End the process without taking the interpreter apart.

    All is written and every child has ended by now; with torch loaded, Python's own way out takes
    seconds on a busy machine, and the user has pressed Ctrl-C.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(argv: list[str] | None = None) -> None:
    """Run Hydra with these arguments (None: the process's own); SystemExit unless all went well."""
    if argv is not None:
        sys.argv = ["dd-lightning launch", *argv]
    before = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"  # so that Hydra hands errors to us instead of printing them
    try:
        _job()
    except KeyboardInterrupt:
        _leave_at_once(INTERRUPTED)
    except (_PastHydra, *TOLD) as error:
        told = error.error if isinstance(error, _PastHydra) else error
        if before not in (None, "", "0"):
            raise told from None
        print(one_line(told), file=sys.stderr, flush=True)
        raise SystemExit(1 if isinstance(told, RunFailed) else WRONG_SETTING) from None
    finally:
        os.environ.pop(FULL_ERROR)
        if before is not None:
            os.environ[FULL_ERROR] = before


if __name__ == "__main__":
    main()
