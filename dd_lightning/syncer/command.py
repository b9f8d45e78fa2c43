"""`dd-lightning syncer`: checks its settings, serves one run, and says how it ended.

Exit code: 0 finished, 1 failed, 2 a wrong setting (one line on stderr), 130 interrupted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from typing import Any

import torch

from dd_lightning.crash_points import reach
from dd_lightning.protocol.tape import read_tape
from dd_lightning.syncer.run import SyncerRun
from dd_lightning.syncer.settings import TAPE, SyncerSettings, parse

log = logging.getLogger(__name__)

EXIT_CODES = {"finished": 0, "failed": 1, "interrupted": 130}
WRONG_SETTING = 2


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with contextlib.ExitStack() as close:
        try:
            settings = parse(sys.argv[1:] if argv is None else argv)
            run = SyncerRun(settings, close)
        except (ValueError, OSError, ImportError) as error:
            if os.environ.get("HYDRA_FULL_ERROR", "") not in ("", "0"):
                raise
            print(" ".join(str(error).split()), file=sys.stderr, flush=True)
            return WRONG_SETTING
        status = _execute(run)
    reach("end.summary")
    if "DD_LAUNCHED" not in os.environ:  # the launcher adds evaluations first
        _summarize(settings, status)
    return EXIT_CODES[status]


def _execute(run: SyncerRun) -> str:
    said: dict[str, Any] = {"listening": run.address}
    if resumed := run.resumed():
        said["resumed"] = resumed
        _tell(resumed)
    try:
        outcome = run.execute(lambda: print(json.dumps(said), flush=True))
    except Exception:
        log.exception("the syncer failed")
        return "failed"
    log.info("%s: %s", outcome.status, outcome.reason)
    return outcome.status


def _tell(resumed: dict[str, Any]) -> None:
    if resumed["checkpoint"] is None:
        log.warning(
            "resumed as epoch %d before its first checkpoint: Θ starts from the first learner that "
            "joins; what was merged is in the values of learners that go on, and counts as lost",
            resumed["epoch"],
        )
        return
    log.info(
        "resumed from %s as epoch %d: %d merges, %.0f tokens merged, versions %s, run clock %d, "
        "second %.0f of the run",
        *(resumed[name] for name in ("checkpoint", "epoch", "merges", "tokens_merged")),
        " ".join(str(version[1]) for version in resumed["versions"]),
        resumed["clock"],
        resumed["seconds"],
    )


def _summarize(settings: SyncerSettings, status: str) -> None:
    from dd_lightning.report.summary import summarize, write_summary

    tape = read_tape(settings.run_dir / TAPE)
    try:
        write_summary(settings.run_dir, summarize(tape, status=status))
    except OSError as error:  # the run has ended, and its tape says all that the summary would
        log.error(
            "summary.json cannot be written (%s): free space, then `dd-lightning report %s`",
            error,
            settings.run_dir,
        )


if __name__ == "__main__":
    sys.exit(main())
