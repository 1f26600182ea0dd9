"""Payloads that lie: each is a CorruptError or a patch in bounds, and takes no more memory."""

import contextlib
import struct
import tracemalloc
import zlib

import numpy as np
import pytest

from deltawire import codec
from deltawire.codec import anchors, delta
from deltawire.errors import CorruptError

COUNT = 3000


def pair(changed, itemsize=2, *, noise=True):
    rng = np.random.default_rng(changed)
    base = np.frombuffer(rng.bytes(COUNT * itemsize), f"u{itemsize}").copy()
    target = base.copy()
    positions = rng.choice(COUNT, changed, replace=False)
    target[positions] ^= rng.integers(1, 200, changed).astype(base.dtype) if noise else 1
    return base, target


PAIRS = {
    "nothing": pair(0),
    "long gaps": pair(4),
    "sparse": pair(200),
    "eight bytes": pair(90, 8),
    "dense": pair(2900, 2),
    "all by one": (np.zeros(COUNT, np.uint32), np.ones(COUNT, np.uint32)),
}


def check(payload, base):
    try:
        patch = codec.decode_patch(payload, base)
    except CorruptError:
        return False
    assert patch.positions.dtype == np.int64
    assert patch.bits.dtype == base.dtype
    assert (np.diff(patch.positions) > 0).all()
    assert not len(patch) or (patch.positions[0] >= 0 and patch.positions[-1] < base.size)
    return True


@pytest.mark.parametrize("name", PAIRS)
def test_every_truncation_is_corrupt(name):
    base, target = PAIRS[name]
    payload = codec.encode(base, target)
    assert check(payload, base)
    for size in range(len(payload)):
        assert not check(payload[:size], base)
    assert not check(payload + b"\0", base)


@pytest.mark.parametrize("name", PAIRS)
def test_every_flip_is_corrupt_or_in_bounds(name):
    base, target = PAIRS[name]
    payload = bytearray(codec.encode(base, target))
    for index in range(len(payload)):
        for flip in (1, 0x80, 0xFF):
            payload[index] ^= flip
            sound = check(payload, base)
            assert not (sound and index < delta.HEADER.size)
            payload[index] ^= flip


@pytest.mark.parametrize("fill", [0, 0x0101010101010101])
def test_anchor_truncations_and_flips(fill):
    bits = np.arange(300, dtype=np.uint64) * 7 + fill
    payload = bytearray(codec.encode_full(bits))
    for size in range(len(payload)):
        with pytest.raises(CorruptError):
            codec.decode_full(payload[:size], 300, 8)
    for index in range(len(payload)):
        payload[index] ^= 0x55
        with contextlib.suppress(CorruptError):
            assert codec.decode_full(payload, 300, 8).shape == (300,)
        payload[index] ^= 0x55
    for count, itemsize in ((299, 8), (301, 8), (600, 4), (0, 8)):
        with pytest.raises(CorruptError):
            codec.decode_full(payload, count, itemsize)


def test_payload_for_another_base_is_corrupt():
    base, target = PAIRS["sparse"]
    payload = codec.encode(base, target)
    for other in (base[:-1], base.view(np.uint8), base.view(np.uint32), base[:0]):
        assert not check(payload, other)


def line(number, *rest):
    """A block of one class."""
    return bytes([1, 0, 0, number, *rest])


def payload_of(block, *, count=1000, changed=1, layout=(0, 0), lengths=None):
    header = delta.HEADER.pack(delta.MAGIC, 1, delta.CLASSED, *layout, count, changed)
    return header + delta.LENGTH.pack(len(block) if lengths is None else lengths) + block


SOUND = line(0, 0, 1, 1, 0b0011)  # gap 0 under k = 0, then falling


def test_a_crafted_block_that_is_sound():
    assert check(payload_of(SOUND), np.zeros(1000, np.uint8))


@pytest.mark.parametrize(
    "payload",
    [
        payload_of(b""),
        payload_of(b"\x00\x00"),
        payload_of(SOUND[:-1]),
        payload_of(SOUND + b"\0"),
        payload_of(SOUND, changed=0),
        payload_of(SOUND, changed=2),
        payload_of(SOUND, changed=2**63),
        payload_of(SOUND, lengths=2**32 - 1),
        payload_of(SOUND, layout=(7, 8)),
        payload_of(SOUND, layout=(0, 11)),
        payload_of(bytes([13]) + SOUND[1:]),
        payload_of(bytes([2]) + SOUND[1:]),
        payload_of(bytes([1, 1, 0]) + SOUND[3:]),
        payload_of(line(12, 0, 1, 1, 3)),
        payload_of(line(0x20, 0, 1, 1, 3)),
        payload_of(line(0, 0, 0, 1, 3), changed=0),
        payload_of(line(0, 0, 0xE9, 0x07, 1, 3)),
        payload_of(line(0, 0, *[0xFF] * 9, 1, 3)),
        payload_of(line(0, 0, 1, 2, 3)),
        payload_of(line(0, 0, 1, 0)),
        payload_of(line(0, 0xFF, 1, 1, 3)),
        payload_of(line(0, 0, 1, 12, *[0] * 3, 1, *[0xFF] * 8)),
        payload_of(line(0, 0, 2, 1, 0b0011), changed=2),
        payload_of(line(0x10, 0, 0, 0, 1, 1, 0)),
    ],
)
def test_crafted_blocks_are_corrupt(payload):
    assert not check(payload, np.zeros(1000, np.uint8))


def test_a_claim_of_many_changes_takes_no_memory():
    count = 1 << 18
    payload = payload_of(line(0, 0, 0x80, 0x80, 0x10, 1, 3), count=count, changed=count)
    base = np.zeros(count, np.uint8)
    tracemalloc.start()
    assert not check(payload, base)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 21


def test_a_zlib_bomb_in_an_anchor_takes_no_memory():
    sound = codec.encode_full(np.zeros(1000, np.uint8))
    body = sound[anchors._HEADER.size + 8 :]
    bomb = zlib.compress(bytes(1 << 26), 9)
    bad = sound[: anchors._HEADER.size] + struct.pack("<Q", len(bomb)) + bomb
    assert body != bomb
    tracemalloc.start()
    with pytest.raises(CorruptError):
        codec.decode_full(bad, 1000, 1)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 21
