"""Digests live bits on a device without copying them, and selects the kernels of a device."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

from deltawire import codec
from deltawire.codec import Digest
from deltawire.codec.digest import STEP
from deltawire.errors import CorruptError
from deltawire.placement.affine import AffineMap
from deltawire.placement.elements import chunks
from deltawire.placement.kernels import Kernels, signed
from deltawire.placement.placement import Region

_LOW = 0xFFFFFFFF


@cache
def kernels_of(device: torch.device) -> Kernels | None:
    """Returns Triton's kernels where Triton runs."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from deltawire.placement import triton_kernels

    return triton_kernels.TritonKernels()


def on_host(tensor: Tensor) -> bool:
    """Returns whether NumPy and the native kernels can access a tensor."""
    return tensor.device.type == "cpu"


class LiveDigest:
    """The digest of live bits on one device, synchronized once, at the end."""

    SLOTS = 64
    """The number of partial sums, so that atomic additions are spread over several addresses."""

    def __init__(self, device: torch.device, regions: int, kernels: Kernels | None) -> None:
        self._kernels = kernels
        self._names: list[str] = []
        self._lanes = torch.zeros((2, self.SLOTS), dtype=torch.int64, device=device)
        self._odd = torch.zeros(regions, dtype=torch.int32, device=device)

    def add(self, name: str, region: Region, flat: Tensor) -> None:
        """Adds the elements of an exact region of ``flat``, its storage's integers."""
        odd = self._odd[len(self._names) : len(self._names) + 1]
        self._names.append(name)
        if self._kernels is not None and (region.widened or len(region.dtypes) == 1):
            done = [
                self._kernels.digest(
                    flat,
                    part,
                    codec.tensor_key(name),
                    widened=region.widened,
                    lanes=self._lanes,
                    odd=odd,
                )
                for part in chunks(region.map, self._kernels.LARGEST)
            ]
            if all(done):
                return
        for part in chunks(region.map):
            self._add_by_torch(name, region, part, flat, odd)

    def _add_by_torch(
        self, name: str, region: Region, part: AffineMap, flat: Tensor, odd: Tensor
    ) -> None:
        view = flat.as_strided(part.shape, part.target_strides, part.target)
        bits = view.reshape(-1).to(torch.int64)
        if region.widened:
            odd |= (bits & 0xFFFF).any().to(torch.int32)
            bits = bits >> 16
        elif region.dtypes == ("F16", "F32"):
            halves = bits.to(torch.int32).view(torch.float32).to(torch.float16)
            again = halves.to(torch.float32).view(torch.int32)
            odd |= (again != bits.to(torch.int32)).any().to(torch.int32)
            bits = halves.view(torch.int16).to(torch.int64)
        width = 8 * codec.ITEMSIZE[region.dtypes[0]]
        positions = torch.full((1,), part.source, dtype=torch.int64, device=flat.device)
        for size, stride in zip(part.shape, part.source_strides, strict=True):
            steps = torch.arange(size, dtype=torch.int64, device=flat.device) * stride
            positions = (positions[:, None] + steps).view(-1)
        self._lanes[:, 0] += lanes_of(name, positions, bits, width)

    def total(self) -> Digest:
        """Returns the digest; raises `CorruptError` if some bits were never published."""
        lanes = self._lanes.sum(1).tolist()
        for name, odd in zip(self._names, self._odd.tolist(), strict=False):
            if odd:
                raise CorruptError(f"tensor {name} holds bits that were never published")
        return Digest(lanes[0] & (1 << 64) - 1, lanes[1] & (1 << 64) - 1)


def lanes_of(name: str, positions: Tensor, bits: Tensor, width: int) -> Tensor:
    """Digests elements of ``width`` bits at ``positions``, int64[N], with torch operations:
    int64[2].

    ``bits`` is int64[N]; bits above ``width`` are ignored.
    """
    if width == 64:
        positions = torch.stack([2 * positions, 2 * positions + 1], 1).view(-1)
        bits = torch.stack([bits, _shifted(bits, 32)], 1).view(-1)
    bits = bits & (_LOW if width >= 32 else (1 << width) - 1)
    words = (positions + 1) * signed(STEP) + signed(codec.tensor_key(name))
    low = words & _LOW
    product = (low ^ bits) * (_shifted(words, 32) | 1)
    folded = product ^ _shifted(product, 29)
    second = (folded & _LOW) * (_shifted(folded, 32) ^ low)
    return torch.stack([folded.sum(), second.sum()])


def _shifted(words: Tensor, by: int) -> Tensor:
    """Shifts int64 words right logically."""
    return (words >> by) & ((1 << (64 - by)) - 1)
