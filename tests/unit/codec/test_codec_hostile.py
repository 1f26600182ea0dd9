"""Payloads that lie: each is a CorruptError or a patch in bounds, and takes no more memory."""

import contextlib
import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from deltawire import _native, codec
from deltawire.codec import anchors, delta
from deltawire.codec.reference import (
    Odds,
    PlaneWriter,
    decode_full_reference,
    decode_patch_reference,
)
from deltawire.errors import CorruptError
from deltawire.testing.payload_reader import FormatError, decode_delta
from deltawire.testing.payload_reader import decode_anchor as decode_plain_anchor

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
    "sixteen lanes": (np.zeros(1 << 15, np.uint16), (np.arange(1 << 15) % 97 == 0).astype("u2")),
}


HEADER_BUT_COLUMNS = {*range(delta.HEADER.size)} - {*range(8, 12)}
"""Rows of another length are as good as long as nothing moves."""


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
            assert not (sound and index in HEADER_BUT_COLUMNS)
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


def test_payloads_need_no_alignment():
    base = PAIRS["dense"][0]
    target = base[::-1].copy()
    coded, raw = codec.encode_full(np.zeros(50, "u2")), codec.encode_full(target)
    delta_bytes = codec.encode(base, target)
    assert (coded[5], raw[5], delta_bytes[5]) == (anchors.CODED, anchors.RAW, delta.RAW)
    for offset in range(4):
        at = [memoryview(bytes(offset) + each)[offset:] for each in (coded, raw, delta_bytes)]
        assert not codec.decode_full(at[0], 50, 2).any()
        whole = codec.decode_full(at[1], COUNT, 2)
        assert whole.flags.aligned
        assert np.array_equal(whole, target)
        assert np.array_equal(codec.decode(at[2], base), target)


COUNT_OF_BLOCKS = 1000


def block(changed=1, top=0, planes=0, odds=b"\x02\0\x08", lengths=b"", details=b"\0\0",
          signs=b"\0\0", raw=b"", raw_size=None, words=b"", states=None):  # fmt: skip
    """A block of one lane, each field to be set."""
    head = struct.pack("<IHB", changed, top, planes) + odds + lengths + details + signs
    head += struct.pack("<I", len(raw) if raw_size is None else raw_size) + raw
    return head + words + struct.pack("<I", 1 << 15 if states is None else states)


def payload_of(block, *, count=COUNT_OF_BLOCKS, layout=(0, 0), columns=0, length=None):
    header = delta.HEADER.pack(delta.MAGIC, 1, delta.CODED, *layout, columns, count)
    return header + struct.pack("<I", len(block) if length is None else length) + block


def sound_block():
    base = np.zeros(COUNT_OF_BLOCKS, np.uint8)
    target = base.copy()
    target[[3, 500]] = 7, 1
    return codec.encode(base, target)[delta.HEADER.size + 4 :]


SOUND = sound_block()


def test_a_block_that_is_sound():
    assert check(payload_of(SOUND), np.zeros(COUNT_OF_BLOCKS, np.uint8))


@pytest.mark.parametrize(
    "payload",
    [
        payload_of(b""),
        payload_of(b"\0\0\0"),
        payload_of(b"\0\0\0\0\0"),
        payload_of(SOUND[:-1]),
        payload_of(SOUND + b"\0"),
        payload_of(SOUND + b"\0\0"),
        payload_of(b"\x01" + SOUND[1:]),
        payload_of(b"\x03" + SOUND[1:]),
        payload_of(SOUND, length=2**32 - 1),
        payload_of(SOUND, layout=(7, 8)),
        payload_of(SOUND, layout=(0, 11)),
        payload_of(SOUND, columns=1),
        payload_of(SOUND, columns=2**32 - 1),
        payload_of(block(changed=2**32 - 1)),
        payload_of(block(top=1)),
        payload_of(block(planes=8, lengths=b"\0\0" * 8)),
        payload_of(block(planes=200)),
        payload_of(block(odds=b"\xff\xff\x01")),
        payload_of(block(odds=b"\x02\0\0")),
        payload_of(block(odds=b"\x02\0\x80")),
        payload_of(block(odds=b"\x02\0\x61")),
        payload_of(block(raw_size=2**32 - 1)),
        payload_of(block(raw=b"\0")),
        payload_of(block(states=0)),
        payload_of(block(states=(1 << 15) - 1)),
        payload_of(block(states=1 << 31)),
        payload_of(block(states=2**32 - 1)),
        payload_of(block(words=b"\0")),
        payload_of(block(words=b"\xff\xff" * 40)),
        payload_of(block()),
    ],
)
def test_crafted_blocks_are_corrupt(payload):
    assert not check(payload, np.zeros(COUNT_OF_BLOCKS, np.uint8))


def test_odds_of_class_0_are_corrupt():
    """No element above `top` changes, so the flags have no odds in its class: in all readers."""
    base = np.zeros(COUNT_OF_BLOCKS, np.uint8)
    assert SOUND[7:9] == b"\x02\0"
    crafted = payload_of(SOUND[:7] + b"\x03\0\x08" + SOUND[9:])
    assert not check(crafted, base)
    with pytest.raises(CorruptError):
        decode_patch_reference(crafted, base)
    with pytest.raises(FormatError):
        decode_delta(crafted, base.tolist(), 8)


@pytest.mark.parametrize(
    ("planes", "detail", "raw", "sound"),
    [(7, 0, 0, True), (7, 1, 0, False), (7, 0, 1, False), (7, 0, 32, False), (8, 0, 0, False)],
)
def test_a_magnitude_wider_than_its_element_is_corrupt(planes, detail, raw, sound):
    """One change, of which every length plane says yes: eight planes are a length of nine bits, and
    seven one of eight, of which 128 is the only possible change.
    """
    writer = PlaneWriter(1)
    one, no = np.array([1]), np.array([0])
    odds = {}
    for plane in ("signs", "details", *range(planes, 0, -1)):
        contexts = {"signs": no, "details": np.array([planes + 1])}.get(plane, one)
        bits = {"signs": no, "details": np.array([detail])}.get(plane, one)
        odds[plane] = Odds.of(contexts, bits)
        writer.put(contexts, bits, odds[plane])
    flags = np.zeros(COUNT_OF_BLOCKS, np.int64)
    flags[7] = 1
    of_flags = Odds.of(flags * 0 + 1, flags)
    writer.put(flags * 0 + 1, flags, of_flags)
    made = writer.finish()
    crafted = block(
        planes=planes, odds=of_flags.write(), raw=bytes([raw]), words=made[:-4],
        lengths=b"".join(odds[b].write() for b in range(1, planes + 1)),
        details=odds["details"].write(),
        states=int.from_bytes(made[-4:], "little"),
    )  # fmt: skip
    base = np.zeros(COUNT_OF_BLOCKS, np.uint8)
    assert check(payload_of(crafted), base) == sound
    if sound:
        assert decode_delta(payload_of(crafted), base.tolist(), 8) == {7: 128}
        return
    with pytest.raises(CorruptError):
        decode_patch_reference(payload_of(crafted), base)
    with pytest.raises(FormatError):
        decode_delta(payload_of(crafted), base.tolist(), 8)


def test_a_claim_of_many_changes_takes_no_memory():
    count = 1 << 18
    payload = payload_of(block(changed=count), count=count)
    base = np.zeros(count, np.uint8)
    tracemalloc.start()
    assert not check(payload, base)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 21


def test_an_anchor_of_another_field_is_corrupt():
    sound = bytearray(codec.encode_full(np.arange(3000, dtype=np.uint16) >> 3, "BF16"))
    assert sound[5] == anchors.CODED
    for low, width in ((7, 9), (9, 8), (7, 0), (255, 255)):
        sound[6:8] = low, width
        with pytest.raises(CorruptError):
            codec.decode_full(sound, 3000, 2)
    noise = np.frombuffer(np.random.default_rng(0).bytes(6000), np.uint16)
    raw = bytearray(codec.encode_full(noise, "U16"))
    assert raw[5] == anchors.RAW
    for low, width, fits in (
        (8, 8, True),
        (3, 1, True),
        (8, 9, False),
        (9, 8, False),
        (7, 0, False),
    ):
        raw[6:8] = low, width
        for decode in (codec.decode_full, lambda *of: decode_plain_anchor(bytes(of[0]), of[1], 16)):
            with contextlib.nullcontext() if fits else pytest.raises((CorruptError, FormatError)):
                decode(raw, 3000, 2)


def test_rows_longer_than_the_tensor_take_no_memory():
    """The memory of a block's columns is that of its elements at most."""
    base = np.zeros(COUNT_OF_BLOCKS, np.uint8)
    target = base.copy()
    target[[3, 500, 501]] = 7, 255, 1
    payload = codec.encode(base, target, columns=1 << 22)
    assert payload[8:12] == struct.pack("<I", 1 << 22)
    assert np.array_equal(codec.decode(payload, base), target)
    assert payload[12:] == codec.encode(base, target, columns=COUNT_OF_BLOCKS)[12:]
    assert (
        peak_growth_kib(
            "import numpy as np; from deltawire import codec;"
            f"base = np.zeros({COUNT_OF_BLOCKS}, np.uint8); payload = {payload!r}",
            "codec.decode(payload, base, threads=1)",
        )
        < 2048
    )


def peak_growth_kib(before, measured):
    """How much more memory a new process needs at its peak for the second piece of code."""
    peak = "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss"
    code = f"import resource; {before}; held = {peak}; {measured}; print({peak} - held)"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)


@pytest.mark.parametrize(
    ("width", "mantissa", "exponent"),
    [
        (1, 7, 8),
        (2, 3, 4),
        (2, 10, 6),
        (2, 0, 15),
        (4, 31, 0),
        (4, 200, 8),
        (8, 52, 12),
        (8, 64, 1),
    ],
)
def test_the_kernels_refuse_layouts_that_do_not_fit(width, mantissa, exponent):
    base = np.zeros(10, f"u{width}")
    body, lengths = np.zeros(4, np.uint8), np.array([4], np.uint32)
    with pytest.raises(ValueError, match="such as there are"):
        _native.encode(base, base, 0, mantissa, exponent, None, 0, 1)
    with pytest.raises(ValueError, match="not a delta for this base"):
        _native.decode(body, lengths, base, 0, mantissa, exponent, 0, 1, None, 0, 1)
    with pytest.raises(ValueError, match="not a delta for this base"):
        _native.advance(body, lengths, base, 0, mantissa, exponent, 1)
    assert _native.advance(body, lengths, base, 0, 0, 0, 1) == 0


def anchor_block(symbols=b"\x05", odds=b"\0\0" * 4, escapes=b"", escapes_size=None,
                 rest=b"\0" * 10, words=b"", state=1 << 15, ranked=None):  # fmt: skip
    """A block of ten elements of 16 bits, whose field is the highest 8."""
    head = bytes([len(symbols) if ranked is None else ranked]) + symbols + odds
    head += struct.pack("<I", len(escapes) if escapes_size is None else escapes_size) + escapes
    return head + rest + words + struct.pack("<I", state)


def decode_anchor(block, field=(8, 8)):
    header = anchors.HEADER.pack(anchors.MAGIC, 2, anchors.CODED, *field, 10)
    return codec.decode_full(header + struct.pack("<I", len(block)) + block, 10, 2)


def test_an_anchor_block_that_is_sound():
    assert decode_anchor(anchor_block()).tolist() == [0x0500] * 10
    assert decode_anchor(anchor_block(symbols=b"\x1f", rest=b"\0" * 14), (8, 5))[0] == 0x1F00


@pytest.mark.parametrize(
    ("block", "field"),
    [
        (b"", (8, 8)),
        (anchor_block(ranked=16), (8, 8)),
        (anchor_block(ranked=255), (8, 8)),
        (anchor_block(symbols=b""), (8, 8)),  # Every rank is 0, and there is none.
        (anchor_block(symbols=b"\x20", rest=b"\0" * 14), (8, 5)),
        (
            anchor_block(symbols=b"\x1f\x20", rest=b"\0" * 14),
            (8, 5),
        ),  # The second is of no element.
        (anchor_block(symbols=b"\x05\x07\x05"), (8, 8)),
        (anchor_block(odds=b"\x01\0\0" + b"\0\0" * 3), (8, 8)),
        (anchor_block(odds=b"\x01\0\x61" + b"\0\0" * 3), (8, 8)),
        (anchor_block(odds=b"\xff\xff"), (8, 8)),
        (anchor_block(escapes_size=2**32 - 1), (8, 8)),
        (anchor_block(escapes=b"\0"), (8, 8)),
        (anchor_block(rest=b"\0" * 9), (8, 8)),
        (anchor_block(rest=b"\0" * 11), (8, 8)),
        (anchor_block(symbols=b"\x1f", rest=b"\0" * 13 + b"\x80"), (8, 5)),
        (anchor_block(words=b"\0\0"), (8, 8)),
        (anchor_block(words=b"\0"), (8, 8)),
        (anchor_block(state=0), (8, 8)),
        (anchor_block(state=(1 << 15) + 1), (8, 8)),
        (anchor_block(state=1 << 31), (8, 8)),
    ],
)
def test_crafted_anchors_are_corrupt(block, field):
    with pytest.raises(CorruptError):
        decode_anchor(block, field)
    header = anchors.HEADER.pack(anchors.MAGIC, 2, anchors.CODED, *field, 10)
    with pytest.raises(FormatError):
        decode_plain_anchor(header + struct.pack("<I", len(block)) + block, 10, 16)


@pytest.mark.parametrize(("symbols", "field"), [(b"\x1f\x20", (8, 5)), (b"\x05\x07\x05", (8, 8))])
def test_the_twin_refuses_symbols_that_it_does_not_need(symbols, field):
    block = anchor_block(symbols=symbols, rest=b"\0" * (14 if field == (8, 5) else 10))
    header = anchors.HEADER.pack(anchors.MAGIC, 2, anchors.CODED, *field, 10)
    with pytest.raises(CorruptError):
        decode_full_reference(header + struct.pack("<I", len(block)) + block, 10, 2)
