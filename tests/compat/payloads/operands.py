"""Writes the operands of the golden payloads that are too large to store, in plain Python.

python tests/compat/payloads/operands.py sixteen-lanes.delta FOLDER

writes `sixteen-lanes.base` and `sixteen-lanes.target` to a folder; their SHA-256 are in
`vectors.json`.
This file shares no code with deltawire.
"""

import sys
from pathlib import Path

LAYOUTS = {"BF16": (7, 8, 2), "U8": (0, 0, 1)}
"""Mantissa, exponent and bytes of an element."""
DELTAS = {
    "sampled-classes": ("BF16", (1 << 17) + 77, 2, 2),
    "sixteen-lanes": ("BF16", (1 << 15) + 77, 3000, 2),
    "sixty-four-lanes": ("BF16", (1 << 20) + 65, 200_000, 2),
    "two-blocks": ("U8", (1 << 22) + 300, 2_000_000, 2),
}
"""Dtype, elements, one element in how many differs, and the bits of a change."""
ANCHORS = {"sixteen-lanes": (1 << 15, 4000), "two-blocks": ((1 << 20) + 3, 60_000)}
"""Elements, all U8, and one in how many is not 9."""
MASK = (1 << 64) - 1


def noise(index, seed):
    """The number ``index`` of a sequence: 64 bits, by the finalizer of SplitMix64."""
    x = index + 1 + (seed << 32) & MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = (x ^ x >> shift) * factor & MASK
    return x


def delta_operands(name):
    """Base and target of a delta: little-endian bytes."""
    dtype, count, rarity, magnitude = DELTAS[name]
    mantissa, exponent, size = LAYOUTS[dtype]
    mask, base, target = (1 << 8 * size) - 1, bytearray(), bytearray()
    for i in range(count):
        random, other = noise(i, 1), noise(i, 2)
        old = random >> 60
        if exponent:
            middle = (1 << exponent - 1) - 3 + (random >> 60) // 3
            sign = (random >> 50 & 1) << 8 * size - 1
            old = (sign | middle << mantissa | random & (1 << mantissa) - 1) & mask
        step = (other >> 64 - magnitude) + 1
        changed = old - step if other & 1 else old + step
        new = changed & mask if noise(i, 3) % rarity == 0 else old
        base += old.to_bytes(size, "little")
        target += new.to_bytes(size, "little")
    return {"base": bytes(base), "target": bytes(target)}


def anchor_operands(name):
    """The elements of an anchor."""
    count, rarity = ANCHORS[name]
    found = (noise(i, 5) >> 56 if noise(i, 4) % rarity == 0 else 9 for i in range(count))
    return {"elements": bytes(found)}


def operands(file):
    """The operands of a payload's file, by their suffix."""
    name, kind = file.rsplit(".", 1)
    return delta_operands(name) if kind == "delta" else anchor_operands(name)


if __name__ == "__main__":
    for suffix, data in operands(sys.argv[1]).items():
        Path(sys.argv[2], sys.argv[1]).with_suffix(f".{suffix}").write_bytes(data)
