"""Messages between an operator and the syncer, over a control connection that never joined."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from dd_lightning.protocol.message_base import Count, Message


class Query(Message):
    """Operator to syncer, over a control connection that never joined. Answered by `Answer`.

    `what`: "status" | "checkpoint"; any other is answered with an error in words.
    """

    number: Count
    what: Annotated[str, msgspec.Meta(max_length=40)]


class Answer(Message):
    """Syncer to operator. `body`: plain JSON values; `error`: why there is none, "" when fine."""

    number: int
    body: dict[str, Any] = msgspec.field(default_factory=dict)
    error: str = ""
