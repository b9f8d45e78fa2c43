"""How many bytes of tensors a stretch of code has alive at once, beyond those from before it."""

from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`peak`: the most that storages made in the block held together. Of this thread only.

    Args:
        before: tensors from before the block, which do not count.
    """

    def __init__(self, before):
        super().__init__()
        self.peak = 0
        self._before = {_storage(tensor)._cdata for tensor in before}
        self._made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [_storage(leaf)._cdata for leaf in _tensors((args, kwargs))]
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = _storage(tensor)
            if storage._cdata not in self._before and storage._cdata not in given:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._made = {key: one for key, one in self._made.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return result


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if hasattr(leaf, "untyped_storage")]


def _storage(tensor):
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage()
