"""What a cell of the live tables shows: a number with its unit, or a dash for what is missing."""

from __future__ import annotations

from typing import Any

from dd_lightning.report.comparison import format_bytes
from dd_lightning.report.observer import finite

DASH = "–"
MOST_TEXT = 60  # characters of a text in a table; the log has the rest


def count(value: Any) -> str:
    """A whole number with thousands separators."""
    number = finite(value)
    return DASH if number is None else f"{number:,.0f}"


def fixed(value: Any, digits: int, unit: str = "") -> str:
    """So many decimals, and the unit."""
    number = finite(value)
    return DASH if number is None else f"{number:.{digits}f}{unit}"


def percent(value: Any) -> str:
    """A share, 0..1."""
    number = finite(value)
    return DASH if number is None else f"{number:.0%}"


def size(value: Any) -> str:
    """Bytes with a binary unit."""
    number = finite(value)
    return DASH if number is None else format_bytes(number)


def cut(text: str) -> str:
    """In one line of at most `MOST_TEXT` characters."""
    line = " ".join(text.split())
    return line if len(line) <= MOST_TEXT else f"{line[: MOST_TEXT - 1]}…"
