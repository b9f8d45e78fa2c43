"""The answers of an evaluation as lines to read, what simpler methods reach beside them."""

from collections.abc import Iterator, Mapping
from typing import Any


def table(answers: Mapping[str, Any]) -> str:
    """One line a figure."""
    rows = list(_rows(answers))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _rows(answers: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "model", f"{answers['model']} ({answers['parameters']:,} parameters)"
    for name, value in answers["validation"].items():
        yield f"validation: {name.replace('_', ' ')}", f"{value:.4f}"
    for source, value in answers.get("bits_per_byte", {}).items():
        yield f"bits per byte of held-out text: {source}", f"{value:.4f}"
    reviews = answers.get("reviews", {})
    for name in ("frozen", "fine_tuned"):
        if name in reviews:
            found = reviews[name]
            said = f"{found['mean']:.4f} ± {found['spread']:.4f} over folds"
            yield f"film reviews: accuracy, {name.replace('_', '-')}", said
    for subject, known in answers.get("references", {}).items():
        for method, value in known.items():
            yield f"for comparison, {subject}: {method}", f"{value:.3f}"
