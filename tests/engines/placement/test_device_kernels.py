"""Live bits on a device: exchanged all or none, digested in place, equal to the slow reference.

Each test runs with torch only and with Triton's kernels, which the CPU interprets.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from devices import BACKENDS, DEVICE, kernels_named
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders import Sharded, bits_of, live_of, same_bits
from versions import first_version, next_version

from deltawire import codec
from deltawire.codec.reference import digest_bits_reference
from deltawire.errors import CorruptError, ResyncError
from deltawire.placement.affine import AffineMap
from deltawire.placement.elements import CARRIER, positions_of
from deltawire.placement.kernels import Found
from deltawire.placement.moves import DRIFTED, LOST, OUTSIDE, stage
from deltawire.placement.on_device import LiveDigest, lanes_of
from deltawire.placement.placed import PlacedWeights
from deltawire.placement.placement import Region, probe

backends = pytest.mark.parametrize("backend", BACKENDS)

DTYPES = {1: "U8", 2: "BF16", 4: "F32", 8: "I64"}
NUMPY = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def storages(rng, width, sizes):
    bits = [np.frombuffer(rng.bytes(size * width), NUMPY[width]).copy() for size in sizes]
    kind = {1: np.uint8}.get(width) or np.dtype(f"i{width}")
    return bits, [torch.from_numpy(b.view(kind).copy()).to(DEVICE) for b in bits]


def host_bits(flats, width):
    return [flat.cpu().numpy().view(NUMPY[width]) for flat in flats]


def changes(rng, bits, share):
    """In each storage, in two parts as two regions give them; and what it is to become."""
    parts, expected = [], []
    for held in bits:
        index = np.flatnonzero(rng.random(held.size) < share)
        new = np.frombuffer(rng.bytes(index.nbytes), held.dtype)[: index.size]
        cut = index.size // 3
        pieces = [
            (index[cut:], held[index[cut:]], new[cut:]),
            (index[:cut], held[index[:cut]], new[:cut]),
        ]
        parts.append([piece for piece in pieces if piece[0].size])
        after = held.copy()
        after[index] = new
        expected.append(after)
    return parts, expected


def staged(backend, parts, flats):
    names = [f"storage {number}" for number in range(len(flats))]
    kernels = kernels_named(backend)
    moves = stage(parts, names, flats, kernels=kernels)
    if backend == "torch" and DEVICE == "cpu":
        for move in moves:  # Which takes torch's way, not the host's.
            assert move.kernels is None
    return moves


def exchange(backend, move):
    if backend == "torch" and DEVICE == "cpu":
        fault = move._exchange_by_torch()
        if fault:
            raise ResyncError(fault)
    else:
        move.exchange()


@backends
@given(
    st.integers(0, 1 << 30),
    st.sampled_from([1, 2, 4, 8]),
    st.lists(st.integers(1, 6000), min_size=1, max_size=4),
    st.floats(0.001, 1),
)
@settings(deadline=None, max_examples=25)
def test_an_exchange_equals_assignment_and_can_be_undone(backend, seed, width, sizes, share):
    rng = np.random.default_rng(seed)
    bits, flats = storages(rng, width, sizes)
    parts, expected = changes(rng, bits, share)
    count = sum(part[0].size for storage in parts for part in storage)
    moves = staged(backend, parts, flats)
    assert sum(move.changes for move in moves) == count
    for move in moves:
        exchange(backend, move)
    for held, wanted in zip(host_bits(flats, width), expected, strict=True):
        assert np.array_equal(held, wanted)
    for move in moves:
        exchange(backend, move.reversed())
    for held, wanted in zip(host_bits(flats, width), bits, strict=True):
        assert np.array_equal(held, wanted)


@backends
@given(st.integers(0, 1 << 30), st.sampled_from([1, 2, 4, 8]))
@settings(deadline=None, max_examples=15)
def test_a_drifted_bit_anywhere_leaves_every_storage_as_it_was(backend, seed, width):
    rng = np.random.default_rng(seed)
    bits, flats = storages(rng, width, [300, 5000, 7])
    parts, _ = changes(rng, bits, 0.7)
    number = int(rng.integers(len(flats)))
    if not parts[number]:
        return
    place = int(rng.choice(parts[number][0][0]))
    moves = staged(backend, parts, flats)
    flats[number][place] ^= 1 << int(rng.integers(7))
    before = [flat.clone() for flat in flats]
    together = [
        move for move in moves if len(move.ranges) > 1 or move.ranges[0].live is flats[number]
    ]
    for move in together:
        with pytest.raises(ResyncError, match=DRIFTED):
            exchange(backend, move)
    assert all(torch.equal(*pair) for pair in zip(before, flats, strict=True))


@backends
def test_bits_that_do_not_persist_are_restored(backend, monkeypatch):
    rng = np.random.default_rng(1)
    bits, flats = storages(rng, 2, [4000])
    parts, _ = changes(rng, bits, 0.5)
    (move,) = staged(backend, parts, flats)
    if backend == "torch":
        answers = iter([False, True])
        monkeypatch.setattr("deltawire.placement.moves._differ", lambda pairs: next(answers))
        assert move._exchange_by_torch() == LOST
    else:
        original = move.kernels.exchange
        kernels = type(move.kernels)
        monkeypatch.setattr(
            kernels,
            "exchange",
            lambda self, *given: original(*given) and Found(False, False, True),
        )
        with pytest.raises(ResyncError, match=LOST):
            move.exchange()
    assert np.array_equal(host_bits(flats, 2)[0], bits[0])


@backends
def test_kernels_write_nothing_outside_of_a_storage(backend):
    kernels = kernels_named(backend)
    if kernels is None:
        pytest.skip("torch checks its indices itself")
    whole = torch.zeros(100, dtype=torch.int16, device=DEVICE)
    flat = whole[:50]
    for wrong in (50, 99, -1):
        part = (np.array([3, wrong]), np.zeros(2, np.uint16), np.ones(2, np.uint16))
        (move,) = stage([[part]], ["weights"], [flat], kernels=kernels)
        with pytest.raises(ResyncError, match=OUTSIDE):
            move.exchange()
        assert not whole.any()


@st.composite
def maps(draw):
    """Nested sources and any targets, in a storage large enough."""
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)))
    source, sources = draw(st.integers(1, 3)), []
    for size in reversed(shape):
        sources.append(source)
        source *= size * draw(st.integers(1, 2))
    order = draw(st.permutations(range(len(shape))))
    targets, step = [0] * len(shape), draw(st.integers(1, 2))
    for axis in order:
        targets[axis] = step
        step *= shape[axis]
    start, target = draw(st.integers(0, 1 << 33)), draw(st.integers(0, 9))
    return AffineMap(start, target, shape, tuple(reversed(sources)), tuple(targets))


@backends
@given(
    maps(),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(["", "BF16", "F16"]),
    st.integers(0, 1 << 30),
)
@settings(deadline=None, max_examples=40)
def test_a_digest_on_the_device_is_the_reference(backend, found, width, widened, seed):
    if found.count > 20_000:
        return
    widened = widened if width == 4 else ""
    rng = np.random.default_rng(seed)
    size = found.target_extent + found.target
    (bits,), (flat,) = storages(rng, width, [size])
    if widened:
        bits &= np.uint32(0xFFFF0000)
        if widened == "F16":
            halves = rng.integers(0, 0x7C00, bits.size, np.uint16)
            bits[:] = halves.view(np.float16).astype(np.float32).view(np.uint32)
        flat.copy_(torch.from_numpy(bits.view(np.int32)))
    dtypes = (widened, "F32") if widened else (DTYPES[width],)
    view = np.lib.stride_tricks.as_strided(
        bits[found.target :], found.shape, tuple(s * width for s in found.target_strides)
    ).reshape(-1)
    published = (view >> np.uint32(16)).astype(np.uint16) if widened == "BF16" else view
    if widened == "F16":
        published = view.view(np.float32).astype(np.float16).view(np.uint16)
    expected = codec.ZERO
    for position, bit in zip(positions_of(found).tolist(), published, strict=True):
        expected += digest_bits_reference("t", np.array([bit]), position)
    digest = LiveDigest(flat.device, 3, kernels_named(backend))
    digest.add("t", Region(0, 0, found, dtypes), flat)
    assert digest.total() == expected
    digest.add("t", Region(0, 0, found, dtypes), flat)
    assert digest.total() == expected + expected
    if widened:
        flat[found.target] |= 1
        digest.add("of the third", Region(0, 0, found, dtypes), flat)
        with pytest.raises(CorruptError, match="of the third holds bits that were never published"):
            digest.total()


@backends
@given(st.sampled_from([8, 16, 32, 64]), st.integers(1, 300), st.integers(0, 1 << 40))
@settings(deadline=None)
def test_torchs_lanes_ignore_what_lies_above_the_width(backend, width, count, start):
    bits = np.frombuffer(np.random.default_rng(count).bytes(count * 8), np.int64)
    words = bits.view(np.uint64).astype(f"u{width // 8}")
    lanes = lanes_of("t", torch.arange(start, start + count), torch.from_numpy(bits.copy()), width)
    found = [lane & (1 << 64) - 1 for lane in lanes.tolist()]
    assert codec.Digest(*found) == digest_bits_reference("t", words, start)


@backends
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("experts", [False, True])
def test_a_module_on_the_gpu_follows_as_one_on_the_host(backend, dtype, experts, monkeypatch):
    kernels = kernels_named(backend)
    for place in ("placed", "moves"):
        monkeypatch.setattr(
            f"deltawire.placement.{place}.kernels_of",
            lambda device: kernels if torch.device(device).type == DEVICE else None,
        )
    specs = Sharded.table(experts=experts)
    there, here = (
        Sharded(0, 1, dtype=dtype, experts=experts).to(device) for device in (DEVICE, "cpu")
    )
    rng = np.random.default_rng(0)
    mirror = first_version(specs, rng)
    pairs = []
    for module in (there, here):
        for tensor in live_of(module).values():
            tensor.data.zero_()
        weights = PlacedWeights(probe(module.load_weights, specs, live_of(module)), live_of(module))
        weights.load(mirror)
        pairs.append((module, weights))
    for _ in range(4):
        newer, patches = next_version(mirror, specs, rng)
        for _, weights in pairs:
            weights.swap(weights.prepare(patches, mirror, newer.version, digest=newer.digest))
            assert weights.attest() == newer.digest
            weights.verify(newer)
        mirror = newer
        moved = {name: tensor.cpu() for name, tensor in bits_of(there).items()}
        assert same_bits(moved, bits_of(here))


@backends
def test_carriers_have_kernels(backend):
    kernels = kernels_named(backend)
    for width, carrier in CARRIER.items():
        flat = torch.zeros(5, dtype=carrier, device=DEVICE)
        part = (np.array([1]), np.zeros(1, NUMPY[width]), np.ones(1, NUMPY[width]))
        (move,) = stage([[part]], ["w"], [flat], kernels=kernels)
        move.exchange()
        assert flat.tolist() == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.drills), 90])
def test_every_kernel_compiles_for_gpus_that_are_not_here(capability, tmp_path):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).parents[2] / "support/compile_kernels.py"
    done = subprocess.run(
        [sys.executable, script, str(capability)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["kernel"] for one in made} == {"_check", "_write", "_digest"}
    assert all(one["bytes"] > 1000 and not one["spills"] for one in made)
