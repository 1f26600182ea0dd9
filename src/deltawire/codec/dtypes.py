"""Views arrays as bits: wire dtypes, named as in safetensors, and the unsigned view of each.

Legend: N = elements; uint = the unsigned dtype of an element's width, little-endian as the host.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deltawire.errors import InputError

Bits = NDArray[np.unsignedinteger[Any]]

ITEMSIZE: Final = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
"""Bytes of one element, by wire dtype."""

_WIRE_NAME: Final = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
}

_UNSIGNED: Final[dict[int, np.dtype[np.unsignedinteger[Any]]]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}


def unsigned(itemsize: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Returns the unsigned dtype of ``itemsize`` bytes (1, 2, 4 or 8). Raises InputError for
    others.
    """
    if itemsize not in _UNSIGNED:
        raise InputError(f"elements of {itemsize} bytes are not 1, 2, 4 or 8 bytes wide")
    return _UNSIGNED[itemsize]


def unsigned_of(dtype: str) -> np.dtype[np.unsignedinteger[Any]]:
    """Returns the unsigned NumPy dtype of a wire dtype's bits; raises `InputError` for unknown
    ones.
    """
    if dtype not in ITEMSIZE:
        raise InputError(f"unknown dtype {dtype[:40]!r}", hint=f"known: {', '.join(ITEMSIZE)}")
    return unsigned(ITEMSIZE[dtype])


@lru_cache(maxsize=256)
def _name_of(dtype: np.dtype[Any]) -> str:
    """Returns NumPy's name of a dtype, which NumPy computes each time."""
    return dtype.name


def dtype_of(array: object) -> str:
    """Returns the wire dtype of a NumPy array or torch tensor.

    Raises InputError if it is neither, or its dtype or byte order cannot be stored.
    """
    if isinstance(array, np.ndarray):
        if not array.dtype.isnative:
            raise InputError(
                f"an array of dtype {array.dtype} is not in the host's byte order",
                hint="convert it with array.astype(array.dtype.newbyteorder('='))",
            )
        name = _name_of(array.dtype)
    elif _is_tensor(array):
        name = str(array.dtype).removeprefix("torch.")  # type: ignore[attr-defined]
    else:
        raise InputError(f"a {type(array).__name__} is not a NumPy array or a torch tensor")
    if name not in _WIRE_NAME:
        raise InputError(f"dtype {name} has no wire dtype", hint=f"known are {', '.join(ITEMSIZE)}")
    return _WIRE_NAME[name]


def bits_of(array: object, dtype: str | None = None) -> Bits:
    """Returns the bits of a contiguous NumPy array or CPU torch tensor: uint[N], sharing its
    memory.

    With ``dtype``, a wire dtype, the array must be of it, or hold its bits as unsigned integers.
    Raises InputError if it does not, or if the array is not contiguous, not aligned, not on the
    CPU, or of a dtype that cannot be stored.
    """
    found = dtype_of(array)
    if dtype is not None:
        if dtype not in ITEMSIZE:
            raise InputError(
                f"{dtype} is not a wire dtype", hint=f"known are {', '.join(ITEMSIZE)}"
            )
        if found not in (dtype, f"U{8 * ITEMSIZE[dtype]}"):
            raise InputError(f"the array holds {found}, not {dtype}")
    if not isinstance(array, np.ndarray):
        return _tensor_bits(array, ITEMSIZE[found])
    if not array.flags.c_contiguous:
        raise InputError("the array is not contiguous", hint="pass numpy.ascontiguousarray(array)")
    if not array.flags.aligned:
        raise InputError("the array is not aligned to its elements", hint="pass array.copy()")
    return array.reshape(-1).view(_UNSIGNED[array.dtype.itemsize])


def require_bits(bits: object) -> Bits:
    """``bits`` itself if it is uint[N], contiguous and aligned, else InputError."""
    if (
        not isinstance(bits, np.ndarray)
        or bits.ndim != 1
        or bits.dtype.kind != "u"
        or not bits.dtype.isnative
        or not bits.flags.c_contiguous
        or not bits.flags.aligned
    ):
        raise InputError(
            "bits must be a contiguous and aligned one-dimensional array of unsigned integers",
            hint="pass codec.bits_of(array)",
        )
    return bits


def require_alike(base_bits: Bits, target_bits: Bits) -> None:
    """Raises InputError unless both are bits of the same length and width."""
    base, target = require_bits(base_bits), require_bits(target_bits)
    if base.dtype != target.dtype or base.size != target.size:
        raise InputError(
            f"base is {base.size} elements of {base.dtype}, target {target.size} of {target.dtype}"
        )


def _is_tensor(array: object) -> bool:
    # A caller with a tensor has already imported torch; other callers neither need it nor wait for
    # its import.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _tensor_bits(tensor: Any, itemsize: int) -> Bits:
    torch: Any = sys.modules["torch"]
    if hasattr(tensor, "to_local"):
        raise InputError("the tensor is distributed", hint="pass tensor.to_local()")
    if tensor.device.type != "cpu":
        raise InputError(f"the tensor is on {tensor.device}", hint="pass tensor.cpu()")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise InputError("the tensor is not contiguous", hint="pass tensor.contiguous()")
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]
    array: NDArray[Any] = tensor.detach().reshape(-1).view(signed).numpy()
    return array.view(_UNSIGNED[itemsize])
