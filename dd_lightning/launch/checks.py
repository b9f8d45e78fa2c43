"""Checks of single settings by their dotted name: what was given, what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


def get(values: Mapping[str, Any], name: str) -> Any:
    """The value at a dotted name.

    Raises:
        ValueError: it is not there.
    """
    found: Any = values
    for key in name.split("."):
        if not isinstance(found, Mapping) or key not in found:
            raise ValueError(f"{name} is missing; compose from dd_lightning.conf, which has it")
        found = found[key]
    return found


def integer(
    values: Mapping[str, Any], name: str, least: int, none: bool = False, word: str = ""
) -> int | None:
    """An integer >= `least`; null only where `none`. `word`: allowed too, for the message."""
    value = get(values, name)
    if none and value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        allowed = f"an integer >= {least}" + (", or null" if none else "")
        allowed += f", or {word}" if word else ""
        raise ValueError(f"{name} is {value!r}; allowed: {allowed}.")
    return value


def seconds(values: Mapping[str, Any], name: str, positive: bool = True) -> float:
    """Seconds as a float: above 0, or at least 0 where not `positive`."""
    value = get(values, name)
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not (value > 0 if positive else value >= 0) or value == float("inf"):
        raise ValueError(f"{name} is {value!r}; allowed: seconds {'> 0' if positive else '>= 0'}.")
    return float(value)


def choice(values: Mapping[str, Any], name: str, allowed: Iterable[str | bool]) -> Any:
    """One of a few words, or of false and true."""
    value = get(values, name)
    allowed = list(allowed)
    if value not in allowed:
        words = [str(one).lower() if isinstance(one, bool) else one for one in allowed]
        raise ValueError(f"{name} is {value!r}; allowed: {' | '.join(words)}.")
    return value


def known_keys(given: Mapping[str, Any], allowed: Iterable[str], prefix: str = "") -> None:
    """Refuse a key that means nothing, with the nearest one that does."""
    allowed = [str(name) for name in allowed]
    for key in given:
        if str(key) in allowed:
            continue
        near = difflib.get_close_matches(str(key), allowed, n=1)
        hint = f" Did you mean {prefix}{near[0]}?" if near else ""
        raise ValueError(
            f"{prefix}{key} is {given[key]!r}, but it is not a setting; "
            f"allowed: {', '.join(allowed)}.{hint}"
        )
