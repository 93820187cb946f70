"""How many bytes a forward pass keeps for its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

__all__ = ["kept_bytes"]


def kept_bytes(forward: Callable[[], Tensor], *, excluding: Iterable[Tensor] = ()) -> int:
    """Return the bytes that autograd keeps alive between forward and backward.

    Tensors that share a storage count once, and a view counts its whole storage, because that is what stays in memory.
    Only what goes through autograd's saved tensors is seen; an operator that hid tensors elsewhere would look better
    than it is.

    Args:
        forward: The computation; at least one of its inputs requires a gradient.
        excluding: Tensors that exist anyway, such as parameters.

    Returns:
        The number of bytes.

    Example:
        >>> x = torch.ones(1000, requires_grad=True)
        >>> kept_bytes(lambda: x.exp())  # the derivative of exp needs its result: 1000 numbers of 4 bytes
        4000
    """
    ignored = {tensor.untyped_storage().data_ptr() for tensor in excluding}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ignored:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # Held until the count is done, so that no freed storage can hand its address to another one.
        result = forward()
        total = sum(sizes.values())
    del result
    return total
