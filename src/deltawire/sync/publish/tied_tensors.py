"""Tensors that are one memory under several names."""

from __future__ import annotations

from typing import Any

import numpy as np

from deltawire import codec

Place = tuple[int, tuple[int, ...], str]


def place_of(tensor: Any) -> Place | None:
    """Where a contiguous tensor of some elements begins, its shape and dtype: tied tensors have the
    same. Any other has none: a transposed view begins where what it transposes does, and may have
    its shape. Raises `InputError` for a dtype that has no place on the wire."""
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
