"""Tensors that an engine stores multiplied by a constant are written, undone and compared so."""

import msgspec
import numpy as np
import pytest
import torch

from deltawire import codec
from deltawire.codec import Patch
from deltawire.errors import CorruptError
from deltawire.placement.elements import encode_bits
from deltawire.placement.placed import PlacedWeights
from deltawire.placement.placement import probe
from deltawire.sync.follow.mirror import Mirror
from deltawire.wire.run import TensorSpec

SPECS = [TensorSpec("a", (3, 8), "BF16"), TensorSpec("b", (8, 3), "BF16")]
SCALE = 0.3


def opened(dtype):
    """A slot of two stacks, padded, whose second factor is stored multiplied."""
    live = {"a": torch.zeros(4, 8, dtype=dtype), "b": torch.zeros(8, 4, dtype=dtype)}

    def load(weights):
        for name, tensor in weights:
            live[name][: tensor.shape[0], : tensor.shape[1]].copy_(tensor)

    placement = probe(load, SPECS, live)
    regions = [
        msgspec.structs.replace(region, scale=SCALE if region.tensor == 1 else 1.0)
        for region in placement.regions
    ]
    drawn = torch.randn(2, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    bits = {
        name: drawn[number].view(torch.int16).numpy().view(np.uint16).copy()
        for number, name in enumerate("ab")
    }
    digest = codec.ZERO
    for name, held in bits.items():
        digest += codec.digest_bits(name, held)
    mirror = Mirror(bits, version=0, digest=digest)
    weights = PlacedWeights(msgspec.structs.replace(placement, regions=regions), live)
    weights.load(mirror)
    return live, mirror, weights


def expected(mirror, dtype):
    published = torch.from_numpy(mirror.tensors["b"].view(np.int16)).view(torch.bfloat16)
    second = published.to(dtype)
    second *= SCALE  # As vLLM multiplies, in place and in the slot's dtype.
    return second.view(8, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_loaded_tensor_holds_the_multiplied_values(dtype):
    live, mirror, weights = opened(dtype)
    assert torch.equal(live["b"][:, :3], expected(mirror, dtype))
    assert not live["b"][:, 3].any()
    assert weights.attest() == weights.share == mirror.digest
    assert weights.count_nonzero("a") == 24


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_swap_writes_the_multiplied_values_and_attests(dtype):
    live, mirror, weights = opened(dtype)
    positions = np.array([0, 5, 23], np.int64)
    patch = Patch(positions, np.array([0x3F80, 0xC000, 0x0001], np.uint16))
    change = codec.digest_patch("b", patch, mirror.tensors["b"][positions])
    prepared = weights.prepare({"b": patch}, mirror, 1, digest=mirror.digest + change)
    before = live["b"].clone()
    weights.swap(prepared)
    assert weights.attest() == mirror.digest + change
    mirror.tensors["b"][positions] = patch.bits
    assert torch.equal(live["b"][:, :3], expected(mirror, dtype))
    assert int((live["b"] != before).sum()) == 3


def test_one_changed_bit_of_a_multiplied_tensor_is_found():
    live, mirror, weights = opened(torch.bfloat16)
    live["b"].view(torch.int16)[2, 1] ^= 1
    with pytest.raises(CorruptError, match="weights of b differ"):
        weights.verify(mirror)


def test_without_a_scale_bits_are_copied():
    bits = np.array([0x7FC1, 0x0001], np.uint16)
    assert encode_bits(bits, ("BF16",)) is bits
    assert encode_bits(bits[1:], ("BF16",), 2.0).tolist() == [2]
