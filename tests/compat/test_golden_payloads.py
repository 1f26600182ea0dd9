"""Payloads of DWD1, DWD2 and DWA1 as they were when the format was fixed: read and made today.

Each payload of at most `OPERAND_BYTES` has its operands next to it: `NAME.base` and `NAME.target`
for a delta, `NAME.elements` for an anchor, as flat little-endian elements. `vectors.json` states,
for every payload, the dtype, the number of elements and the SHA-256 of the operands; `operands.py`
there makes the larger ones in plain Python. So a reader can be checked without deltawire.
"""

import hashlib
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from deltawire import codec
from deltawire.codec.delta import LAYOUTS, layout_of
from deltawire.codec.packed import E2M1, INTEGERS, encode_packed
from deltawire.codec.reference import (
    decode_full_reference,
    decode_packed_reference,
    decode_patch_reference,
    encode_full_reference,
    encode_packed_reference,
    encode_reference,
)
from deltawire.testing.payload_reader import decode_anchor, decode_delta

PAYLOADS = Path(__file__).parent / "payloads"
OPERAND_BYTES = 8192
_SPEC = importlib.util.spec_from_file_location("operands", PAYLOADS / "operands.py")
operands = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(operands)
SLOW = 1 << 18  # Elements above which the reference takes seconds.


def noise(count, seed):
    """uint64[count], the same on every machine and with every NumPy."""
    x = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x


def pair(dtype, count, rarity, magnitude, *, narrow=3):
    """A base whose exponents lie near each other, and a target: one in ``rarity`` differs."""
    unsigned = codec.unsigned_of(dtype)
    layout, width = layout_of(dtype), 8 * unsigned.itemsize
    random = noise(count, 1)
    base = random & np.uint64((1 << layout.mantissa) - 1) if layout.exponent else random >> 60
    if layout.exponent:
        exponent = np.uint64((1 << layout.exponent - 1) - 3) + (
            random >> np.uint64(60)
        ) // np.uint64(narrow)
        sign = (random >> np.uint64(50) & np.uint64(1)) << np.uint64(width - 1)
        base = sign | exponent << np.uint64(layout.mantissa) | base
    base = base.astype(unsigned)
    other = noise(count, 2)
    step = (other >> np.uint64(64 - magnitude)).astype(unsigned) + unsigned.type(1)
    down = (other & np.uint64(1)).astype(bool)
    target = np.where(down, base - step, base + step)
    return base, np.where(noise(count, 3) % rarity == 0, target, base).astype(unsigned)


DELTAS = {
    "nothing": ("BF16", 0, 1, 1, 0),
    "no-change": ("BF16", 300, 1 << 40, 1, 0),
    "one-element": ("U8", 1, 1, 1, 0),
    "bf16-rows": ("BF16", 900, 9, 2, 60),
    "bf16-no-rows": ("BF16", 300, 5, 1, 0),
    "bf16-long-row": ("BF16", 400, 20, 1, 1 << 22),
    "f16": ("F16", 400, 8, 3, 16),
    "f32": ("F32", 150, 6, 12, 10),
    "f64": ("F64", 50, 6, 40, 10),
    "f8-e4m3": ("F8_E4M3", 400, 8, 1, 20),
    "f8-e5m2": ("F8_E5M2", 400, 8, 1, 20),
    "i64-any": ("I64", 60, 12, 64, 0),
    "u8-raw": ("U8", 40, 1, 7, 8),
    "sampled-classes": ("BF16", (1 << 17) + 77, 2, 2, 512),
    "sixteen-lanes": ("BF16", (1 << 15) + 77, 3000, 2, 128),
    "sixty-four-lanes": ("BF16", (1 << 20) + 65, 200_000, 2, 1024),
    "two-blocks": ("U8", (1 << 22) + 300, 2_000_000, 2, 1000),
}
PACKED = {
    "int4-codes": ("I32", INTEGERS, 60, 9, 12),
    "e2m1-codes": ("U8", E2M1, 300, 25, 30),
    "int4-sixteen-lanes": ("I32", INTEGERS, 2000, 2, 50),
}
ANCHORS = {
    "nothing": ("BF16", 0, 1),
    "bf16": ("BF16", 60, 1),
    "f16": ("F16", 70, 1),
    "f32": ("F32", 36, 1),
    "f64": ("F64", 28, 1),
    "f8-e4m3": ("F8_E4M3", 90, 1),
    "i64": ("I64", 26, 1),
    "u8-escapes": ("U8", 200, 2),
    "u8-raw": ("U8", 40, 1),
    "sixteen-lanes": ("U8", 1 << 15, 4000),
    "two-blocks": ("U8", (1 << 20) + 3, 60_000),
}


def delta_of(name):
    dtype, count, rarity, magnitude, columns = DELTAS[name]
    return *pair(dtype, count, rarity, magnitude), dtype, columns


def packed_of(name):
    dtype, codes, count, rarity, columns = PACKED[name]
    base = noise(count, 6).astype(codec.unsigned_of(dtype))
    places = noise(count, 7)
    step = codec.unsigned_of(dtype).type(1) << (places % (2 * base.itemsize) * 4).astype(base.dtype)
    target = np.where(noise(count, 8) % rarity == 0, base ^ step, base).astype(base.dtype)
    return base, target, codes, columns


def anchor_of(name):
    dtype, count, rarity = ANCHORS[name]
    if rarity == 1:
        return pair(dtype, count, 1, 1, narrow=12)[0], dtype
    return np.where(noise(count, 4) % rarity == 0, noise(count, 5) >> 56, 9).astype("u1"), dtype


def vectors():
    """Returns the content of `vectors.json`, and the bytes of the operands by their file name."""
    stated, made = {}, {}

    def add(file, name, dtype, **arrays):
        size = next(iter(arrays.values())).size
        stated[file] = {"dtype": dtype, "elements": size}
        for kind, array in arrays.items():
            data = array.astype(array.dtype.newbyteorder("<")).tobytes()
            stated[file][f"{kind}_sha256"] = hashlib.sha256(data).hexdigest()
            made[f"{name}.{kind}"] = data

    for name in DELTAS:
        base, target, dtype, _ = delta_of(name)
        add(f"{name}.delta", name, dtype, base=base, target=target)
    for name, (dtype, *_) in PACKED.items():
        base, target, _, _ = packed_of(name)
        add(f"{name}.delta", name, dtype, base=base, target=target)
    for name in ANCHORS:
        elements, dtype = anchor_of(name)
        add(f"{name}.anchor", name, dtype, elements=elements)
    return stated, made


def test_operands_are_stored_next_to_their_payloads():
    stated, made = vectors()
    assert json.loads((PAYLOADS / "vectors.json").read_text()) == stated
    assert {path.name for path in PAYLOADS.glob("*.delta")} | {
        path.name for path in PAYLOADS.glob("*.anchor")
    } == stated.keys()
    small = {name: data for name, data in made.items() if len(data) <= OPERAND_BYTES}
    kinds = {".base", ".target", ".elements"}
    stored = {path.name: path.read_bytes() for path in PAYLOADS.iterdir() if path.suffix in kinds}
    assert stored == small


def test_the_reader_of_the_document_reads_the_stored_vectors():
    """With the files alone: no operand comes from deltawire."""
    stated = json.loads((PAYLOADS / "vectors.json").read_text())
    checked = 0
    for name, facts in stated.items():
        path, size = PAYLOADS / name, codec.ITEMSIZE[facts["dtype"]]
        if path.suffix == ".anchor" and path.with_suffix(".elements").exists():
            elements = path.with_suffix(".elements").read_bytes()
            found = decode_anchor(path.read_bytes(), facts["elements"], 8 * size)
            assert b"".join(each.to_bytes(size, "little") for each in found) == elements
            checked += 1
        elif path.suffix == ".delta" and path.with_suffix(".base").exists():
            data = path.with_suffix(".base").read_bytes()
            base = [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]
            held = dict(enumerate(base)) | decode_delta(path.read_bytes(), base, 8 * size)
            target = b"".join(held[i].to_bytes(size, "little") for i in range(len(base)))
            assert target == path.with_suffix(".target").read_bytes()
            checked += 1
    assert checked >= 25


ONLY_LONG = [pytest.mark.drills, pytest.mark.long]


def large(kind, names, fewest):
    """The payloads without stored operands; those of more elements than ``fewest`` in drills."""
    return [
        pytest.param(f"{name}.{kind}", marks=ONLY_LONG if count > fewest else [])
        for name, count in names.items()
    ]


@pytest.mark.parametrize(
    "name",
    [
        *large("delta", {name: facts[1] for name, facts in operands.DELTAS.items()}, 1 << 16),
        *large("anchor", {name: facts[0] for name, facts in operands.ANCHORS.items()}, 1 << 16),
    ],
)
def test_large_operands_are_made_in_plain_python(name):
    stated = json.loads((PAYLOADS / "vectors.json").read_text())[name]
    for kind, data in operands.operands(name).items():
        assert hashlib.sha256(data).hexdigest() == stated[f"{kind}_sha256"]


def test_all_large_operands_can_be_made():
    stored = {path.stem for path in PAYLOADS.iterdir() if path.suffix in (".base", ".elements")}
    deltas = {path.stem for path in PAYLOADS.glob("*.delta")} - stored
    anchors = {path.stem for path in PAYLOADS.glob("*.anchor")} - stored
    assert deltas <= operands.DELTAS.keys()
    assert anchors <= operands.ANCHORS.keys()


@pytest.mark.parametrize("name", DELTAS)
def test_deltas_of_the_first_day(name):
    base, target, dtype, columns = delta_of(name)
    golden = (PAYLOADS / f"{name}.delta").read_bytes()
    assert np.array_equal(codec.decode(golden, base, dtype=dtype), target)
    assert codec.encode(base, target, dtype=dtype, columns=columns) == golden
    patch = decode_patch_reference(golden, base) if base.size < SLOW else None
    if patch is not None:
        assert np.array_equal(patch.positions, np.flatnonzero(base != target))
        assert np.array_equal(patch.bits, target[patch.positions])
        assert encode_reference(base, target, layout_of(dtype), columns) == golden


@pytest.mark.parametrize("name", PACKED)
def test_deltas_of_codes_of_the_first_day(name):
    base, target, codes, columns = packed_of(name)
    golden = (PAYLOADS / f"{name}.delta").read_bytes()
    assert np.array_equal(codec.decode(golden, base), target)
    assert encode_packed(base, target, codes, columns=columns) == golden
    patch = decode_packed_reference(golden, base)
    assert np.array_equal(patch.positions, np.flatnonzero(base != target))
    assert np.array_equal(patch.bits, target[patch.positions])
    assert encode_packed_reference(base, target, codes, columns) == golden


@pytest.mark.parametrize("name", ANCHORS)
def test_anchors_of_the_first_day(name):
    bits, dtype = anchor_of(name)
    golden = (PAYLOADS / f"{name}.anchor").read_bytes()
    assert np.array_equal(codec.decode_full(golden, bits.size, bits.itemsize), bits)
    assert codec.encode_full(bits, dtype) == golden
    if bits.size < SLOW:
        assert np.array_equal(decode_full_reference(golden, bits.size, bits.itemsize), bits)
        assert encode_full_reference(bits, dtype) == golden


def test_they_are_of_every_layout_and_mode():
    files = [path for path in PAYLOADS.iterdir() if path.suffix in (".delta", ".anchor")]
    assert len(files) == len(DELTAS) + len(PACKED) + len(ANCHORS)
    every = [path.read_bytes() for path in files if path.suffix == ".delta"]
    deltas = [payload for payload in every if payload[:4] == b"DWD1"]
    codes = [payload for payload in every if payload[:4] == b"DWD2"]
    assert len(deltas) + len(codes) == len(every)
    assert {tuple(payload[6:8]) for payload in codes} == {INTEGERS, E2M1}
    assert {tuple(payload[6:8]) for payload in deltas} == {(0, 0), *LAYOUTS.values()}
    assert sum(payload[5] == 1 for payload in deltas) == 3
    anchors = [path.read_bytes() for path in files if path.suffix == ".anchor"]
    assert {payload[:4] for payload in anchors} == {b"DWA1"}
    assert sum(payload[5] == 1 for payload in anchors) == 2


def write_operands():
    """Writes the operands and `vectors.json`."""
    stated, made = vectors()
    (PAYLOADS / "vectors.json").write_text(json.dumps(stated, indent=1) + "\n")
    for name, data in made.items():
        if len(data) <= OPERAND_BYTES:
            (PAYLOADS / name).write_bytes(data)


def write_missing():
    for name in DELTAS:
        base, target, dtype, columns = delta_of(name)
        write(PAYLOADS / f"{name}.delta", codec.encode(base, target, dtype=dtype, columns=columns))
    for name in PACKED:
        base, target, codes, columns = packed_of(name)
        write(PAYLOADS / f"{name}.delta", encode_packed(base, target, codes, columns=columns))
    for name in ANCHORS:
        write(PAYLOADS / f"{name}.anchor", codec.encode_full(*anchor_of(name)))


def write(path, payload):
    if not path.exists():
        path.write_bytes(payload)


if __name__ == "__main__":
    write_missing()
    write_operands()
