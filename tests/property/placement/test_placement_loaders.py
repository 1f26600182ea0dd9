"""Random loaders: patching through the probed placement equals loading the new checkpoint."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders import bits_of, live_of, same_bits
from versions import checkpoint, first_version, next_version

from deltawire import codec
from deltawire.placement.placed import PlacedWeights
from deltawire.placement.placement import probe
from deltawire.wire.run import TensorSpec

KINDS = ["narrow", "select", "step", "permute", "reshape", "contiguous"]
KINDS += ["expand", "pad", "cat", "stack", "buffer", "chunk"]
WIRE = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}


def apply(step, tensor):
    """One thing that loaders do with a tensor."""
    kind, *rest = step
    if kind == "narrow":
        return tensor.narrow(*rest)
    if kind == "select":
        return tensor.select(*rest)
    if kind == "step":
        return tensor[:: rest[0]]
    if kind == "permute":
        return tensor.permute(*rest[0])
    if kind == "reshape":
        return tensor.reshape(rest[0])
    if kind == "contiguous":
        return tensor.contiguous()
    if kind == "expand":
        return tensor.unsqueeze(0).expand(rest[0], *tensor.shape)
    if kind == "pad":
        return torch.nn.functional.pad(tensor, rest[0])
    if kind == "cat":
        return torch.cat([tensor, tensor.narrow(0, 0, rest[0])])
    if kind == "stack":
        return torch.stack([tensor, tensor], dim=rest[0])
    if kind == "buffer":
        buffer = torch.zeros(tensor.shape[0] + 2, *tensor.shape[1:], dtype=tensor.dtype)
        buffer[1 : 1 + tensor.shape[0]] = tensor
        return buffer
    if kind == "to":
        return tensor.to(rest[0])
    assert kind == "chunk"
    return torch.chunk(tensor, 2, rest[0])[-1]


@st.composite
def steps_for(draw, shape, dtype):
    """A few steps that work on tensors of a shape, and the shape that they lead to."""
    tensor, steps = torch.zeros(shape, dtype=dtype), []
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(KINDS))
        dims = tensor.dim()
        dim = draw(st.integers(0, max(dims - 1, 0)))
        if dims == 0 and kind not in ("expand", "reshape", "contiguous"):
            continue
        if kind == "narrow":
            start = draw(st.integers(0, tensor.shape[dim] - 1))
            step = (kind, dim, start, draw(st.integers(1, tensor.shape[dim] - start)))
        elif kind == "select":
            step = (kind, dim, draw(st.integers(0, tensor.shape[dim] - 1)))
        elif kind == "step":
            step = (kind, draw(st.integers(1, 3)))
        elif kind == "permute":
            step = (kind, tuple(draw(st.permutations(range(dims)))))
        elif kind == "reshape":
            count = tensor.numel()
            first = draw(st.sampled_from([d for d in range(1, count + 1) if count % d == 0]))
            step = (kind, draw(st.sampled_from([(count,), (first, count // first)])))
        elif kind == "expand":
            step = (kind, draw(st.integers(1, 2)))
        elif kind == "pad":
            step = (kind, draw(st.sampled_from([(0, 1), (1, 0), (2, 1), (0, 0)])))
        elif kind == "cat":
            step = (kind, draw(st.integers(1, tensor.shape[0])))
        elif kind in ("stack", "chunk"):
            step = (kind, dim)
        else:
            step = (kind,)
        after = apply(step, tensor)
        if 0 < after.numel() <= 400:
            tensor = after
            steps.append(step)
    return steps, tuple(tensor.shape)


@st.composite
def programs(draw):
    """Checkpoint tensors, and copies of what is made of them to places in live tensors."""
    published, serving = draw(
        st.sampled_from(
            [
                (torch.bfloat16, torch.bfloat16),
                (torch.bfloat16, torch.float32),
                (torch.float32, torch.float32),
                (torch.float32, torch.bfloat16),
                (torch.bfloat16, torch.float16),
            ]
        )
    )
    sizes = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3).map(tuple)
    shapes = draw(st.lists(sizes, min_size=1, max_size=3))
    specs = [TensorSpec(f"t{i}", shape, WIRE[published]) for i, shape in enumerate(shapes)]
    copies = []
    for _ in range(draw(st.integers(1, 4))):
        number = draw(st.integers(0, len(specs) - 1))
        steps, shape = draw(steps_for(shapes[number], published))
        if draw(st.integers(0, 5)) == 0:
            steps = [*steps, ("to", serving)]
        order = tuple(draw(st.permutations(range(len(shape)))))
        place = draw(st.integers(0, 200))
        way = draw(st.sampled_from(["copy", "data", "set"]))
        copies.append((f"t{number}", steps, shape, order, place, way))
    return specs, serving, copies


class Engine(torch.nn.Module):
    def __init__(self, serving, copies):
        super().__init__()
        torch.manual_seed(1)
        self.copies = copies
        self.flat = torch.nn.Parameter(torch.randn(700).to(serving), requires_grad=False)
        self.other = torch.nn.Parameter(torch.randn(3, 5).to(serving), requires_grad=False)
        self.tied = self.flat

    def target(self, shape, order, place):
        """A view of live memory of this shape, its dimensions laid out in any order."""
        count = int(np.prod(shape, dtype=np.int64))
        laid = self.flat.data[place : place + count].view([shape[i] for i in order])
        return laid.permute([order.index(i) for i in range(len(order))])

    def load_weights(self, weights):
        for name, weight in weights:
            for wanted, steps, shape, order, place, way in self.copies:
                if wanted != name:
                    continue
                value = weight
                for step in steps:
                    value = apply(step, value)
                target = self.target(shape, order, place)
                if way == "copy":
                    target.copy_(value)
                elif way == "data":
                    target.data.copy_(value)
                else:
                    target[...] = value


def exact(specs, serving):
    """True if the published bits can be read back from the live ones."""
    return (specs[0].dtype, serving) in {
        ("BF16", torch.bfloat16), ("BF16", torch.float32), ("F32", torch.float32)
    }  # fmt: skip


def held_exactly(engine):
    return bits_of(engine)


def held_as_numbers(engine):
    """All NaNs alike: which one a rounding conversion makes depends on the kernel."""
    return {
        name: torch.where(tensor.isnan(), torch.nan, tensor.float()).view(torch.int32)
        for name, tensor in live_of(engine).items()
    }


@given(programs(), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_patching_equals_loading_for_random_loaders(program, seed):
    specs, serving, copies = program
    engine = Engine(serving, copies)
    untouched = bits_of(engine)
    held = held_exactly if exact(specs, serving) else held_as_numbers
    placement = probe(engine.load_weights, specs, live_of(engine))
    assert same_bits(untouched, bits_of(engine))
    rng = np.random.default_rng(seed)
    mirror = first_version(specs, rng)
    engine.load_weights(checkpoint(mirror, specs))
    loaded = held(engine)
    weights = PlacedWeights(placement, live_of(engine), load_weights=engine.load_weights)
    weights.adopt(mirror)
    assert weights.share == weights.attest() == mirror.digest
    newer, patches = next_version(mirror, specs, rng, density=0.4)
    weights.swap(weights.prepare(patches, mirror, 1, digest=newer.digest))
    assert weights.attest() == newer.digest
    swapped = held(engine)
    fresh = Engine(serving, copies)
    fresh.load_weights(checkpoint(newer, specs))
    if not placement.unplaced:
        assert same_bits(swapped, held(fresh))
    undo = {name: codec.diff(bits, mirror.tensors[name]) for name, bits in newer.tensors.items()}
    weights.swap(weights.prepare(undo, newer, 2, digest=mirror.digest))
    if not placement.unplaced:
        assert same_bits(loaded, held(engine))
