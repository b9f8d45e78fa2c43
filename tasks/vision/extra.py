"""The optional packages of the task: found without being imported, or how to get them."""

import importlib.util
from pathlib import Path

INSTALL = "pip install 'dd-lightning[vision]'"


def require(package: str, setting: str) -> Path:
    """Folder of an installed package, which is not imported.

    Args:
        setting: what needs it, as `task.data.source=digits`.

    Raises:
        ValueError: it is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{setting} needs the package {package}, which is missing: {INSTALL}")
    return Path(spec.submodule_search_locations[0])
