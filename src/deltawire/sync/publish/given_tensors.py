"""Checks the tensors that a caller gives, and recognizes those that share memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from deltawire import codec
from deltawire.errors import InputError

MemoryKey = tuple[int, tuple[int, ...], str]


def memory_key(tensor: Any) -> MemoryKey | None:
    """Returns the address, shape and dtype of a contiguous tensor, which tied tensors share.

    None for an empty tensor and for one that is not contiguous: a transposed view has the address
    of the original tensor and may have its shape. Raises `InputError` for a dtype that deltawire
    cannot publish.
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


def check_mapping(tensors: Any) -> None:
    """Raises `InputError` unless ``tensors`` maps names to tensors; the error for a module says how
    to get one.
    """
    if hasattr(tensors, "named_parameters"):
        raise InputError(
            "tensors is a module; give a mapping of names to tensors",
            hint="pass deltawire.tensors_of(model)",
        )
    if not isinstance(tensors, Mapping):
        raise InputError(
            f"tensors is a {type(tensors).__name__}; give a mapping of names to tensors",
            hint="for example deltawire.tensors_of(model)",
        )


def check_names(tensors: Any) -> None:
    """Raises `InputError` for what `check_mapping` refuses, and for names of PEFT's wrapper."""
    check_mapping(tensors)
    for name in tensors:
        if name.startswith("base_model.model.") or ".base_layer." in name or ".lora_" in name:
            raise InputError(
                f"{name[:120]!r} is a name that PEFT's wrapper gives, which no engine loads",
                hint="pass deltawire.tensors_of(peft_model): the base with the adapter added",
            )
