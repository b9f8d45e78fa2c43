"""A disk that takes no more, by the kernel's limit on the size of any file of this process."""

from __future__ import annotations

import functools
import resource
from collections.abc import Callable

import pytest


def limiter(request: pytest.FixtureRequest) -> Callable[[int | None], None]:
    """Sets how many bytes a file may grow to (None: as many as it likes) until the test ends.

    The limit ends with the test's body and not with a fixture: in between pytest writes its own
    output, which may go to a file.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    body = request.node.obj

    @functools.wraps(body)
    def limited(*arguments, **named):
        try:
            return body(*arguments, **named)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    request.node.obj = limited

    def limit(num_bytes: int | None) -> None:
        soft = before[0] if num_bytes is None else num_bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, before[1]))

    return limit
