"""One line for a wrong setting, from our ValueErrors and from the errors of Hydra and OmegaConf."""

from __future__ import annotations

import difflib
import re

from hydra.errors import MissingConfigException
from omegaconf import Container, DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

UNKNOWN_KEY = (ConfigKeyError, ConfigAttributeError)


def one_line(error: BaseException) -> str:
    """The setting's name, what was given, what is allowed, as far as the error knows them."""
    if isinstance(error, MissingConfigException) and error.options is not None:
        return _missing_option(error)
    for cause in _causes(error):
        if isinstance(cause, UNKNOWN_KEY) and isinstance(cause.parent_node, Container):
            return _unknown_key(cause)
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {_joined(error.msg or str(error))}"
    return _joined(str(error))


def _causes(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in found:
        found.append(current)
        current = current.__cause__ or current.__context__
    return found


def _missing_option(error: MissingConfigException) -> str:
    group, _, given = (error.missing_cfg_file or "").rpartition("/")
    options = [str(option) for option in error.options or ()]
    near = difflib.get_close_matches(given, options, n=1)
    hint = f" Did you mean {group}={near[0]}?" if near else ""
    return f"{group} is {given!r}; allowed: {' | '.join(options)}.{hint}"


def _unknown_key(error: OmegaConfBaseException) -> str:
    parent = error.parent_node
    allowed = [str(key) for key in parent] if isinstance(parent, DictConfig) else []
    full = str(error.full_key)
    prefix = full.rpartition(".")[0]
    near = difflib.get_close_matches(str(error.key), allowed, n=1)
    name = f"{prefix}.{near[0]}" if prefix and near else "".join(near)
    hint = f" Did you mean {name}?" if near else ""
    if str(error.key) == "_target_":  # Hydra merges a mapping into the one that is there
        hint = f" For a class of your own: '~{prefix}' '+{prefix}={{_target_: your.Class, ...}}'."
    return f"{full} is not a setting; allowed: {', '.join(allowed)}.{hint}"


def _joined(text: str) -> str:
    return re.sub(r"\s*\n\s*", "; ", text.strip())
