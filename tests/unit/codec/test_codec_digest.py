"""The digest: its fixed values, its algebra and what it must notice."""

import threading

import numpy as np
import pytest
from blake3 import blake3

from deltawire import _native, codec
from deltawire.codec.digest import MASK, STEP
from deltawire.errors import CorruptError, InputError


def mix(key, unit, bits):
    """The definition once more, in Python's integers."""
    x = (key + (unit + 1) * STEP) & MASK
    p = ((x & 0xFFFFFFFF) ^ bits) * ((x >> 32) | 1)
    q = p ^ (p >> 29)
    return q, (q & 0xFFFFFFFF) * ((q >> 32) ^ (x & 0xFFFFFFFF))


def test_key_is_the_start_of_blake3():
    name = "model.layers.0.mlp.ßtensor"
    assert codec.tensor_key(name) == int.from_bytes(blake3(name.encode()).digest()[:8], "little")


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_digest_follows_its_definition(itemsize):
    bits = np.random.default_rng(itemsize).bytes(13 * itemsize)
    bits = np.frombuffer(bits, f"u{itemsize}")
    units = bits.view(np.uint32) if itemsize == 8 else bits
    start = 5 * (2 if itemsize == 8 else 1)
    lanes = [mix(codec.tensor_key("w"), start + u, int(b)) for u, b in enumerate(units)]
    expected = codec.Digest(sum(a for a, _ in lanes) & MASK, sum(b for _, b in lanes) & MASK)
    assert codec.digest_bits("w", bits, start=5) == expected


def test_digest_never_changes():
    bits = np.arange(1000, dtype=np.uint16)
    assert (
        codec.digest_bits("model.embed_tokens.weight", bits).hex()
        == "e00f36d4db2f2897db7a876cc1ba5f44"
    )


def test_hex_round_trip():
    digest = codec.Digest(1, MASK)
    assert digest.hex() == "0" * 15 + "1" + "f" * 16
    assert codec.Digest.from_hex(digest.hex()) == digest


@pytest.mark.parametrize("text", ["", "0" * 31, "0" * 33, "F" * 32, "g" * 32, "0" * 32 + "\n"])
def test_other_text_is_corrupt(text):
    with pytest.raises(CorruptError):
        codec.Digest.from_hex(text)


def test_algebra_wraps_around():
    digest = codec.Digest(MASK, 3)
    assert digest + codec.Digest(1, MASK) == codec.Digest(0, 2)
    assert codec.ZERO - digest + digest == codec.ZERO


def test_model_is_the_sum_of_its_tensors():
    model = {"a": np.arange(5, dtype=np.uint16), "b": np.arange(5, dtype=np.uint16)}
    total = codec.digest_bits("a", model["a"]) + codec.digest_bits("b", model["b"])
    assert codec.digest_model(model) == total
    assert codec.digest_bits("a", model["a"]) != codec.digest_bits("b", model["b"])
    assert codec.digest_model({}) == codec.ZERO


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_every_single_flip_shows_in_lane0(itemsize):
    bits = np.frombuffer(np.random.default_rng(1).bytes(9 * itemsize), f"u{itemsize}").copy()
    before = codec.digest_bits("w", bits)
    for index in range(bits.size):
        for bit in range(8 * itemsize):
            bits[index] ^= bits.dtype.type(1) << bits.dtype.type(bit)
            assert codec.digest_bits("w", bits).lane0 != before.lane0
            bits[index] ^= bits.dtype.type(1) << bits.dtype.type(bit)


def test_structured_damage_shows():
    bits = np.random.default_rng(2).integers(0, 1 << 16, 4096).astype(np.uint16)
    damaged = [
        bits,
        np.roll(bits, 1),
        bits[::-1].copy(),
        bits.reshape(64, 64).T.reshape(-1).copy(),
        bits ^ np.uint16(0x8000),
        bits ^ np.uint16(1),
        bits.byteswap(),
        np.zeros_like(bits),
        np.zeros_like(bits)[:-1],
        bits[:-1],
        np.concatenate([bits[2048:], bits[:2048]]),
    ]
    digests = [codec.digest_bits("w", copy) for copy in damaged]
    assert len({digest.lane0 for digest in digests}) == len(damaged)
    assert len({digest.lane1 for digest in digests}) == len(damaged)


def test_equal_flips_at_two_places_never_cancel():
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 1 << 16, 1 << 15).astype(np.uint16)
    positions = np.arange(bits.size)
    changes = set()
    for index in positions:
        old, new = bits[index : index + 1], bits[index : index + 1] ^ np.uint16(1)
        patch = codec.Patch(positions[index : index + 1], new)
        changes.add(codec.digest_patch("w", patch, old))
    assert len(changes) == bits.size
    assert not any(codec.ZERO - change in changes for change in changes)


def test_wrong_bits_are_input_errors():
    patch = codec.Patch(np.array([1]), np.array([1], np.uint16))
    with pytest.raises(InputError):
        codec.digest_bits("w", np.zeros(3, np.float32))
    with pytest.raises(InputError):
        codec.digest_bits("w", np.zeros((3, 3), np.uint16))
    with pytest.raises(InputError):
        codec.digest_bits("w", np.zeros(6, np.uint16)[::2])
    with pytest.raises(InputError):
        codec.digest_bits("w", np.zeros(6, np.uint16), start=-1)
    with pytest.raises(InputError):
        codec.digest_patch("w", patch, np.zeros(2, np.uint16))
    with pytest.raises(InputError):
        codec.digest_patch("w", patch, np.zeros(1, np.uint32))
    with pytest.raises(InputError):
        codec.digest_patch("w", patch, np.zeros(1, np.uint16), start=-1)


def test_native_refuses_what_it_would_misread():
    with pytest.raises(TypeError):
        _native.digest(np.zeros(3, np.float32), 0, 0)
    with pytest.raises(TypeError):
        _native.digest(np.zeros(6, np.uint16)[::2], 0, 0)
    with pytest.raises(ValueError, match="same length"):
        _native.digest_at(np.zeros(3, np.int64), np.zeros(2, np.uint16), 0)


def test_threads_agree():
    bits = np.random.default_rng(4).integers(0, 1 << 16, 1 << 20).astype(np.uint16)
    expected, found = codec.digest_bits("w", bits), []
    threads = [
        threading.Thread(target=lambda: found.append(codec.digest_bits("w", bits)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4
