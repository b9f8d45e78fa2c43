"""Which tensors are always merged by the weighted average, and the names they go by.

Embeddings, whatever shares their storage, and output heads: their rows move independently, so a
common direction of the whole tensor means little.
"""

import re
import warnings

from torch import Tensor, nn

from dd_lightning.algorithm.checks import refuse

DEFAULT_AVERAGE_PATTERN = r"(^|\.)(lm_head|head|unembed|output)\.weight$"

_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def canonical_name(name: str) -> str:
    """Return `name` without what FSDP, torch.compile, checkpointing and DDP put into it."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    if len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def average_rule_names(
    module: nn.Module, pattern: str | None = DEFAULT_AVERAGE_PATTERN
) -> set[str]:
    """Return the canonical names of parameters that are averaged whatever the merge rule is.

    Tied tensors are listed under each name.

    Args:
        module: the learner's model.
        pattern: regular expression searched in canonical names; None: embeddings only.

    Raises:
        ValueError: `pattern` is empty or not a regular expression.
    """
    expression = _compile(pattern)
    named = [
        (canonical_name(name), parameter)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    ]
    embeddings = [
        child.weight
        for child in module.modules()
        if isinstance(child, _EMBEDDINGS) and isinstance(child.weight, nn.Parameter)
    ]
    matched = {name for name, _ in named if expression is not None and expression.search(name)}
    if not matched and pattern not in (None, DEFAULT_AVERAGE_PATTERN):
        warnings.warn(
            f"average_tensors = {pattern!r} matches no parameter and has no effect. "
            f"Names look like {[name for name, _ in named[:3]]}.",
            stacklevel=2,
        )
    shared = {
        name
        for name, parameter in named
        # a shard may have no elements, and so overlap nothing
        if any(parameter is one or _overlap(_extent(parameter), _extent(one)) for one in embeddings)
    }
    return matched | shared


def _compile(pattern: str | None) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    fix = "Use null for embeddings only, or merge: average to average every tensor."
    if not isinstance(pattern, str) or not pattern:
        raise refuse("average_tensors", pattern, "a non-empty regular expression or null", fix)
    try:
        return re.compile(pattern)
    except re.error as error:
        allowed = f"a regular expression ({error})"
        raise refuse("average_tensors", pattern, allowed, fix) from error


def _extent(tensor: Tensor) -> tuple[int, int, int]:
    """Return (identity of the storage, first byte, byte after the last) of a tensor."""
    # _cdata identifies the storage on every device; data_ptr() is 0 for all meta tensors
    storage = tensor.untyped_storage()._cdata
    if tensor.numel() == 0:
        return storage, 0, 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in pairs)
    size = tensor.element_size()
    return storage, tensor.storage_offset() * size, (last + 1) * size


def _overlap(a: tuple[int, int, int], b: tuple[int, int, int]) -> bool:
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2]
