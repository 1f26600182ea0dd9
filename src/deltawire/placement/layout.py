"""Describes how live tensors lie in memory: the storages, and the views into them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from deltawire.errors import InputError

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
"""Torch dtypes by their names in the format."""

WIRE_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class LiveTensor(msgspec.Struct, frozen=True, array_like=True):
    """A live tensor: its storage, and its place in it, in elements."""

    name: str
    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class Storage(msgspec.Struct, frozen=True, array_like=True):
    """Memory that one or several live tensors share: ``elements`` of ``dtype``."""

    name: str
    elements: int
    dtype: str


def describe_live(
    live: Mapping[str, Tensor],
) -> tuple[list[Storage], list[LiveTensor], list[Tensor]]:
    """Returns the storages of live tensors, the tensors' places in them, and each storage as a flat
    tensor.

    Leaves out tensors without elements or memory, and those of dtypes that the format does not
    have. Raises `InputError` if two storages overlap.
    """
    found: dict[tuple[str, int, int], int] = {}
    storages: list[Storage] = []
    tensors: list[LiveTensor] = []
    flats: list[Tensor] = []
    for name in sorted(live):
        tensor = live[name].detach()
        if tensor.layout != torch.strided or tensor.device.type == "meta" or not tensor.numel():
            continue
        memory = tensor.untyped_storage()
        place = (str(tensor.device), memory.data_ptr(), memory.nbytes())
        if tensor.dtype not in WIRE_DTYPES:
            continue
        dtype = WIRE_DTYPES[tensor.dtype]
        number = found.setdefault(place, len(storages))
        if number == len(storages):
            elements = memory.nbytes() // tensor.element_size()
            storages.append(Storage(name, elements, dtype))
            flats.append(tensor.as_strided((elements,), (1,), 0))
        strides = tuple(tensor.stride())
        tensors.append(
            LiveTensor(
                name, number, int(tensor.storage_offset()), tuple(tensor.shape), strides, dtype
            )
        )
    _require_apart(list(found), storages)
    return storages, tensors, flats


def _require_apart(places: list[tuple[str, int, int]], storages: list[Storage]) -> None:
    order = sorted(range(len(places)), key=lambda i: places[i])
    for before, after in itertools.pairwise(order):
        device, start, size = places[before]
        if places[after][0] == device and places[after][1] < start + size:
            raise InputError(
                f"live tensors {storages[before].name} and {storages[after].name} overlap"
            )


def address_range(flat: Tensor) -> tuple[int, int]:
    """Returns the half-open range of addresses of a tensor's storage."""
    start = flat.untyped_storage().data_ptr()
    return start, start + flat.untyped_storage().nbytes()


def require_same(
    live: Mapping[str, Tensor], held: Sequence[LiveTensor], flats: Sequence[Tensor]
) -> None:
    """Raises `InputError` if a live tensor was replaced, after giving it its memory back."""
    for tensor in held:
        now, flat = live[tensor.name], flats[tensor.storage]
        if (
            tuple(now.shape) != tensor.shape
            or tuple(now.stride()) != tensor.strides
            or now.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr()
        ):
            memory = torch.empty(0, dtype=TORCH_DTYPES[tensor.dtype], device=flat.device)
            memory.set_(flat.untyped_storage(), tensor.offset, tensor.shape, tensor.strides)
            now.data = memory
            raise InputError(f"the model's loader replaces the live tensor {tensor.name}")
