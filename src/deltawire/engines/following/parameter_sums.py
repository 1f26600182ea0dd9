"""Sums parameters by value and position, to notice what an engine reorders after loading.

Some kernels need weights in their own order: halves exchanged, rows shuffled, values quantized.
Engines convert them after loading, often in place. Writing where the loader writes would then put
correct bits in wrong places, and no digest of those bits would show it. So each parameter is summed
before and after that step, and `refusals` refuses a model whose weights changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from deltawire.codec import digest_bits
from deltawire.placement.elements import CARRIER, array_of

_CHANGES = "_deltawire_changes"
"""The attribute of a model that holds its changes after loading."""

_LOADED = "_deltawire_loaded"
"""The attribute that holds the sums of its parameters after it was first loaded."""

_CONFIRMED = "_deltawire_confirmed"
"""The attribute that holds what was read of parameters that still had those sums."""

_CHUNK_ELEMENTS = 1 << 22
_SAMPLED = 1024
"""Elements of a parameter's sample."""
_APART = 0x9E3779B1
"""Their distance, modulo the number of elements: they lie all over it, in all rows and columns."""
_ODD = 0x1E3779B97F4A7C15


class ParameterSum(NamedTuple):
    """A parameter's layout, and the sum of its elements' bits, each times an odd weight that
    depends on the position: different values, or a different order, change the sum. The weights of
    a CPU's sums are others than those of further devices, so ``device`` says whose they are.
    ``sample`` is the sum of a few elements, in which most updates show.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sum: int
    device: str = "cpu"
    sample: int = 0

    @classmethod
    def of(cls, held: torch.Tensor) -> ParameterSum:
        """Sums a tensor."""
        held = held.detach()
        shape, device = tuple(held.shape), held.device.type
        return cls(shape, held.dtype, _sum_of(held), device, _sample_of(held))

    def describes(self, held: torch.Tensor) -> bool:
        """Returns whether a tensor has the layout that was summed."""
        return self.shape == tuple(held.shape) and self.dtype == held.dtype

    def still_holds(self, held: torch.Tensor) -> bool:
        """Returns whether a tensor on the same device has the bits that were summed. Reads all of
        it only if the sample is the same."""
        held = held.detach()
        return self.sample == _sample_of(held) and self.sum == _sum_of(held)


@torch.no_grad()
def parameter_sums(model: torch.nn.Module) -> dict[str, ParameterSum]:
    """Sums all parameters of ``model`` that have memory, by name."""
    return {name: ParameterSum.of(held) for name, held in _with_memory(model)}


def _with_memory(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, held in model.named_parameters(remove_duplicate=False):
        if held.layout == torch.strided and held.device.type != "meta":
            yield name, held


def differences(
    before: Mapping[str, ParameterSum], after: Mapping[str, ParameterSum]
) -> dict[str, str]:
    """Returns which parameters of more than one element changed, and how."""
    found = {}
    for name, old in before.items():
        new = after.get(name)
        if old == new or torch.Size(old.shape).numel() < 2:
            continue
        if new is None:
            found[name] = "was removed"
        elif old.device != new.device:
            found[name] = f"was moved to {new.device}: what else changed was not observed"
        elif (old.shape, old.dtype) != (new.shape, new.dtype):
            found[name] = f"became {list(new.shape)} of {str(new.dtype).removeprefix('torch.')}"
        else:
            found[name] = "holds different bits, or in a different order"
    return found


def record_changes(model: torch.nn.Module, before: Mapping[str, ParameterSum]) -> None:
    """Keeps with ``model`` how it differs from its sums ``before``, and its sums at the start."""
    after = parameter_sums(model)
    model.__dict__[_CHANGES] = differences(before, after)
    model.__dict__.setdefault(_LOADED, after)


@torch.no_grad()
def since_loading(
    model: torch.nn.Module, read: Mapping[str, object] = MappingProxyType({})
) -> tuple[list[str], bool]:
    """Returns the parameters of more than one element that still have the bits with which the
    engine started, and whether any has others; nothing if the start was not observed. Those that
    lie on another device by now are left out.

    ``read`` is what a pass over the weights found in a parameter, and equal only for equal bits. A
    parameter is read a second time only if a few of its elements are as they were at the start,
    and no earlier pass found the same in it while it had the bits of the start.
    """
    loaded: dict[str, ParameterSum] | None = model.__dict__.get(_LOADED)
    if loaded is None:
        return [], False
    confirmed: dict[str, object] = model.__dict__.setdefault(_CONFIRMED, {})
    untouched, count = [], 0
    for name, held in _with_memory(model):
        before = loaded.get(name)
        if held.numel() < 2 or (before is not None and before.device != held.device.type):
            continue
        count += 1
        if before is None or not before.describes(held):
            continue
        known = name in read and confirmed.get(name) == read[name]
        if known or before.still_holds(held):
            untouched.append(name)
            if name in read:
                confirmed[name] = read[name]
    return untouched, len(untouched) < count


def observed(
    original: Callable[..., None], model: torch.nn.Module, *args: Any, **kwargs: Any
) -> None:
    """Calls ``original``, which prepares ``model`` for its kernels, and records what it changes."""
    before = parameter_sums(model)
    original(model, *args, **kwargs)
    record_changes(model, before)


def changes_after_loading(model: torch.nn.Module) -> dict[str, str] | None:
    """Returns the parameters of more than one element that the engine changed after loading, and
    how; None if that was not observed."""
    changes: dict[str, str] | None = model.__dict__.get(_CHANGES)
    return changes


def _sum_of(tensor: torch.Tensor) -> int:
    """Sums modulo 2^64; on a CPU by the digest, which is faster. Copies what is not contiguous."""
    bits = tensor.contiguous().view(-1).view(CARRIER[tensor.element_size()])
    if tensor.device.type == "cpu":
        return digest_bits("", array_of(bits)).lane0
    return _sum_on_device(bits)


def _sample_of(tensor: torch.Tensor) -> int:
    """Sums the elements of the sample, wherever they lie."""
    if not tensor.numel():
        return 0
    bits = tensor.view(CARRIER[tensor.element_size()])
    places = torch.arange(min(_SAMPLED, tensor.numel()), device=tensor.device)
    places = places * _APART % tensor.numel()
    flat = bits.is_contiguous()
    found = bits.view(-1)[places] if flat else bits[torch.unravel_index(places, bits.shape)]
    return digest_bits("", array_of(found.cpu())).lane0


def _sum_on_device(bits: torch.Tensor) -> int:
    """Sums where the bits lie; allocates a few times `_CHUNK_ELEMENTS`."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, bits.numel(), _CHUNK_ELEMENTS):
        part = bits[first : first + _CHUNK_ELEMENTS].to(torch.int64)
        places = torch.arange(first, first + part.numel(), device=bits.device)
        total += ((part + 1) * ((places * _ODD) | 1)).sum()
    return int(total)
