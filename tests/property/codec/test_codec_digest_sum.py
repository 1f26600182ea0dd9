"""The digest is a sum, and its native kernel is the NumPy one."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire import codec
from deltawire.codec.reference import digest_bits_reference

names = st.text(max_size=30)
starts = st.one_of(st.integers(0, 100), st.integers(0, 2**40))


@st.composite
def arrays(draw):
    """Bits of any width, uint[N], at any alignment of whole elements."""
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    count = draw(st.one_of(st.integers(0, 40), st.integers(0, 2000)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    bits = np.frombuffer(rng.bytes((count + 9) * itemsize), f"u{itemsize}")
    offset = draw(st.integers(0, 9))
    return bits[offset : offset + count]


@settings(deadline=None)
@given(names, arrays(), starts)
def test_native_equals_reference(name, bits, start):
    assert codec.digest_bits(name, bits, start) == digest_bits_reference(name, bits, start)


@settings(deadline=None)
@given(names, arrays(), starts, st.data())
def test_digest_adds_up_over_pieces(name, bits, start, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, bits.size), max_size=5)))
    total = codec.ZERO
    for first, last in zip([0, *cuts], [*cuts, bits.size], strict=True):
        total += codec.digest_bits(name, bits[first:last], start + first)
    assert total == codec.digest_bits(name, bits, start)


@settings(deadline=None)
@given(names, arrays(), starts, st.data())
def test_patch_moves_the_digest(name, bits, start, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    positions = np.flatnonzero(rng.random(bits.size) < 0.3)
    new = np.frombuffer(rng.bytes(positions.size * bits.dtype.itemsize), bits.dtype)
    patch = codec.Patch(positions, new)
    target = bits.copy()
    codec.apply(patch, target)
    change = codec.digest_patch(name, patch, bits[positions], start)
    before, after = (codec.digest_bits(name, copy, start) for copy in (bits, target))
    assert before + change == after
    back = codec.digest_patch(name, codec.undo(patch, bits), new, start)
    assert change + back == codec.ZERO
