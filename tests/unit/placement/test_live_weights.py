"""Patches of live parameters equal loading the target, or change nothing."""

import contextlib

import numpy as np
import pytest
import torch

from deltawire import codec
from deltawire.codec import Patch
from deltawire.errors import CorruptError, InputError, ResyncError
from deltawire.export.cast import CastWeights, cast
from deltawire.placement.live import LiveWeights
from deltawire.sync.follow.mirror import Mirror
from deltawire.wire.run import TensorSpec

SPECIAL = {
    "BF16": [0x7FC1, 0xFF81, 0x7F81, 0x8000, 0x0000, 0x7F80, 0xFF80, 0x0001, 0x8001],
    "F16": [0x8000, 0x0000, 0x7C00, 0xFC00, 0x0001, 0x8001, 0x03FF, 0x7BFF],
    "F32": [0x7FC00001, 0xFF800001, 0x80000000, 0, 0x7F800000, 0xFF800000, 1, 0x80000001],
}
"""NaNs quiet and signalling with payloads, −0, 0, ±∞ and subnormal numbers. No exporter publishes
NaNs of float16."""

SERVED = [
    ("BF16", torch.bfloat16), ("BF16", torch.float32), ("F16", torch.float32),
    ("F32", torch.float32),
]  # fmt: skip
UNUSED = {"BF16": 16, "F16": 13}
"""Bits of float32 that are zero in every widened number; of float16, in a normal one."""


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(13, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.head = torch.nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight


def random_bits(specs, rng):
    """Any bits at all for every tensor, the special ones in front."""
    found = {}
    for spec in specs:
        unsigned = codec.unsigned_of(spec.dtype)
        bits = np.frombuffer(rng.bytes(spec.count * unsigned.itemsize), unsigned).copy()
        special = rng.permutation(SPECIAL[spec.dtype])[: spec.count]
        bits[: special.size] = special
        if spec.dtype == "F16":
            bits[(bits & 0x7C00) == 0x7C00] &= 0xFC00  # Infinite instead of NaN.
        found[spec.name] = bits
    return found


def expected_parameter(bits, spec, serving):
    """The parameter that holds these published bits, by way of 32 bits."""
    wide = bits.astype(np.uint32) << 16 if spec.dtype == "BF16" else bits
    if spec.dtype == "F16":
        wide = bits.view(np.float16).astype(np.float32)
    if serving == torch.bfloat16:
        return bits.view(np.int16)
    return wide.view(np.int32)


def held(model):
    carriers = {2: torch.int16, 4: torch.int32}
    return {
        name: p.detach().view(carriers[p.element_size()]).flatten().numpy().copy()
        for name, p in model.named_parameters()
    }


def same(left, right):
    return left.keys() == right.keys() and all(np.array_equal(left[k], right[k]) for k in left)


def served(dtype, serving, seed=0):
    model = Tied().to(serving)
    specs = CastWeights(model, dtype).specs()
    bits = random_bits(specs, np.random.default_rng(seed))
    live = LiveWeights(model, specs)
    live.load(mirror_of(bits, version=3))
    return model, specs, bits, live


def mirror_of(bits, version):
    return Mirror({n: b.copy() for n, b in bits.items()}, version, codec.digest_model(bits))


def follow(live, bits):
    """Advance the mirror after the weights, as a subscriber does."""
    for name, new in bits.items():
        live._mirror.tensors[name][:] = new
    live._mirror.finish(live.version, live.digest, None)


def diff(old, new):
    return {name: codec.diff(old[name], new[name]) for name in old}


def test_tied_weights_are_listed_once():
    specs = CastWeights(Tied(), "BF16").specs()
    assert [spec.name for spec in specs] == ["embed.weight", "norm.bias", "norm.weight"]
    assert specs[0].shape == (13, 6)


@pytest.mark.parametrize(("dtype", "serving"), SERVED)
def test_load_holds_the_published_bits(dtype, serving):
    model, specs, bits, live = served(dtype, serving)
    expected = {s.name: expected_parameter(bits[s.name], s, serving) for s in specs}
    assert same(held(model), expected)
    assert live.attest() == codec.digest_model(bits) == live.digest


@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 1.0])
@pytest.mark.parametrize(("dtype", "serving"), SERVED)
def test_swaps_equal_loading_the_target(dtype, serving, density):
    model, specs, bits, live = served(dtype, serving)
    rng = np.random.default_rng(1)
    for version in range(4, 8):
        target = {}
        for name, new in random_bits(specs, rng).items():
            target[name] = np.where(rng.random(new.size) < density, new, bits[name])
        live.swap(diff(bits, target), version, codec.digest_model(target))
        follow(live, target)
        other = Tied().to(serving)
        LiveWeights(other, specs).load(mirror_of(target, version))
        assert same(held(model), held(other))
        assert live.attest() == live.digest == codec.digest_model(target)
        assert live.version == version
        bits = target


@pytest.mark.parametrize("special", range(8))
@pytest.mark.parametrize(("dtype", "serving"), SERVED)
def test_special_values_go_both_ways(dtype, serving, special):
    model, specs, bits, live = served(dtype, serving)
    target = {name: array.copy() for name, array in bits.items()}
    target["norm.weight"][:] = SPECIAL[dtype][special]
    live.swap(diff(bits, target), 4, codec.digest_model(target))
    spec = next(spec for spec in specs if spec.name == "norm.weight")
    expected = expected_parameter(target["norm.weight"], spec, serving)
    assert np.array_equal(held(model)["norm.weight"], expected)
    follow(live, target)
    live.swap(diff(target, bits), 5, codec.digest_model(bits))
    assert live.attest() == codec.digest_model(bits)


@pytest.mark.parametrize(("dtype", "serving"), SERVED)
def test_a_wrong_digest_keeps_the_old_bits(dtype, serving):
    model, specs, bits, live = served(dtype, serving)
    before = held(model)
    target = random_bits(specs, np.random.default_rng(2))
    wrong = codec.digest_model(target) + codec.Digest(1, 0)
    with pytest.raises(ResyncError, match=f"not {wrong.hex()}"):
        live.swap(diff(bits, target), 4, wrong)
    assert same(held(model), before)
    assert (live.version, live.digest) == (3, codec.digest_model(bits))
    live.swap(diff(bits, target), 4, codec.digest_model(target))
    assert live.attest() == codec.digest_model(target)


@pytest.mark.parametrize(("dtype", "serving"), SERVED)
def test_a_patch_that_cannot_be_written_changes_nothing(dtype, serving):
    model, specs, bits, live = served(dtype, serving)
    before = held(model)
    target = random_bits(specs, np.random.default_rng(2))
    patches = diff(bits, target)
    patches["norm.weight"] = Patch(np.array([0, 600]), patches["norm.weight"].bits[:2].copy())
    with pytest.raises(ResyncError):
        live.swap(patches, 4, codec.digest_model(target))
    assert same(held(model), before)
    assert live.attest() == codec.digest_model(bits)


@pytest.mark.parametrize(("dtype", "serving"), SERVED)
def test_attest_finds_every_single_flipped_bit(dtype, serving):
    model, _, bits, live = served(dtype, serving)
    width = 8 * torch.empty(0, dtype=serving).element_size()
    words = model.embed.weight.detach().view({16: torch.int16, 32: torch.int32}[width])
    for bit in range(width):
        flip = 1 << bit if bit < width - 1 else -(1 << bit)
        words[7, 2] ^= flip
        if width == 32 and bit < UNUSED.get(dtype, 0):
            with pytest.raises(CorruptError, match="never published"):
                live.attest()
        elif dtype == "F16":  # Some exponents are beyond float16.
            with contextlib.suppress(CorruptError):
                assert live.attest() != live.digest
        else:
            assert live.attest() != live.digest
        words[7, 2] ^= flip
    assert live.attest() == codec.digest_model(bits)


def test_a_swap_over_damaged_bits_is_refused():
    """The old bits under a patch are part of the proof: damage there is no clean version."""
    model, specs, bits, live = served("BF16", torch.float32)
    target = random_bits(specs, np.random.default_rng(2))
    words = model.norm.weight.detach().view(torch.int32)
    words[3] ^= 1 << 20
    before = held(model)
    with pytest.raises(ResyncError):
        live.swap(diff(bits, target), 4, codec.digest_model(target))
    assert same(held(model), before)


@pytest.mark.parametrize(("dtype", "serving"), SERVED)
def test_a_staged_step_is_the_one_that_is_applied(dtype, serving, monkeypatch):
    model, specs, bits, live = served(dtype, serving)
    target = random_bits(specs, np.random.default_rng(2))
    before, digest = held(model), codec.digest_model(target)
    live.stage(diff(bits, target), 4, digest)
    assert same(held(model), before)
    assert (live.version, live.digest) == (3, codec.digest_model(bits))
    monkeypatch.setattr(live._placed, "prepare", None)  # Nothing is left to do but the exchange.
    live.swap({}, 4, digest)
    assert live.attest() == live.digest == digest
    expected = {s.name: expected_parameter(target[s.name], s, serving) for s in specs}
    assert same(held(model), expected)


def test_a_step_staged_for_another_version_is_not_applied():
    _, specs, bits, live = served("BF16", torch.float32)
    one, other = (random_bits(specs, np.random.default_rng(seed)) for seed in (2, 3))
    live.stage(diff(bits, one), 5, codec.digest_model(one))
    live.swap(diff(bits, other), 4, codec.digest_model(other))
    assert live.attest() == codec.digest_model(other)
    follow(live, other)
    live.stage(diff(other, one), 5, codec.digest_model(one))
    live.swap(diff(other, bits), 5, codec.digest_model(bits))
    assert live.attest() == codec.digest_model(bits)
    follow(live, bits)
    with pytest.raises(ResyncError, match="would be"):
        live.stage(diff(bits, one), 6, codec.digest_model(other))
    assert live.attest() == live.digest == codec.digest_model(bits)


def test_a_mirror_that_did_not_advance_is_noticed():
    _, specs, bits, live = served("BF16", torch.float32)
    target = random_bits(specs, np.random.default_rng(2))
    live.swap(diff(bits, target), 4, codec.digest_model(target))
    with pytest.raises(ResyncError, match="the mirror at 3"):
        live.swap(diff(target, bits), 5, codec.digest_model(bits))


def altered(specs, **changes):
    return [
        TensorSpec(spec.name, *changes.get(spec.name.replace(".", "_"), (spec.shape, spec.dtype)))
        for spec in specs
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda specs: specs[1:],
        lambda specs: [*specs, TensorSpec("more", (1,), "BF16")],
        lambda specs: [*specs[1:], TensorSpec("embed.other", (13, 6), "BF16")],
        lambda specs: altered(specs, embed_weight=((6, 13), "BF16")),
        lambda specs: altered(specs, embed_weight=((78,), "BF16")),
        lambda specs: altered(specs, norm_bias=((7,), "BF16")),
        lambda specs: altered(specs, norm_bias=((6,), "F32")),
        lambda specs: altered(specs, norm_bias=((6,), "F16")),
        lambda specs: altered(specs, norm_bias=((6,), "F8_E4M3")),
    ],
)
def test_other_tensor_tables_are_input_errors(change):
    model = Tied().to(torch.bfloat16)
    specs = CastWeights(model, "BF16").specs()
    LiveWeights(model, specs)
    with pytest.raises(InputError):
        LiveWeights(model, change(specs))


def test_parameters_in_pieces_are_refused():
    model = torch.nn.Linear(4, 3, bias=False)
    model.weight = torch.nn.Parameter(torch.zeros(4, 3).T)
    with pytest.raises(InputError):
        LiveWeights(model, CastWeights(model, "BF16").specs())


def test_published_bits_round_to_nearest_even():
    halves = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], dtype=torch.int32)
    rounded = cast(halves.view(torch.float32), "BF16")
    assert rounded.view(torch.int16).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80]
    assert cast(torch.zeros(3, 4).T, "F32").is_contiguous()
