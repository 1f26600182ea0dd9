"""Versions of made-up weights, and the mirrors that hold them."""

import time

import numpy as np
import torch

from deltawire import codec
from deltawire.placement.layout import TORCH_DTYPES
from deltawire.sync.follow.mirror import Mirror, select, starts_of
from deltawire.wire.run import Run

SPECIAL = [0x7FC1, 0xFF81, 0x7F81, 0x8000, 0x0000, 0x7F80, 0xFF80, 0x0001, 0x8001]
"""bf16: NaNs quiet and signalling with payloads, −0, 0, ±∞ and subnormal numbers."""


def random_bits(spec, rng):
    """Any bits at all, a few special ones among them."""
    unsigned = codec.unsigned_of(spec.dtype)
    bits = np.frombuffer(rng.bytes(spec.count * unsigned.itemsize), unsigned).copy()
    if spec.dtype == "BF16" and spec.count:
        some = rng.integers(0, spec.count, 9)
        bits[some] = SPECIAL
    return bits


def first_version(specs, rng):
    tensors = {spec.name: random_bits(spec, rng) for spec in specs}
    return Mirror(tensors, 0, codec.digest_model(tensors))


def next_version(mirror, specs, rng, density=0.2):
    """A version in which about so many elements have changed, and the patches to it."""
    tensors, patches = {}, {}
    for spec in specs:
        old = mirror.tensors[spec.name]
        tensors[spec.name] = np.where(rng.random(old.size) < density, random_bits(spec, rng), old)
        patches[spec.name] = codec.diff(old, tensors[spec.name])
    return Mirror(tensors, mirror.version + 1, codec.digest_model(tensors)), patches


def checkpoint(mirror, specs):
    """Yields the tensors of this version's checkpoint, for a loader."""
    carriers = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
    for spec in specs:
        bits = mirror.tensors[spec.name].copy()
        tensor = torch.from_numpy(bits.view(carriers[bits.itemsize]))
        yield spec.name, tensor.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)


def part_of(mirror, specs, wanted, chunk=8):
    """The mirror of a rank that holds no more than what is ``wanted``."""
    run = Run(
        id="ab" * 16, name="r", created_at=time.time(), tensors=specs, digest="0" * 32, chunk=chunk
    )
    spans = select(run, wanted)
    tensors = {n: mirror.tensors[n][span.start : span.stop].copy() for n, span in spans.items()}
    part = Mirror(tensors, mirror.version, mirror.digest, starts_of(spans))
    part.held = part.compute_held()
    return part
