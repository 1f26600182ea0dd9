"""Composes several steps of a chain into one, to exactly the requested version.

Ranks of one engine may take different routes to a version, one over a compacted delta and another
over single deltas, because they hold different pieces. They must swap to the same version.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from deltawire.codec import Bits
from deltawire.sync import Mirror, Subscriber, Update
from deltawire.sync.follow.mirror import PiecePatch


def step_to(subscriber: Subscriber, version: int) -> Update | None:
    """Returns the verified step from the mirror's version to ``version``, None if the mirror
    already holds it.

    Raises what `Subscriber.prepare_to` does. The mirror is unchanged afterwards; but a route of
    several edges is applied to it and undone, so it must not be read meanwhile.
    """
    began = time.perf_counter()
    first = subscriber.prepare_to(version)
    if first is None or first.version == version:
        return first
    mirror = subscriber.mirror
    base, base_digest, base_held = mirror.version, mirror.digest, mirror.held
    walked: list[tuple[Update, list[PiecePatch]]] = []
    following: Update | None = first
    try:
        while following is not None:
            walked.append((following, _old(mirror, following)))
            _move(mirror, following)
            following = subscriber.prepare_to(version)
        target, held = mirror.digest, mirror.held_digest
    finally:
        for _, old in reversed(walked):
            mirror.move(old, base, base_digest, base_held)
    pieces = _composed([update for update, _ in walked], mirror)
    fetched = sum(update.bytes for update, _ in walked)
    spent_ms = (time.perf_counter() - began) * 1e3
    return Update(base, version, target, pieces, held, fetched, spent_ms)


def _move(mirror: Mirror, update: Update) -> None:
    mirror.move(update.pieces, update.version, update.digest, update.held)


def _old(mirror: Mirror, update: Update) -> list[PiecePatch]:
    """Returns the pieces that undo an update."""
    found = []
    for piece in update.pieces:
        held = mirror.find(piece.name, piece.start, 1 + int(piece.positions[-1]))
        assert held is not None
        found.append(piece._replace(bits=held[piece.positions]))
    return found


def _composed(updates: list[Update], mirror: Mirror) -> list[PiecePatch]:
    """Combines updates: keeps each element's last change, and drops those that returned to their
    first value."""
    names = dict.fromkeys(name for update in updates for name in update.patches)
    composed = []
    for name in names:
        patches = [update.patches[name] for update in updates if name in update.patches]
        positions = np.concatenate([patch.positions for patch in reversed(patches)])
        bits = np.concatenate([patch.bits for patch in reversed(patches)])
        unique, last = np.unique(positions, return_index=True)
        start = mirror.starts.get(name, 0)
        changed = mirror.tensors[name][unique - start] != bits[last]
        unique, bits = unique[changed], bits[last][changed]
        if unique.size:
            composed += _pieces(name, unique, bits)
    return composed


def _pieces(name: str, positions: NDArray[np.int64], bits: Bits) -> list[PiecePatch]:
    """Splits a patch into pieces with 32-bit positions."""
    first, last = int(positions[0]), int(positions[-1])
    starts = range(first, last + 1, 1 << 31)
    cuts = np.searchsorted(positions, starts)
    return [
        PiecePatch(name, start, (positions[low:high] - start).astype(np.uint32), bits[low:high])
        for start, low, high in zip(starts, cuts, [*cuts[1:], positions.size], strict=True)
        if low < high
    ]
