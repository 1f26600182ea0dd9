"""Affine maps between two flat memories, and their algebra: cut, intersect, subtract, join.

An affine map relates the elements of two strided views: element ``(i, j, …)`` lies at
``source + i·s0 + j·s1 + …`` in one memory and at ``target + i·t0 + j·t1 + …`` in the other, as when
one view is copied into another.

To compare maps, one of their sides is written in mixed-radix digits: a descending chain of strides,
each dividing the previous one, splits a flat position into coordinates, as hours, minutes and
seconds split a time. In coordinates a map is a few boxes, and boxes intersect and subtract
exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

MAX_PARTS = 1 << 16
"""The most maps that one map is split into; beyond that, the affine form is of no use."""

Side = Literal["source", "target"]


class NotAffineError(Exception):
    """A map that cannot be written as a reasonable number of boxes."""


class AffineMap(msgspec.Struct, frozen=True, array_like=True):
    """``shape`` elements that start at ``source`` and ``target``, with one stride per dimension on
    each side; all numbers count elements.

    Example::

        AffineMap(0, 6, (2, 3), (3, 1), (1, 2))  # a transposed [2, 3] tensor, from offset 6 on
    """

    source: int
    target: int
    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of elements that it maps."""
        return math.prod(self.shape)

    @property
    def source_extent(self) -> int:
        """One more than the last source position, counted from the first."""
        return extent(self.shape, self.source_strides)

    @property
    def target_extent(self) -> int:
        """One more than the last target position, counted from the first."""
        return extent(self.shape, self.target_strides)

    def strides(self, side: Side) -> tuple[int, ...]:
        """Returns the strides of one side."""
        return self.source_strides if side == "source" else self.target_strides


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the distance from a strided view's first element to its last, plus one."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def simplify(found: AffineMap) -> list[AffineMap]:
    """Rewrites a map with as few dimensions as possible, nested by descending source stride.

    An element with several targets (a broadcast, overlapping windows) gives one map for each.
    Raises `NotAffineError` if these are too many.
    """
    if found.count == 0:
        return []
    dims = [d for d in _dims(found) if d[0] > 1]
    dims.sort(key=lambda d: -d[1])
    maps = [AffineMap(found.source, found.target, (), (), ())]
    nested: list[tuple[int, int, int]] = []
    for index, (size, stride, other) in enumerate(dims):
        below = dims[index + 1 :]
        if stride and stride >= extent([d[0] for d in below], [d[1] for d in below]):
            nested.append((size, stride, other))
            continue
        if len(maps) * size > MAX_PARTS:
            raise NotAffineError(f"{size} times {len(maps)} targets")
        maps = [
            replaced(m, source=m.source + i * stride, target=m.target + i * other)
            for m in maps
            for i in range(size)
        ]
    shape, sources, targets = _merge(nested)
    return [AffineMap(m.source, m.target, shape, sources, targets) for m in maps]


def _dims(found: AffineMap) -> list[tuple[int, int, int]]:
    return list(zip(found.shape, found.source_strides, found.target_strides, strict=True))


def _merge(
    dims: Iterable[tuple[int, int, int]],
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Merges neighbouring dimensions where the outer one continues what the inner one ends."""
    merged: list[tuple[int, int, int]] = []
    for size, source, target in dims:
        if merged:
            outer, outer_source, outer_target = merged[-1]
            if (outer_source, outer_target) == (size * source, size * target):
                merged[-1] = (outer * size, source, target)
                continue
        merged.append((size, source, target))
    return (
        tuple(d[0] for d in merged),
        tuple(d[1] for d in merged),
        tuple(d[2] for d in merged),
    )


def replaced(found: AffineMap, *, source: int, target: int) -> AffineMap:
    """Returns the map with different first positions."""
    return AffineMap(source, target, found.shape, found.source_strides, found.target_strides)


def join(maps: Sequence[AffineMap]) -> list[AffineMap]:
    """Merges equally spaced maps of equal shape: the experts of a stack become one map with one
    more dimension."""
    joined: list[AffineMap] = []
    run: list[AffineMap] = []
    ordered = sorted(maps, key=lambda m: (m.shape, m.source_strides, m.target_strides, m.source))
    for found in ordered:
        if run and not _continues(run, found):
            joined += _stack(run)
            run = []
        run.append(found)
    joined += _stack(run)
    return sorted(joined, key=lambda m: (m.source, m.target))


def _continues(run: list[AffineMap], found: AffineMap) -> bool:
    first = run[0]
    if (first.shape, first.source_strides, first.target_strides) != (
        found.shape,
        found.source_strides,
        found.target_strides,
    ):
        return False
    step = (found.source - run[-1].source, found.target - run[-1].target)
    if step[0] <= 0 or step[1] <= 0 or step[0] < first.source_extent:
        return False
    if len(run) == 1:
        return True
    return step == (run[-1].source - run[-2].source, run[-1].target - run[-2].target)


def _stack(run: list[AffineMap]) -> list[AffineMap]:
    if len(run) < 2:
        return list(run)
    first, second = run[:2]
    return simplify(
        AffineMap(
            first.source,
            first.target,
            (len(run), *first.shape),
            (second.source - first.source, *first.source_strides),
            (second.target - first.target, *first.target_strides),
        )
    )


@dataclass(frozen=True, slots=True)
class Box:
    """Coordinates ``starts`` to ``starts + counts`` on axes with strides ``chain``. The first one
    lies at ``other`` on the other side, with a stride there for each axis."""

    chain: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    other: int
    others: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of elements in it."""
        return math.prod(self.counts)

    def to_map(self, side: Side) -> AffineMap:
        """Returns the map whose ``side`` this box describes."""
        own = sum(s * stride for s, stride in zip(self.starts, self.chain, strict=True))
        dims = [
            (count, stride, other)
            for count, stride, other in zip(self.counts, self.chain, self.others, strict=True)
            if count > 1
        ]
        shape = tuple(d[0] for d in dims)
        mine, theirs = tuple(d[1] for d in dims), tuple(d[2] for d in dims)
        if side == "source":
            return AffineMap(own, self.other, shape, mine, theirs)
        return AffineMap(self.other, own, shape, theirs, mine)

    def cut(self, starts: Sequence[int], counts: Sequence[int]) -> Box:
        """Returns the part of it with these coordinates."""
        moved = sum(
            (new - old) * stride
            for new, old, stride in zip(starts, self.starts, self.others, strict=True)
        )
        return replace(self, starts=tuple(starts), counts=tuple(counts), other=self.other + moved)


def chain_of(
    maps: Iterable[AffineMap], side: Side, preferred: Iterable[int] = ()
) -> tuple[int, ...]:
    """Chooses axes for comparing ``maps`` on one side: strides that each divide the previous one.

    ``preferred`` strides come first, then the maps' own, frequent ones before rare ones. Strides
    that do not fit are left out, and `boxes_of` splits the dimensions that have them.
    """
    counted: dict[int, int] = {}
    for found in maps:
        for stride in found.strides(side):
            counted[stride] = counted.get(stride, 0) + 1
    wanted = [*preferred, *sorted(counted, key=lambda stride: (-counted[stride], stride))]
    chain = [1]
    for stride in wanted:
        if stride > 0 and stride not in chain and all(_divides(stride, other) for other in chain):
            chain.append(stride)
    return tuple(sorted(chain, reverse=True))


def _divides(a: int, b: int) -> bool:
    return a % b == 0 or b % a == 0


def boxes_of(found: AffineMap, chain: tuple[int, ...], side: Side) -> list[Box]:
    """Splits a map into boxes on the axes of ``chain``; raises `NotAffineError` if too many."""
    own_first, other_first = (
        (found.source, found.target) if side == "source" else (found.target, found.source)
    )
    dims: dict[int, tuple[int, int]] = {}
    loose: list[tuple[int, int, int]] = []
    for size, source, target in _dims(found):
        own, other = (source, target) if side == "source" else (target, source)
        if size == 1:
            continue
        axis = chain.index(own) if own in chain else -1
        if axis >= 0 and axis not in dims:
            dims[axis] = (size, other)
        else:
            loose.append((size, own, other))
    if math.prod(size for size, _, _ in loose) > MAX_PARTS:
        raise NotAffineError("the strides have no common measure")
    boxes: list[Box] = []
    for own_shift, other_shift in _walk(loose):
        starts = _digits(own_first + own_shift, chain)
        empty = Box(chain, starts, (1,) * len(chain), other_first + other_shift, (0,) * len(chain))
        boxes += _grow(empty, dims, len(chain) - 1)
        if len(boxes) > MAX_PARTS:
            raise NotAffineError(f"more than {MAX_PARTS} boxes")
    return boxes


def _walk(dims: list[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    if not dims:
        yield 0, 0
        return
    (size, own, other), rest = dims[0], dims[1:]
    for i in range(size):
        for own_shift, other_shift in _walk(rest):
            yield i * own + own_shift, i * other + other_shift


def _digits(position: int, chain: tuple[int, ...]) -> tuple[int, ...]:
    digits = []
    for stride in chain:
        digits.append(position // stride)
        position %= stride
    return tuple(digits)


def _carried(box: Box, axis: int, by: int) -> Box:
    """Returns the box with ``by`` added to one digit of its start, carrying into higher ones."""
    position = sum(s * stride for s, stride in zip(box.starts, box.chain, strict=True))
    moved = _digits(position + by * box.chain[axis], box.chain)
    return replace(box, starts=moved)


def _grow(box: Box, dims: dict[int, tuple[int, int]], axis: int) -> list[Box]:
    """Extends ``box`` by the dimensions on ``axis`` and above, from the smallest stride up. One
    that exceeds its axis continues on the next, as a head, whole turns and a tail."""
    if axis < 0:
        return [box]
    if axis not in dims:
        return _grow(box, dims, axis - 1)
    size, other = dims[axis]
    rest = {at: dim for at, dim in dims.items() if at != axis}
    start = box.starts[axis]
    radix = box.chain[axis - 1] // box.chain[axis] if axis else start + size
    if start + size <= radix:
        return _grow(_set(box, axis, size, other), rest, axis - 1)
    head = radix - start
    turns, tail = divmod(size - head, radix)
    boxes = _grow(_set(box, axis, head, other), rest, axis - 1)
    following = replace(_carried(box, axis, head), other=box.other + head * other)
    if turns:
        full = _set(following, axis, radix, other)
        if turns == 1:
            boxes += _grow(full, rest, axis - 1)
        elif axis - 1 not in rest:
            boxes += _grow(full, {**rest, axis - 1: (turns, radix * other)}, axis - 1)
        else:
            for turn in range(turns):
                moved = _carried(full, axis - 1, turn)
                shifted = replace(moved, other=full.other + turn * radix * other)
                boxes += _grow(shifted, rest, axis - 1)
    if tail:
        last = _carried(following, axis, turns * radix)
        last = replace(last, other=following.other + turns * radix * other)
        boxes += _grow(_set(last, axis, tail, other), rest, axis - 1)
    return boxes


def _set(box: Box, axis: int, count: int, other: int) -> Box:
    counts, others = list(box.counts), list(box.others)
    counts[axis], others[axis] = count, other
    return replace(box, counts=tuple(counts), others=tuple(others))


def intersect(a: Box, b: Box) -> tuple[Box, Box] | None:
    """Returns the common part of two boxes on the same axes, seen from each; None if disjoint."""
    starts = [max(x, y) for x, y in zip(a.starts, b.starts, strict=True)]
    counts = [
        min(x + n, y + m) - start
        for x, n, y, m, start in zip(a.starts, a.counts, b.starts, b.counts, starts, strict=True)
    ]
    if min(counts) <= 0:
        return None
    return a.cut(starts, counts), b.cut(starts, counts)


def subtract(a: Box, b: Box) -> list[Box]:
    """Returns the part of ``a`` outside ``b``, as disjoint boxes."""
    common = intersect(a, b)
    if common is None:
        return [a]
    inner = common[0]
    rest, current = [], a
    for axis in range(len(a.chain)):
        starts, counts = list(current.starts), list(current.counts)
        first, last = inner.starts[axis], inner.starts[axis] + inner.counts[axis]
        end = starts[axis] + counts[axis]
        for low, high in ((starts[axis], first), (last, end)):
            if low < high:
                cut_starts, cut_counts = list(starts), list(counts)
                cut_starts[axis], cut_counts[axis] = low, high - low
                rest.append(current.cut(cut_starts, cut_counts))
        starts[axis], counts[axis] = first, last - first
        current = current.cut(starts, counts)
    return rest


class Cover:
    """A set of elements, as disjoint boxes on common axes."""

    def __init__(self, chain: tuple[int, ...]) -> None:
        self.chain = chain
        self.boxes: list[Box] = []
        self._starts: NDArray[np.int64] = np.empty((16, len(chain)), np.int64)
        self._ends: NDArray[np.int64] = np.empty((16, len(chain)), np.int64)

    @property
    def count(self) -> int:
        """The number of elements in the set."""
        return sum(box.count for box in self.boxes)

    def overlapping(self, box: Box) -> list[Box]:
        """Returns the boxes that overlap ``box``."""
        held = len(self.boxes)
        starts = np.array(box.starts, np.int64)
        ends = starts + np.array(box.counts, np.int64)
        apart = (self._starts[:held] >= ends) | (self._ends[:held] <= starts)
        return [self.boxes[i] for i in np.flatnonzero(~apart.any(axis=1))]

    def shared(self, box: Box) -> list[Box]:
        """Returns the parts of ``box`` that are in the set."""
        found = (intersect(box, other) for other in self.overlapping(box))
        return [common[0] for common in found if common is not None]

    def take(self, box: Box) -> list[Box]:
        """Adds ``box`` to the set; returns the parts that were not in it before."""
        free = [box]
        for other in self.overlapping(box):
            free = [part for piece in free for part in subtract(piece, other)]
            if len(free) > MAX_PARTS:
                raise NotAffineError(f"more than {MAX_PARTS} boxes")
        for part in free:
            self._add(part)
        return free

    def _add(self, box: Box) -> None:
        held = len(self.boxes)
        if held == len(self._starts):
            self._starts = np.concatenate([self._starts, np.empty_like(self._starts)])
            self._ends = np.concatenate([self._ends, np.empty_like(self._ends)])
        self._starts[held] = box.starts
        self._ends[held] = np.add(box.starts, box.counts)
        self.boxes.append(box)


def through(read: Box, written: Box) -> AffineMap:
    """Composes two boxes of equal coordinates: from the origin of ``written`` to the target of
    ``read``."""
    dims = [
        (count, source, target)
        for count, source, target in zip(read.counts, written.others, read.others, strict=True)
        if count > 1
    ]
    return AffineMap(
        written.other,
        read.other,
        tuple(d[0] for d in dims),
        tuple(d[1] for d in dims),
        tuple(d[2] for d in dims),
    )
