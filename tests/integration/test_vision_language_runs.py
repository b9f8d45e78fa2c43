"""The task in processes: two ranks of DDP beside one process, and two learners of a launched run.

Slow: each starts several processes that import torch, 5 to 15 s.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from dd_lightning.launch.processes import scrubbed_environment
from dd_lightning.tasks.vision_language import VisionLanguageModule
from dd_lightning.tasks.vision_language.datamodule import Sample, to_batch
from tests.chaos_runs import COMMAND
from tests.named_pictures import NAMES, write_named
from tests.trainers import QUIET

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
PROCESS_S = 240.0  # loose: a tenth of it on two quiet cores
PAIRS, STEPS = 16, 3
SMALL = {
    "size": 8, "text_length": 9, "vit": {"patch": 4, "width": 16, "depth": 1, "heads": 2},
    "gpt": {"width": 16, "depth": 1, "heads": 2}, "contrast": {"width": 8},
}  # fmt: skip


class Descent(VisionLanguageModule):
    """By SGD: the first steps of AdamW have the size of the learning rate whatever the gradient's,
    also where it is zero but for rounding, as that of the attention's key bias."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def samples() -> Iterator[Sample]:
    """Names of other lengths, some of them twice in a batch."""
    draw = torch.Generator().manual_seed(0)
    for index in range(PAIRS * STEPS):
        number = index % (PAIRS - 3)
        ids = (*range(65, 65 + 2 + number % 6), 65 + number, 0)
        pixels = torch.randint(0, 256, (3, 8, 8), generator=draw, dtype=torch.uint8)
        yield Sample(pixels, ids, len(ids) - 1, number)


def train(devices: int, file: Path) -> None:
    """Rank r of two has every second of the pairs that one process has."""
    pl.seed_everything(0, verbose=False)
    ours, pairs = Descent("both", **SMALL), list(samples())
    rank = int(os.environ.get("LOCAL_RANK", 0))
    # Without a sampler of ours Lightning has the ranks draw their pairs in random order.
    sampler = DistributedSampler(pairs, devices, rank, shuffle=False)
    loader = DataLoader(pairs, PAIRS // devices, sampler=sampler, collate_fn=to_batch)
    strategy = "ddp" if devices > 1 else "auto"
    run = pl.Trainer(**{**QUIET, "devices": devices, "strategy": strategy}, max_steps=STEPS)
    # an odd number, of which the sampler repeats one; names twice, with their picture
    twice = (pairs[: PAIRS - 3] * 2)[:-1]
    validating = DataLoader(twice, batch_size=5, collate_fn=to_batch)
    run.fit(ours, loader, validating)
    (found,) = run.validate(ours, validating, verbose=False)
    if run.is_global_zero:
        torch.save({"weights": ours.state_dict(), "found": found}, file)


def test_two_ranks_are_one_process_with_all_pairs(tmp_path):
    train(1, tmp_path / "one.pt")
    done = subprocess.run(
        [sys.executable, "-m", f"tests.integration.{Path(__file__).stem}", f"{tmp_path}/two.pt"],
        env=scrubbed_environment(1), cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in ("one", "two"))
    pl.seed_everything(0, verbose=False)
    start = Descent("both", **SMALL).state_dict()
    for name, weight in one["weights"].items():
        # far below what the steps have changed
        torch.testing.assert_close(two["weights"][name], weight, rtol=1e-5, atol=1e-6)
    changed = [(weight - start[name]).abs().max() for name, weight in one["weights"].items()]
    assert min(changed) > 0 and max(changed) > 1e-2
    assert one["found"]["retrieval_candidates"] == PAIRS - 3
    assert two["found"] == pytest.approx(one["found"], rel=1e-4)


def test_two_learners_of_a_launched_run(tmp_path):
    urls = write_named(tmp_path / "named")
    settings = [
        "task=vision_language", "task.data.source=webdataset",
        f"task.data.path='{urls}'", "task.data.size=8", "task.data.num_shards=8",
        "task.module.objective=both", "task.module.vit={patch: 4, width: 16}",
        "task.module.gpt.width=16", "task.data.batch_size=16", "trainer.max_steps=120",
        "task.module.optimizer.lr=8e-3", "launcher.step_floor_s=0", "algorithm.sync_every=12",
    ]  # fmt: skip
    done = subprocess.run(
        [*COMMAND, *settings, f"hydra.run.dir={tmp_path}/run"],
        env=os.environ | {"DD_DATA": str(tmp_path / "data"), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=PROCESS_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished" and set(summary["per_learner"]) == {"0", "1"}
    assert summary["loss"]["validation"] < 0.8 * summary["loss"]["initial"]
    metrics = summary["metrics"]
    assert 8 <= metrics["retrieval_candidates"] <= len(NAMES) and metrics["recall_at_1"] > 0.3


if __name__ == "__main__":
    train(2, Path(sys.argv[1]))
