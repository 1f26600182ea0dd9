"""Dithers master weights: places each at random in the interval that rounds to its published bits.

A 16-bit checkpoint is the rounding of masters that nobody has. Masters that start at its values
stand in the middle of their rounding intervals, so that updates smaller than half a step of the
format change no published bit for a long time. Masters that start uniformly in these intervals
change, on average, as many published bits as their updates ask for, from the first step on; and
version 0 keeps its bits::

    published values      ──┬───────────┬───────────┬──
    interval of one             [─────x─────)
    starts at its value             x            an update below half a step changes nothing
    starts dithered               x              it changes the bits with its probability

The place is a hash of seed, name and index, so a restart, a replay, and any sharding find the
same masters, and nothing is stored.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

_GRID_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""Bits of float32's mantissa that a published dtype lacks: an interval of a normal number that is
no power of two has this many bits of float32 numbers."""
_CHUNK = 1 << 18
_CHUNK_ON_CPU = 1 << 14
"""Operations on so few elements run on the calling thread. Divided among threads, each of them ends
with a barrier, and on a machine with more threads than cores the barriers take twenty times as long
as the work.
"""
_MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""Those of splitmix64's finalizer (Steele et al., 2014), as signed integers."""
_STEP = -0x61C8864680B583EB
"""The golden ratio's increment of splitmix64."""


@torch.no_grad()
def dither(
    values: Tensor,
    dtype: torch.dtype,
    *,
    seed: int,
    name: str,
    shape: tuple[int, ...] | None = None,
    offset: tuple[int, ...] | None = None,
) -> None:
    """Dithers float32 masters in place, on any device; `values.to(dtype)` keeps its bits.

    ``values`` is contiguous: a tensor, or the box of a tensor of ``shape`` that begins at
    ``offset`` (both None: the whole tensor). Every part of a tensor gets the values that the whole
    would. Values that ``dtype`` cannot hold are left alone, because more is known of them than
    their rounding; so are zeros, infinities and NaN. A ``dtype`` of 32 bits changes nothing.

    Example, for a loop that keeps its own masters::

        masters = {name: p.detach().to(torch.bfloat16).float() for name, p in model.named_parameters()}
        for name, master in masters.items():
            dither(master, torch.bfloat16, seed=1, name=name)
        ...                                       # a step of the optimizer on the masters
        parameter.copy_(master.to(torch.bfloat16))  # compute with what is published
    """  # noqa: E501
    if dtype not in _GRID_BITS or not values.numel():
        return
    flat = values.view(-1)
    key = _key_of(seed, name)
    chunk = _CHUNK_ON_CPU if flat.device.type == "cpu" else _CHUNK
    begin = _first_place(tuple(values.shape), shape, offset)
    for first in range(0, flat.numel(), chunk):
        part = flat[first : first + chunk]
        start = first + (begin or 0)
        places = torch.arange(start, start + part.numel(), device=part.device)
        if begin is None and shape is not None and offset is not None:
            places = _in_whole(places, tuple(values.shape), shape, offset)
        part.copy_(_placed(part, dtype, _hashed(places, key) & ((1 << _GRID_BITS[dtype]) - 1)))


def _key_of(seed: int, name: str) -> int:
    """Returns a signed integer of 64 bits for a tensor of a run."""
    text = f"dither {seed} {name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def _first_place(
    box: tuple[int, ...], shape: tuple[int, ...] | None, offset: tuple[int, ...] | None
) -> int | None:
    """Returns the flat index at which a box begins if its elements are consecutive ones of the
    tensor, such as whole rows of a matrix; None if they are not."""
    if shape is None or offset is None or not shape:
        return 0
    if box[1:] != shape[1:]:
        return None
    return offset[0] * math.prod(shape[1:])


def _in_whole(
    places: Tensor, box: tuple[int, ...], shape: tuple[int, ...], offset: tuple[int, ...]
) -> Tensor:
    """Returns flat indices of a box as those of the tensor that it is part of."""
    found = torch.zeros_like(places)
    stride = 1
    for size, whole, start in zip(reversed(box), reversed(shape), reversed(offset), strict=True):
        found += (places % size + start) * stride
        places = places // size
        stride *= whole
    return found


def _hashed(places: Tensor, key: int) -> Tensor:
    """Returns splitmix64's output number ``places`` of the state ``key``: int64, in place."""
    mixed = places.mul_(_STEP).add_(key)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        mixed = mixed.bitwise_xor_(_shifted(mixed, shift)).mul_(multiplier)
    return mixed.bitwise_xor_(_shifted(mixed, 31))


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shifts right and fills with zeros; torch's own shift of signed integers keeps the sign."""
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _placed(values: Tensor, dtype: torch.dtype, draw: Tensor) -> Tensor:
    """Returns ``values`` moved to place number ``draw`` of their rounding intervals.

    Place 0 is the value itself. All others lie strictly inside the interval, so that ties do not
    matter: the grid has float32's own spacing.
    """
    held = values.to(dtype)
    bits = held.view(torch.int16)
    # Neighbors in magnitude. Below a power of two, they are half as far away as above it.
    inner = (held.float() - (bits - 1).view(dtype).float()) / 2
    outer = ((bits + 1).view(dtype).float() - held.float()) / 2
    outer = torch.where(outer.isinf(), inner, outer)  # The largest number's upper neighbor.
    share = draw.float() / (1 << _GRID_BITS[dtype])
    moved = held.float() - inner + (inner + outer) * share
    # Zeros and what is not finite have neighbors that are NaN. Place 0 is an end of the interval.
    kept = (held.float() != values) | (draw == 0) | (moved.to(dtype) != held)
    return torch.where(kept, values, moved)
