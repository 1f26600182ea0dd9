"""Operations of loaders other than copying: placed where possible, and reported where not."""

import numpy as np
import pytest
import torch
from loaders import same_bits
from versions import checkpoint, first_version, next_version

from deltawire.errors import CorruptError, InputError, ResyncError
from deltawire.placement.layout import describe_live
from deltawire.placement.placed import PlacedWeights
from deltawire.placement.placement import assign_ownership, probe
from deltawire.wire.run import TensorSpec


class Engine:
    """Live tensors, and a loader that is a function of them, a name and a weight."""

    def __init__(self, load, **live):
        self.live = live
        self.load = load
        self.calls = 0

    def load_weights(self, weights):
        self.calls += 1
        for name, weight in weights:
            self.load(self.live, name, weight)

    def bits(self):
        return {k: v.contiguous().view(torch.int16).clone() for k, v in self.live.items()}


def bf16(*shape):
    return torch.arange(np.prod(shape, dtype=int)).to(torch.bfloat16).view(shape)


def specs_of(**shapes):
    return [TensorSpec(name, shape, "BF16") for name, shape in sorted(shapes.items())]


def probed(engine, specs):
    before = engine.bits()
    placement = probe(engine.load_weights, specs, engine.live)
    assert same_bits(before, engine.bits())
    return placement


def check_swaps(engine, fresh, specs, *, density=0.5):
    """Three versions through the placement equal a fresh engine that loads each; the placement."""
    placement = probed(engine, specs)
    weights = PlacedWeights(placement, engine.live, load_weights=engine.load_weights)
    rng = np.random.default_rng(0)
    mirror = first_version(specs, rng)
    weights.load(mirror)
    assert weights.share == mirror.digest
    for _ in range(3):
        newer, patches = next_version(mirror, specs, rng, density)
        weights.swap(weights.prepare(patches, mirror, newer.version, digest=newer.digest))
        mirror = newer
        assert weights.attest() == mirror.digest
        fresh.load_weights(checkpoint(mirror, specs))
        assert same_bits(engine.bits(), fresh.bits())
    return placement


def both(load, **shapes):
    return [Engine(load, **{n: bf16(*shape) for n, shape in shapes.items()}) for _ in range(2)]


def interleaved(live, name, weight):
    """Gate and up in alternate columns, as gpt-oss publishes them, halves of each for rank 1."""
    part = weight[:, :, 8:16].permute(0, 2, 1).contiguous()
    live["w13"].copy_(part)


def test_transposed_and_made_contiguous():
    engine, fresh = both(interleaved, w13=(3, 8, 5))
    placement = check_swaps(engine, fresh, specs_of(gate_up=(3, 5, 16)))
    assert not placement.unplaced
    assert not placement.uncovered


def test_every_other_column():
    def load(live, name, weight):
        live["gate"].copy_(weight[..., ::2])
        live["up"].copy_(weight[..., 1::2].t())

    engine, fresh = both(load, gate=(6, 4), up=(4, 6))
    placement = check_swaps(engine, fresh, specs_of(gate_up=(6, 8)))
    assert not placement.unplaced
    assert not placement.mirrored


def test_heads_taken_apart_and_joined():
    """The fused query, key, value of older families: a reshape that must copy, then a cat."""

    def load(live, name, weight):
        q, k, v = weight.view(4, 3, 2, 8).unbind(1)
        live["qkv"].data[...] = torch.cat([q.reshape(8, 8), k.reshape(8, 8), v.reshape(8, 8)])

    engine, fresh = both(load, qkv=(24, 8))
    assert not check_swaps(engine, fresh, specs_of(qkv=(24, 8))).unplaced


def test_padding_by_function_and_by_slices():
    def load(live, name, weight):
        live["padded"].copy_(torch.nn.functional.pad(weight, (0, 2, 1, 3)))
        live["sliced"].zero_()
        live["sliced"][1:4, :5] = weight

    engine, fresh = both(load, padded=(7, 7), sliced=(5, 6))
    placement = probed(engine, specs_of(w=(3, 5)))
    assert placement.uncovered == {"padded": 49 - 15, "sliced": 30 - 15}
    for one in (engine, fresh):
        one.load_weights(checkpoint(first_version(specs_of(w=(3, 5)), np.random.default_rng(1)),
                                    specs_of(w=(3, 5))))  # fmt: skip
    assert not check_swaps(engine, fresh, specs_of(w=(3, 5))).unplaced


def test_stacked_by_the_loader_when_the_last_expert_comes():
    held = {}

    def load(live, name, weight):
        held[name] = weight
        if len(held) == 3:
            live["experts"].copy_(torch.stack([held.pop(f"e{i}") for i in range(3)]))

    engine, fresh = both(load, experts=(3, 4, 4))
    placement = check_swaps(engine, fresh, specs_of(e0=(4, 4), e1=(4, 4), e2=(4, 4)))
    assert not placement.unplaced


def test_the_last_of_two_writes_counts():
    def load(live, name, weight):
        live["w"].copy_(weight)
        if name == "b":
            live["w"].fill_(1)
            live["w"][1:3].copy_(weight[1:3])

    engine, fresh = both(load, w=(4, 6))
    specs = specs_of(a=(4, 6), b=(4, 6))
    engine.load_weights(checkpoint(first_version(specs, np.random.default_rng(1)), specs))
    placement = check_swaps(engine, fresh, specs)
    assert placement.uncovered == {"w": 12}
    assert {placement.tensors[r.tensor].name for r in placement.regions} == {"b"}
    owned = assign_ownership([placement])[0]
    assert sum(np.prod(share.shape) for share in owned.mirrored) == 24 + 12


def test_a_scalar_read_by_value_is_found_where_it_was_filled_in():
    def load(live, name, weight):
        target = live[name]
        if weight.numel() == 1:
            target.data.fill_(weight.item())
        else:
            target.data.copy_(weight)

    engine, _ = both(load, scale=(1,), w=(3, 3))
    # A value of bf16 goes through a float and back, in which NaNs lose their payload.
    placement = probed(engine, specs_of(scale=(1,), w=(3, 3)))
    assert not placement.unplaced
    assert {placement.tensors[r.tensor].name for r in placement.regions} == {"scale", "w"}
    assert all(region.exact for region in placement.regions)


def test_a_broadcast_is_written_and_verified_everywhere():
    def load(live, name, weight):
        live["w"].copy_(weight.expand(5, 3))

    engine, fresh = both(load, w=(5, 3))
    specs = specs_of(row=(3,))
    placement = assign_ownership([check_swaps(engine, fresh, specs)])[0]
    counting = [r for r in placement.regions if r.counts]
    assert sum(r.map.count for r in counting) == 3
    weights = PlacedWeights(placement, engine.live)
    mirror = first_version(specs, np.random.default_rng(2))
    weights.load(mirror)
    engine.live["w"].view(torch.int16)[4, 1] ^= 2
    assert weights.attest() == mirror.digest  # That copy does not count …
    with pytest.raises(CorruptError, match="row"):
        weights.verify(mirror)  # … but is looked at.


def dequantised(live, name, weight):
    if name == "plain":
        live["plain"].copy_(weight)
    else:
        live["scaled"].copy_(weight.float() * 3)


def test_computed_tensors_go_through_the_loader():
    engine, fresh = both(dequantised, plain=(4, 4), scaled=(6, 2))
    specs = specs_of(plain=(4, 4), quantised=(6, 2))
    with pytest.raises(InputError, match=r"quantised needs the model's loader: .*aten.mul"):
        PlacedWeights(probed(engine, specs), engine.live)
    placement = probed(engine, specs)
    assert list(placement.unplaced) == ["quantised"]
    assert placement.uncovered == {"scaled": 12}
    weights = PlacedWeights(placement, engine.live, load_weights=engine.load_weights)
    rng = np.random.default_rng(0)
    mirror = first_version(specs, rng)
    weights.load(mirror)
    for _ in range(3):
        newer, patches = next_version(mirror, specs, rng)
        weights.swap(weights.prepare(patches, mirror, newer.version, digest=newer.digest))
        mirror = newer
        assert weights.attest() == mirror.digest
        fresh.load_weights(checkpoint(mirror, specs))
        for name, tensor in fresh.live.items():
            assert torch.equal(tensor.nan_to_num(7), engine.live[name].nan_to_num(7))


def test_a_loader_that_fails_in_the_middle_of_a_swap_gets_the_old_tensor_back():
    fail = []

    def load(live, name, weight):
        if fail and weight.device.type != "meta":
            live["scaled"].fill_(9)
            fail.pop()
            raise RuntimeError("planted")
        dequantised(live, name, weight)

    engine, _ = both(load, plain=(4, 4), scaled=(6, 2))
    specs = specs_of(plain=(4, 4), quantised=(6, 2))
    weights = PlacedWeights(probed(engine, specs), engine.live, load_weights=engine.load_weights)
    rng = np.random.default_rng(0)
    mirror = first_version(specs, rng)
    weights.load(mirror)
    before = engine.bits()
    newer, patches = next_version(mirror, specs, rng)
    prepared = weights.prepare(patches, mirror, 1, digest=newer.digest)
    fail.append(1)
    with pytest.raises(RuntimeError, match="planted"):
        weights.swap(prepared)
    assert same_bits(before, engine.bits())
    assert weights.version == 0


@pytest.mark.parametrize(
    "nasty",
    [
        lambda live, weight: live["w"].copy_(weight[torch.tensor([2, 0, 1])]),
        lambda live, weight: live["w"].index_copy_(0, torch.tensor([2, 0, 1]), weight),
        lambda live, weight: live["w"].copy_(weight.flip(0)),
        lambda live, weight: live["w"].add_(weight),
        lambda live, weight: live["w"].copy_(weight.view(torch.int16)),
        lambda live, weight: live["w"].copy_(torch.from_numpy(weight.float().numpy())),
        lambda live, weight: live["w"].copy_(weight if weight.sum() > 0 else -weight),
        lambda live, weight: torch.mul(weight, 2, out=live["w"]),
        lambda live, weight: live["w"].copy_(torch.tensor(weight.tolist())),
    ],
)  # fmt: skip
def test_nasty_loaders_are_found_out_and_touch_nothing(nasty):
    def load(live, name, weight):
        if name == "w":
            nasty(live, weight)
        else:
            live[name].copy_(weight)

    engine = Engine(load, w=bf16(3, 3), x=bf16(2))
    placement = probed(engine, specs_of(w=(3, 3), x=(2,)))
    assert list(placement.unplaced) == ["w"]
    assert placement.unplaced["w"]
    assert [placement.tensors[r.tensor].name for r in placement.regions] == ["x"]
    assert placement.uncovered == {"w": 9}


def test_loaders_that_fail_on_a_kind_of_tensor_are_not_run_once_for_each():
    def load(live, name, weight):
        if "scale" in name:
            weight.numpy()
        else:
            live["w"].copy_(weight)

    engine = Engine(load, w=bf16(3, 3))
    shapes = {f"layers.{i}.scale": (1,) for i in range(300)}
    placement = probed(engine, specs_of(w=(3, 3), **shapes))
    assert placement.unplaced.keys() == shapes.keys()
    assert engine.calls == 3


def test_a_loader_that_replaces_live_tensors_is_refused():
    def load(live, name, weight):
        live["w"].data = torch.zeros(3, 3, dtype=torch.bfloat16)

    engine = Engine(load, w=bf16(3, 3))
    before = engine.bits()
    with pytest.raises(InputError, match="replaces the live tensor w"):
        probe(engine.load_weights, specs_of(w=(3, 3)), engine.live)
    assert same_bits(before, engine.bits())


def test_a_loader_that_always_fails_is_an_error():
    def load(live, name, weight):
        raise KeyError("planted")

    def broken(weights):
        raise KeyError("planted")

    engine = Engine(load, w=bf16(3, 3))
    assert list(probed(engine, specs_of(w=(3, 3))).unplaced) == ["w"]
    with pytest.raises(InputError, match="planted"):
        probe(broken, specs_of(w=(3, 3)), engine.live)


def test_large_buffers_of_the_loaders_own_take_no_memory():
    shape = (1 << 16, 1 << 20)  # 128 GiB of bf16

    def load(live, name, weight):
        buffer = torch.empty(shape, dtype=torch.bfloat16)
        buffer.copy_(weight)
        live["w"].copy_(buffer[7:9, :3])

    engine = Engine(load, w=bf16(2, 3))
    placement = probed(engine, specs_of(w=shape))
    assert not placement.unplaced
    region = placement.regions[0]
    assert (region.map.source, region.map.source_strides) == (7 << 20, (1 << 20, 1))


def test_several_storages_views_and_tied_names():
    memory = bf16(64)
    live = {"a": memory[:16].view(4, 4), "b": memory[32:48].view(4, 4).t(), "tied": memory[:16]}

    def load(live, name, weight):
        live[name].copy_(weight)

    engine, fresh = Engine(load, **live), Engine(load)
    other = memory.clone()
    fresh.live = {"a": other[:16].view(4, 4), "b": other[32:48].view(4, 4).t(), "tied": other[:16]}
    storages, tensors, _ = describe_live(live)
    assert [s.elements for s in storages] == [64]
    assert [(t.name, t.offset) for t in tensors] == [("a", 0), ("b", 32), ("tied", 0)]
    placement = check_swaps(engine, fresh, specs_of(a=(4, 4), b=(4, 4)))
    assert not placement.unplaced
    assert not placement.uncovered


def test_overlapping_memories_are_refused():
    data = np.zeros(64, np.int16)
    live = {"a": torch.from_numpy(data[:40]), "b": torch.from_numpy(data[20:])}
    with pytest.raises(InputError, match="a and b overlap"):
        describe_live(live)


def test_a_copy_over_something_computed_is_refused():
    def load(live, name, weight):
        if name == "z":
            live["w"].copy_(weight * 2)
        else:
            live["w"][0].copy_(weight)

    engine = Engine(load, w=bf16(3, 3))
    specs = [TensorSpec("z", (3, 3), "BF16"), TensorSpec("a", (3,), "BF16")]
    with pytest.raises(InputError, match="computes with z and copies over it in w"):
        probe(engine.load_weights, specs, engine.live)
    assert list(probe(engine.load_weights, specs[::-1], engine.live).unplaced) == ["z"]


def test_mirrors_that_lack_something_are_refused():
    engine, _ = both(lambda live, name, weight: live["w"].copy_(weight), w=(3, 3))
    specs = specs_of(w=(3, 3))
    weights = PlacedWeights(probed(engine, specs), engine.live)
    mirror = first_version(specs, np.random.default_rng(0))
    newer, patches = next_version(mirror, specs, np.random.default_rng(1))
    with pytest.raises(ResyncError, match="live weights are at version -1"):
        weights.prepare(patches, mirror, 1)
    weights.load(mirror)
    with pytest.raises(ResyncError, match="the mirror at 1"):
        weights.prepare(patches, newer, 2)
    prepared = weights.prepare(patches, mirror, 1)
    weights.swap(prepared)
    with pytest.raises(ResyncError, match="prepared for version 0"):
        weights.swap(prepared)
    mirror.tensors = {}
    for lacking in (weights.load, weights.verify):
        with pytest.raises(InputError, match="does not hold"):
            lacking(mirror)


def followed(engine, specs, aliases):
    """Two versions through a placement with aliases; the last one."""
    placement = probe(engine.load_weights, specs, engine.live, aliases=aliases)
    assert [spec.name for spec in placement.tensors] == [spec.name for spec in specs]
    assert placement.uncovered == placement.unplaced == {}
    weights = PlacedWeights(placement, engine.live)
    rng = np.random.default_rng(0)
    mirror = first_version(specs, rng)
    weights.load(mirror)
    newer, patches = next_version(mirror, specs, rng, 0.5)
    weights.swap(weights.prepare(patches, mirror, newer.version, digest=newer.digest))
    assert weights.attest() == newer.digest
    return newer


@pytest.mark.parametrize("unknown", ["skipped", "refused"])
def test_an_engine_that_knows_a_tied_tensor_by_its_alias_is_loaded(unknown):
    """As vLLM, which leaves the head of a tied model out."""

    def load(live, name, weight):
        if name == "head" and unknown == "refused":
            raise KeyError(name)
        if name != "head":
            live[name].copy_(weight)

    engine = Engine(load, embed=bf16(6, 4), norm=bf16(4))
    mirror = followed(engine, specs_of(head=(6, 4), norm=(4,)), {"embed": "head"})
    live = engine.bits()["embed"].numpy().reshape(-1)
    assert (live == mirror.tensors["head"].view(np.int16)).all()


def test_an_engine_that_holds_a_tied_tensor_twice_gets_both():
    def load(live, name, weight):
        live[name].copy_(weight)

    engine = Engine(load, embed=bf16(6, 4), head=bf16(6, 4))
    mirror = followed(engine, specs_of(head=(6, 4)), {"embed": "head"})
    for name in ("embed", "head"):
        live = engine.bits()[name].numpy().reshape(-1)
        assert (live == mirror.tensors["head"].view(np.int16)).all()


def test_an_alias_that_the_engine_does_not_know_changes_nothing():
    def load(live, name, weight):
        live[name].copy_(weight)  # A name that is unknown is a KeyError.

    engine = Engine(load, head=bf16(6, 4))
    followed(engine, specs_of(head=(6, 4)), {"embed": "head"})
