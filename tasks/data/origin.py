"""What a manifest says about where data comes from."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """A source as it is on this machine now; `versions` tell its content from any other's."""

    source: str
    licence: str
    attribution: str
    versions: dict[str, str]
