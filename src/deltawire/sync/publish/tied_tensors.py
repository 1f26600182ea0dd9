"""Recognizes tensors that are the same memory under several names."""

from __future__ import annotations

from typing import Any

import numpy as np

from deltawire import codec

MemoryKey = tuple[int, tuple[int, ...], str]


def memory_key(tensor: Any) -> MemoryKey | None:
    """Return where a contiguous tensor begins, its shape and dtype: tied tensors have the same.

    None for an empty tensor, and for one that is not contiguous: a transposed view begins where the
    tensor that it transposes does, and may have its shape. Raises `InputError` for a dtype that
    deltawire cannot publish.
    """
    if isinstance(tensor, np.ndarray):
        memory = tensor.__array_interface__["data"][0] if tensor.flags.c_contiguous else None
    elif hasattr(tensor, "data_ptr") and tensor.is_contiguous():
        memory = tensor.data_ptr()
    else:
        memory = None
    shape = tuple(int(size) for size in tensor.shape)
    if memory is None or 0 in shape:
        return None
    return int(memory), shape, codec.dtype_of(tensor)
