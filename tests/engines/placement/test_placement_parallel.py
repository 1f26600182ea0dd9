"""Weights of a sharded engine, patched through a placement: equal to loading the new checkpoint."""

import numpy as np
import pytest
import torch
from devices import BACKENDS, take_for_device
from loaders import Sharded, bits_of, live_of, same_bits
from versions import checkpoint, first_version, next_version, part_of

from deltawire import codec
from deltawire.codec import Patch
from deltawire.errors import CorruptError, InputError, ResyncError
from deltawire.placement.placed import PlacedWeights
from deltawire.placement.placement import (
    assign_ownership,
    probe,
)

RANKS = [1, 2, 4]
KINDS = {
    "dense": {},
    "untied": {"tied": False},
    "experts": {"experts": True},
    "expert parallel": {"experts": True, "ep": True},
}


def table(kind):
    return Sharded.table(**{k: v for k, v in KINDS[kind].items() if k != "ep"})


def engines(kind, ranks, dtype=torch.bfloat16):
    torch.manual_seed(7)
    return [Sharded(rank, ranks, dtype=dtype, **KINDS[kind]) for rank in range(ranks)]


def placed(kind, ranks, dtype=torch.bfloat16):
    """Engines with version 0 loaded, each from a mirror of its part, and those mirrors."""
    specs, modules = table(kind), engines(kind, ranks, dtype)
    placements = assign_ownership([probe(m.load_weights, specs, live_of(m)) for m in modules])
    mirror = first_version(specs, np.random.default_rng(3))
    weights, parts = [], []
    for module, placement in zip(modules, placements, strict=True):
        weights.append(PlacedWeights(placement, live_of(module)))
        parts.append(part_of(mirror, specs, placement.wanted()))
        weights[-1].load(parts[-1])
    return specs, modules, weights, mirror, parts


def total(digests):
    return sum(digests, codec.ZERO)


def expected(kind, ranks, dtype, mirror, like):
    """The bits of engines freshly loaded with ``mirror``; buffers and padding as in ``like``."""
    fresh = engines(kind, ranks, dtype)
    for module, old in zip(fresh, like, strict=True):
        for name, tensor in live_of(old).items():
            live_of(module)[name].data.view(torch.uint8).copy_(tensor.data.view(torch.uint8))
        module.load_weights(checkpoint(mirror, table(kind)))
    return [bits_of(module) for module in fresh]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_patching_equals_loading_at_any_parallel_size(kind, ranks, dtype):
    specs, modules, weights, mirror, parts = placed(kind, ranks, dtype)
    for module in modules:
        for name in {"embed", "head"} & live_of(module).keys():
            first = min(module.rank * module.rows, module.VOCAB)
            live_of(module)[name].data[min(module.rows, module.VOCAB - first) :].fill_(0)
    assert total(w.share for w in weights) == mirror.digest
    rng = np.random.default_rng(4)
    for _ in range(3):
        mirror, patches = next_version(mirror, specs, rng)
        prepared = [
            w.prepare(patches, part, mirror.version) for w, part in zip(weights, parts, strict=True)
        ]
        assert total(p.share for p in prepared) == mirror.digest
        for w, p in zip(weights, prepared, strict=True):
            w.swap(p)
            assert (w.version, w.share, w.attest()) == (mirror.version, p.share, p.share)
        found = [bits_of(module) for module in modules]
        for one, other in zip(found, expected(kind, ranks, dtype, mirror, modules), strict=True):
            assert same_bits(one, other)
        parts = [part_of(mirror, specs, w.placement.wanted()) for w in weights]
        for w, part in zip(weights, parts, strict=True):
            w.verify(part)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_probing_changes_no_live_bit_and_places_everything(kind, ranks):
    specs = table(kind)
    for module in engines(kind, ranks):
        before = bits_of(module)
        placement = probe(module.load_weights, specs, live_of(module))
        assert same_bits(before, bits_of(module))
        assert not placement.unplaced
        assert placement.uncovered.keys() <= {"embed", "head", "frequencies"}
        held = sum(r.map.count for r in placement.regions) + sum(
            n for name, n in placement.uncovered.items() if name != "head" or kind == "untied"
        )
        live = {t.data_ptr(): t.numel() for t in live_of(module).values()}
        assert held == sum(live.values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_device_path_equals_the_host_path(dtype, backend, monkeypatch):
    specs, modules, weights, mirror, parts = placed("experts", 2, dtype)
    _, others, twins, _, _ = placed("experts", 2, dtype)
    patches = next_version(mirror, specs, np.random.default_rng(9))[1]
    for twin, other, w, module, part in zip(twins, others, weights, modules, parts, strict=True):
        w.swap(w.prepare(patches, part, 1))
        with monkeypatch.context() as patch:
            take_for_device(patch, backend)
            prepared = twin.prepare(patches, part, 1)
            old = other.norm.data.clone()
            other.norm.data.zero_()
            before = bits_of(other)
            with pytest.raises(ResyncError, match="differ from the mirror's"):
                twin.swap(prepared)
            assert same_bits(before, bits_of(other))
            carrier = {2: torch.int16, 4: torch.int32}[old.element_size()]
            other.norm.data.view(carrier).copy_(old.view(carrier))
            twin.swap(prepared)
            assert twin.attest() == w.attest() == w.share
        for name in ("qkv", "w13", "w2", "router", "out", "norm"):
            assert torch.equal(bits_of(module)[name], bits_of(other)[name])
    if dtype == torch.float32:
        others[0].norm.data.view(torch.int32)[0] |= 1
        take_for_device(monkeypatch, backend)
        with pytest.raises(CorruptError, match="never published"):
            twins[0].attest()


def test_ranks_hold_no_more_than_their_pieces():
    _, _, _, mirror, parts = placed("expert parallel", 4)
    held = [sum(bits.size for bits in part.tensors.values()) for part in parts]
    assert max(held) < 0.65 * sum(bits.size for bits in mirror.tensors.values())
    experts = [{n.split(".")[1] for n in p.tensors if n.startswith("experts")} for p in parts]
    assert experts == [{"0"}, {"1"}, {"2"}, {"3"}]


@pytest.mark.parametrize("ranks", RANKS)
def test_a_wrong_result_is_found_before_the_swap(ranks):
    specs, modules, weights, mirror, parts = placed("dense", ranks)
    before = [bits_of(module) for module in modules]
    newer, patches = next_version(mirror, specs, np.random.default_rng(5))
    wrong = Patch(patches["norm"].positions, patches["norm"].bits ^ np.uint16(1))
    prepared = [
        w.prepare({**patches, "norm": wrong}, part, 1)
        for w, part in zip(weights, parts, strict=True)
    ]
    assert total(p.share for p in prepared) != newer.digest
    if ranks == 1:
        with pytest.raises(ResyncError, match="digest would be"):
            weights[0].prepare({**patches, "norm": wrong}, parts[0], 1, digest=newer.digest)
    assert all(same_bits(a, bits_of(m)) for a, m in zip(before, modules, strict=True))


def test_one_flipped_live_bit_is_found_on_the_rank_that_holds_it():
    _, modules, weights, _, parts = placed("experts", 2)
    modules[1].w2.data.view(torch.int16)[2, 3, 1] ^= 64
    assert weights[0].attest() == weights[0].share
    assert weights[1].attest() != weights[1].share
    weights[0].verify(parts[0])
    with pytest.raises(CorruptError, match=r"experts\.2\.down"):
        weights[1].verify(parts[1])


def test_a_drifted_bit_under_a_patch_stops_the_swap_before_it_writes():
    specs, modules, weights, mirror, parts = placed("dense", 1)
    newer, patches = next_version(mirror, specs, np.random.default_rng(6), density=1.0)
    prepared = weights[0].prepare(patches, parts[0], 1, digest=newer.digest)
    modules[0].qkv.data.view(torch.int16)[0, 0] ^= 1
    before = bits_of(modules[0])
    with pytest.raises(ResyncError, match="differ from the mirror's"):
        weights[0].swap(prepared)
    assert same_bits(before, bits_of(modules[0]))
    assert weights[0].version == 0


def test_a_failure_while_scattering_restores_the_old_bits(monkeypatch):
    specs, modules, weights, mirror, parts = placed("experts", 1)
    newer, patches = next_version(mirror, specs, np.random.default_rng(8))
    prepared = weights[0].prepare(patches, parts[0], 1, digest=newer.digest)
    before = bits_of(modules[0])

    def break_down(move, begun):
        begun.append(move)
        for extent in move.ranges[: len(move.ranges) // 2]:
            own = slice(extent.first, extent.last)
            extent.live.index_copy_(0, move.index[own], move.new[own])
        assert not same_bits(before, bits_of(modules[0]))
        monkeypatch.undo()
        raise MemoryError("planted")

    monkeypatch.setattr(weights[0], "_apply", break_down)
    with pytest.raises(MemoryError):
        weights[0].swap(prepared)
    assert same_bits(before, bits_of(modules[0]))
    assert weights[0].version == 0
    weights[0].swap(prepared)
    assert weights[0].attest() == newer.digest


def test_a_placement_of_other_live_tensors_is_refused():
    module = engines("experts", 2)[1]
    placement = probe(module.load_weights, table("experts"), live_of(module))
    with pytest.raises(InputError, match="probe again"):
        PlacedWeights(placement, live_of(engines("experts", 4)[1]))
