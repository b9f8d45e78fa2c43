"""From a setting to an object: a registered name, a Hydra `_target_` mapping, or an instance."""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from dd_lightning.algorithm.checks import refuse

# what a class must define before it is called: settings also arrive over the wire, and a class
# such as subprocess.Popen must not be started because a message names it
_METHODS = {"codec": ("encode", "decode", "num_bytes")}
_DEFAULT_METHODS = ("__call__",)


def resolve(kind: str, spec: Any, registry: Mapping[str, type]) -> Any:
    """Return the object that a setting means.

    Args:
        kind: name of the setting (`merge`, `fragmentation`, `codec`), for messages.
        spec: a name in `registry`, a mapping with `_target_` (dotted path of a class; the other
            keys are its arguments), or an object that is returned as it is.
        registry: classes by name.

    Raises:
        ValueError: an unknown name, a `_target_` that cannot be imported or is not such a class,
            or arguments that it does not take.
    """
    if isinstance(spec, str):
        if spec not in registry:
            fix = (
                f"For your own, give a mapping: {kind}: {{_target_: your_package.YourClass}} "
                "(other keys are its arguments)."
            )
            raise refuse(kind, spec, " | ".join(registry), fix)
        return registry[spec]()
    if isinstance(spec, Mapping):
        return _instantiate(kind, spec)
    methods = _METHODS.get(kind, _DEFAULT_METHODS)
    if isinstance(spec, type) or not _defines(type(spec), methods):
        allowed = f"{' | '.join(registry)}, a mapping with _target_, or an object with "
        raise refuse(kind, spec, allowed + ", ".join(methods))
    return spec


def import_class(name: str, path: Any) -> type:
    """Return the class at a dotted path.

    Args:
        name: name of the setting, for messages.

    Raises:
        ValueError: not a dotted path, or nothing importable or no class is there.
    """
    if not isinstance(path, str) or "." not in path:
        raise refuse(name, path, "the dotted path of a class, such as torch.optim.Adam")
    module_name, _, attribute = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        fix = "Install the package, or put its folder on PYTHONPATH, on every machine of the run."
        raise refuse(name, path, f"an importable class ({error})", fix) from error
    if not isinstance(found, type):
        raise refuse(name, path, f"a class, not a {type(found).__name__}")
    return found


def build(name: str, cls: type, arguments: Mapping[str, Any], *positional: Any) -> Any:
    """Return cls(*positional, **arguments); arguments that it does not take are a ValueError."""
    try:
        signature = inspect.signature(cls)
        signature.bind(*positional, **arguments)
    except TypeError as error:
        known = list(signature.parameters)[len(positional) :]
        given = {str(key): value for key, value in arguments.items()}
        fix = f"Python says: {error}. Remove what is not among them; with Hydra: ~{name}.KEY."
        raise refuse(f"{name} ({cls.__name__})", given, "the keys " + ", ".join(known), fix) from (
            error
        )
    return cls(*positional, **arguments)


def _instantiate(kind: str, spec: Mapping[str, Any]) -> Any:
    if "_target_" not in spec:
        fix = f"Write {kind}: {{_target_: your_package.YourClass}}, or a plain name."
        raise refuse(kind, dict(spec), "a mapping with the key _target_", fix)
    cls = import_class(f"{kind}._target_", spec["_target_"])
    methods = _METHODS.get(kind, _DEFAULT_METHODS)
    if not _defines(cls, methods):
        raise refuse(f"{kind}._target_", spec["_target_"], f"a class with {', '.join(methods)}")
    arguments = {key: value for key, value in spec.items() if key != "_target_"}
    return build(kind, cls, arguments)


def _defines(cls: type, methods: tuple[str, ...]) -> bool:
    # not hasattr: every class has __call__ through its metaclass
    return all(any(method in vars(base) for base in cls.__mro__) for method in methods)
