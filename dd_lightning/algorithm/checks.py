"""Checks of user input whose errors teach: what was given, what is allowed, what to do.

For settings and arguments that a user can get wrong; our own invariants are asserted instead.
"""

import math
from collections.abc import Collection
from numbers import Integral, Real


def refuse(name: str, value: object, allowed: str, fix: str = "") -> ValueError:
    """Return (not raise) the ValueError that says `name`, the `value` given and what is allowed."""
    message = f"{name} is {value!r}; allowed: {allowed}."
    return ValueError(f"{message} {fix}" if fix else message)


def check_int(
    name: str, value: object, minimum: int, maximum: int | None = None, fix: str = ""
) -> int:
    """Return `value` as int if it is an integer (no bool) in [minimum, maximum].

    Raises:
        ValueError: otherwise; `fix` is the closing sentence that says what to do.
    """
    allowed = f"an integer from {minimum}" + ("" if maximum is None else f" to {maximum}")
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise refuse(name, value, allowed, fix)
    number = int(value)
    if number < minimum or (maximum is not None and number > maximum):
        raise refuse(name, value, allowed, fix)
    return number


def check_number(
    name: str,
    value: object,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    *,
    above: float | None = None,
    below: float | None = None,
    fix: str = "",
) -> float:
    """Return `value` as float if it is a finite real number within the bounds.

    Args:
        minimum, maximum: inclusive bounds.
        above, below: exclusive bounds, in addition.

    Raises:
        ValueError: otherwise (NaN, infinity and bool included).
    """
    bounds = [f">= {minimum:g}"] if minimum > -math.inf else []
    bounds += [f"> {above:g}"] if above is not None else []
    bounds += [f"<= {maximum:g}"] if maximum < math.inf else []
    bounds += [f"< {below:g}"] if below is not None else []
    allowed = "a finite number" + (" " + " and ".join(bounds) if bounds else "")
    if isinstance(value, bool) or not isinstance(value, Real):
        raise refuse(name, value, allowed, fix)
    number = float(value)
    inside = math.isfinite(number) and minimum <= number <= maximum
    inside = inside and (above is None or number > above) and (below is None or number < below)
    if not inside:
        raise refuse(name, value, allowed, fix)
    return number


def check_choice(name: str, value: str, allowed: Collection[str], fix: str = "") -> str:
    """Return `value` if it is one of `allowed`.

    Raises:
        ValueError: otherwise, listing what is allowed.
    """
    if not isinstance(value, str) or value not in allowed:
        raise refuse(name, value, " | ".join(allowed), fix)
    return value
