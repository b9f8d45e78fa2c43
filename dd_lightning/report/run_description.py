"""What a logger's tables show of a configuration: the figures that runs differ by, and tags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FROM_ALGORITHM = ("preset", "merge", "codec", "sync_every", "fragments", "quorum", "grace_cap")
TAGGED = ("task", "algorithm", "network", "chaos")


def hparams_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """A flat table of the settings that runs are compared by; what is not there is left out."""
    found = {name: config.get(name) for name in ("mode", "learners", "seed")}
    found |= {name: _name(config.get(name)) for name in ("task", "network", "chaos")}
    algorithm = _mapping(config.get("algorithm"))
    found |= {name: _name(algorithm.get(name)) for name in FROM_ALGORITHM}
    found["outer"] = _name(algorithm.get("outer"))
    found["max_steps"] = _mapping(config.get("trainer")).get("max_steps", config.get("max_steps"))
    found["budget_tokens"] = _mapping(config.get("budget")).get("tokens")
    return {name: value for name, value in found.items() if value is not None}


def tags_of(config: Mapping[str, Any], experiment: str) -> list[str]:
    """Such as `network=us_eu`: short, and the same for runs that belong together."""
    tags = [f"experiment={experiment}"]
    tags += [f"{name}={text}" for name in TAGGED if (text := _name(config.get(name))) is not None]
    return [*tags, f"mode={config['mode']}"] if "mode" in config else tags


def _name(value: Any) -> Any:
    """A group's own name, a component's last word, or the plain value."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            return str(value["_target_"]).rpartition(".")[2]
        return value.get("name", value.get("preset"))
    return value


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
