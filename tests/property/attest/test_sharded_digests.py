"""The digest of a model does not depend on how its tensors are divided, and equals a slow twin."""

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from deltawire import codec
from deltawire.attest.combining import combined
from deltawire.attest.parts import digest_part
from deltawire.attest.torch_tensors import held_parts
from deltawire.codec.reference import digest_bits_reference


@st.composite
def divided(draw):
    """A tensor, and for each dimension disjoint sets of indexes that cover it."""
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=0, max_size=4)))
    holders = [np.array(draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))) for n in shape]
    cuts = [[np.flatnonzero(held == part) for part in range(3)] for held in holders]
    dtype = draw(st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]))
    seed = draw(st.integers(0, 2**32 - 1))
    high = int(np.iinfo(dtype).max)
    bits = np.random.default_rng(seed).integers(0, high, shape, dtype=dtype, endpoint=True)
    return np.asarray(bits), cuts


@given(divided())
@settings(max_examples=60, deadline=None)
def test_parts_of_a_tensor_add_up_to_the_slow_twin(drawn):
    bits, cuts = drawn
    total = codec.ZERO
    for number in np.ndindex(*[3] * bits.ndim):
        indexes = [cut[one] for cut, one in zip(cuts, number, strict=True)]
        held = np.ascontiguousarray(bits[np.ix_(*indexes)] if indexes else bits).reshape(-1)
        total += digest_part("w", bits.shape, indexes, held)
    assert total == digest_bits_reference("w", np.ascontiguousarray(bits).reshape(-1))


LAYOUTS = [
    (Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Shard(1)),
    (Shard(1), Replicate()), (_StridedShard(0, split_factor=2), Shard(0)), (Shard(2), Shard(1)),
    (Replicate(), Replicate()), (_StridedShard(1, split_factor=2), Shard(1)),
]  # fmt: skip


def test_every_layout_of_four_ranks_gives_the_digest_of_the_whole():
    """With a group of torch that communicates nothing: what a rank holds is computed for each."""
    torch.manual_seed(0)
    tensors = {
        f"{number}.{'x'.join(map(str, shape))}": torch.randn(shape)
        for number in range(len(LAYOUTS))
        for shape in ((8, 4, 4), (7, 5, 3), (1, 6, 2))
    }
    parts = []
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (2, 2))
            held = {
                name: distribute_tensor(
                    one, mesh, LAYOUTS[int(name.split(".")[0])], src_data_rank=None
                )
                for name, one in tensors.items()
            }
            parts.append(held_parts({**held, "plain": torch.ones(3)}, dtype=None, merged=False)[0])
        finally:
            dist.destroy_process_group()
    whole = combined(held_parts({**tensors, "plain": torch.ones(3)}, dtype=None, merged=False)[0],
                     None)  # fmt: skip
    for found in on_ranks(lambda ranks: combined(parts[ranks.number], ranks), 4):
        assert found == whole
