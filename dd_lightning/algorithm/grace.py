"""The paper's grace window: how long a round stays open once its quorum is there."""

from dd_lightning.algorithm.checks import check_number


def grace_window(
    overlap: float,
    step: float,
    quorum: float,
    sync: float,
    safety: float = 0.8,
    cap: float | None = None,
) -> float:
    """Return clamp(safety * (overlap * step - quorum - sync), 0, cap) in seconds (eq. 3).

    Args:
        overlap: the budget between snapshot and apply, in inner steps (tau).
        step: seconds of an inner step of the fastest contributor.
        quorum: seconds from the round's opening to its quorum.
        sync: seconds of the merge plus one fragment's delivery.
        safety: share of the slack that is used, 0..1 (gamma).
        cap: most seconds to wait; None: one `step`.

    Raises:
        ValueError: a negative or non-finite duration, or `safety` outside 0..1.
    """
    check_number("overlap", overlap, 0)
    for name, seconds in (("step", step), ("quorum", quorum), ("sync", sync)):
        check_number(name, seconds, 0)
    check_number("safety", safety, 0, 1)
    limit = step if cap is None else check_number("cap", cap, 0)
    slack = overlap * step - quorum - sync
    return float(min(max(safety * slack, 0.0), limit))
