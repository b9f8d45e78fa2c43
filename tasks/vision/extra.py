"""The optional packages of the task: found without being imported, or how to get them."""

import importlib.util
from pathlib import Path


def require(package: str, setting: str, extra: str = "vision") -> Path:
    """Folder of an installed package, which is not imported.

    Args:
        setting: what needs it, as `task.data.source=digits`.
        extra: of dd-lightning, that brings it.

    Raises:
        ValueError: it is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"{setting} needs the package {package}, which is missing: "
            f"pip install 'dd-lightning[{extra}]'"
        )
    return Path(spec.submodule_search_locations[0])
