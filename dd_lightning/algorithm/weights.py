"""How much a contribution counts in a merge: quantity times quality of its tokens."""

from dd_lightning.algorithm.checks import check_int, check_number


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


def contribution_weight(tokens: int, steps: int, sync_every: int) -> float:
    """Return `token_weight` times min(1, 2H / steps), with H = `sync_every` inner steps.

    The last factor is 1 in ordinary running; it keeps a learner that comes back after a long
    absence from drowning the others (our choice, not the paper's).

    Raises:
        ValueError: a negative count, or `sync_every` below 1.
    """
    horizon = check_int("sync_every", sync_every, 1)
    weight = token_weight(tokens, steps)
    return weight if steps <= 2 * horizon else weight * (2 * horizon / steps)
