"""Arguments of commands that refuse a wrong flag in one line, as every wrong setting is."""

from __future__ import annotations

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Raises ValueError for what argparse would answer with its usage."""

    def error(self, message: str) -> NoReturn:
        """One line, without the usage."""
        raise ValueError(f"{self.prog}: {message}; see {self.prog} --help.")


def integers(name: str, text: str) -> list[int]:
    """From `1,4,16`.

    Raises:
        ValueError: something else.
    """
    try:
        return [int(part.replace("_", "")) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} is {text!r}; allowed: integers, as 1,4,16.") from None
