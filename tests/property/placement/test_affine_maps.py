"""The algebra of affine maps, against listing every element."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deltawire import codec
from deltawire.codec.reference import digest_bits_reference
from deltawire.placement.affine import (
    AffineMap,
    Cover,
    boxes_of,
    chain_of,
    intersect,
    join,
    replaced,
    row_major,
    simplify,
    through,
)
from deltawire.placement.elements import chunks, digest_part, locate, positions_of


def pairs(found):
    """Every (source, target) of a map, in the order of its walk."""
    places = [(found.source, found.target)]
    for size, s, t in zip(found.shape, found.source_strides, found.target_strides, strict=True):
        places = [(a + i * s, b + i * t) for a, b in places for i in range(size)]
    return places


def sets(maps):
    return sorted(pair for found in maps for pair in pairs(found))


@st.composite
def views(draw, shape):
    """A view of a contiguous tensor: narrowed, stepped, permuted; offset, shape, strides."""
    strides, offset, dims = row_major(shape), 0, []
    for size, stride in zip(shape, strides, strict=True):
        start = draw(st.integers(0, size - 1))
        step = draw(st.integers(1, 3))
        offset += start * stride
        dims.append((draw(st.integers(1, (size - start + step - 1) // step)), stride * step))
    order = draw(st.permutations(range(len(dims))))
    return offset, tuple(dims[i][0] for i in order), tuple(dims[i][1] for i in order)


shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4).map(tuple)


@st.composite
def maps(draw):
    """Copying a view of one tensor into a view of another of some shape, broadcasts included."""
    offset, shape, strides = draw(views(draw(shapes)))
    if draw(st.booleans()):
        repeats = draw(st.integers(1, 3))
        shape, strides = (repeats, *shape), (0, *strides)
    bases = tuple(size + draw(st.integers(0, 2)) for size in shape)
    target = draw(st.integers(0, 5))
    return AffineMap(offset, target, shape, strides, row_major(bases))


def is_simple(found):
    dims = list(zip(found.shape, found.source_strides, strict=True))
    below = 1
    for size, stride in reversed(dims):
        if size < 2 or stride < below:
            return False
        below = 1 + (size - 1) * stride + below - 1
    return True


@given(maps())
def test_simplifying_keeps_every_pair(found):
    simple = simplify(found)
    assert sets(simple) == sets([found])
    assert all(is_simple(part) for part in simple)
    assert all(simplify(part) == [part] for part in simple)


@given(st.lists(maps(), min_size=1, max_size=4))
def test_joining_keeps_every_pair(found):
    simple = [part for one in found for part in simplify(one)]
    assert sets(join(simple)) == sets(simple)
    assert len(join(simple)) <= len(simple)


def test_a_stack_of_experts_joins_to_one_map():
    parts = [AffineMap(100 * e, 300 * e + 7, (4, 5), (10, 1), (20, 2)) for e in range(6)]
    assert join(parts) == [AffineMap(0, 7, (6, 4, 5), (100, 10, 1), (300, 20, 2))]


@given(maps(), st.lists(st.integers(1, 12), max_size=3))
def test_boxes_hold_every_pair_once_on_any_axes(found, axes):
    for part in simplify(found):
        for side in ("source", "target"):
            chain = chain_of([part], side, axes)
            boxes = boxes_of(part, chain, side)
            assert sets(box.to_map(side) for box in boxes) == sets([part])


@given(st.lists(maps(), min_size=1, max_size=5))
def test_a_cover_takes_every_element_once(found):
    simple = [part for one in found for part in simplify(one)]
    chain = chain_of(simple, "source")
    cover, seen = Cover(chain), set()
    for part in simple:
        own = {source for source, _ in pairs(part)}
        boxes = boxes_of(part, chain, "source")
        shared = {s for b in boxes for c in cover.shared(b) for s, _ in pairs(c.to_map("source"))}
        assert shared == own & seen
        free = [piece for box in boxes for piece in cover.take(box)]
        listed = [pair for piece in free for pair in pairs(piece.to_map("source"))]
        assert len(listed) == len(set(listed))
        assert {source for source, _ in listed} == own - seen
        assert set(listed) <= set(pairs(part))
        seen |= own
    assert cover.count == len(seen)


@st.composite
def chained(draw):
    """A copy into a buffer, and a read of that buffer."""
    first, second = draw(views(draw(shapes))), draw(views((draw(st.integers(20, 60)),)))
    inner = AffineMap(first[0], 0, first[1], first[2], row_major(first[1]))
    outer = AffineMap(second[0], 3, second[1], second[2], row_major(second[1]))
    return inner, outer


def compose(outer, inner):
    """``outer`` after ``inner``, by way of the memory that one writes and the other reads."""
    chain = chain_of([replaced(outer, source=0, target=0)], "source", inner.target_strides)
    written = boxes_of(inner, chain, "target")
    common = [intersect(r, w) for r in boxes_of(outer, chain, "source") for w in written]
    return [through(*both) for both in common if both is not None]


@given(chained())
def test_composition_equals_copying_through_the_buffer(found):
    inner, outer = found
    buffer = {target: source for source, target in pairs(inner)}
    expected = sorted((buffer[m], t) for m, t in pairs(outer) if m in buffer)
    assert sets(compose(outer, inner)) == expected


@given(maps(), st.randoms(use_true_random=False))
def test_located_positions_are_those_of_the_map(found, random):
    for part in simplify(found):
        where = dict(pairs(part))
        reach = part.source + part.source_extent + 4
        positions = np.array(
            sorted(random.sample(range(reach), random.randint(0, reach))), np.int64
        )
        inside, targets = locate(part, positions)
        held = positions[inside]
        assert held.tolist() == [p for p in positions.tolist() if p in where]
        assert targets.tolist() == [where[p] for p in held.tolist()]


@given(maps(), st.integers(1, 40))
def test_chunks_keep_order_and_bounds(found, limit):
    for part in simplify(found):
        cut = list(chunks(part, limit))
        assert [pair for piece in cut for pair in pairs(piece)] == pairs(part)
        assert all(piece.count <= limit for piece in cut)
        assert positions_of(part).tolist() == [source for source, _ in pairs(part)]


@given(maps(), st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]))
def test_a_parts_digest_is_the_sum_of_its_elements(found, dtype):
    for part in simplify(found):
        bits = np.random.default_rng(part.count).integers(0, 1 << 8, part.count).astype(dtype)
        expected = codec.ZERO
        for position, bit in zip(positions_of(part).tolist(), bits, strict=True):
            expected += digest_bits_reference("t", np.array([bit], dtype), position)
        assert digest_part("t", part, bits) == expected
