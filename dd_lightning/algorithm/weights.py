"""How much a contribution counts in a merge: quantity times quality of its tokens, or the same."""

from dd_lightning.algorithm.checks import check_choice, check_int, check_number

WEIGHTS = ("tokens", "uniform")  # the values of `algorithm.weights`


def token_weight(tokens: int, steps: int) -> float:
    """Return tokens * (tokens / steps), the paper's weight of a contribution.

    Args:
        tokens: tokens processed since the last apply or merged contribution.
        steps: inner steps in the same interval; 0 is not a contribution and weighs 0.

    Raises:
        ValueError: a negative or non-finite count.
    """
    check_number("tokens", tokens, 0)
    check_number("steps", steps, 0)
    if steps == 0:
        return 0.0
    return float(tokens * tokens / steps)


def contribution_weight(tokens: int, steps: int, sync_every: int, rule: str = "tokens") -> float:
    """Return `token_weight` times min(1, 2H / steps), with H = `sync_every` inner steps.

    The last factor is 1 in ordinary running; it keeps a learner that comes back after a long
    absence from drowning the others (our choice, not the paper's).

    Args:
        rule: "tokens", or "uniform": 1 for every contribution that has tokens, however few, so
            that a slow learner's data count as much as a fast one's, and so does its noise.

    Raises:
        ValueError: a negative count, `sync_every` below 1, or an unknown rule.
    """
    horizon = check_int("sync_every", sync_every, 1)
    check_choice("algorithm.weights", rule, WEIGHTS)
    weight = token_weight(tokens, steps)
    if rule == "uniform":
        return float(weight > 0)
    return weight if steps <= 2 * horizon else weight * (2 * horizon / steps)
