"""Defines mirrors: host copies of the weights at one version, whole or in part."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltawire import codec
from deltawire.codec import Digest, Patch
from deltawire.errors import InputError
from deltawire.wire.run import Run, TensorSpec

Bits = NDArray[np.unsignedinteger[Any]]


class Elements(NamedTuple):
    """The range of elements ``start`` to ``stop`` (exclusive) of a tensor."""

    start: int
    stop: int


class PiecePatch(NamedTuple):
    """The changes in one piece: ``positions``, uint32[N], ascending, counted from ``start`` in the
    tensor ``name``; ``bits``, uint[N]. Takes half the memory of a `Patch` of the whole tensor."""

    name: str
    start: int
    positions: NDArray[np.uint32]
    bits: Bits


class Patches(Mapping[str, Patch]):
    """Patches by tensor name, each assembled from its pieces when it is looked up."""

    def __init__(self, pieces: Iterable[PiecePatch]) -> None:
        self._pieces: dict[str, list[PiecePatch]] = {}
        for piece in pieces:
            if len(piece.positions):
                self._pieces.setdefault(piece.name, []).append(piece)

    def __getitem__(self, name: str) -> Patch:
        """Returns the patch of one tensor; positions count from its first element."""
        pieces = sorted(self._pieces[name], key=lambda piece: piece.start)
        return Patch(
            np.concatenate([piece.positions.astype(np.int64) + piece.start for piece in pieces]),
            np.concatenate([piece.bits for piece in pieces]),
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


@dataclass
class Mirror:
    """Holds tensors as flat arrays of unsigned bits, at ``version``, with the whole model's digest.

    ``starts`` gives the first element held of tensors that are held in part; the others are held
    whole. ``held`` is the digest of the held elements, None if that is the whole model.

    Example::

        mirror = load_mirror(bucket, run)
        rows_of(mirror, run.tensors[0])  # an array in the tensor's shape
    """

    tensors: dict[str, Bits]
    version: int
    digest: Digest
    starts: dict[str, int] = field(default_factory=dict)
    held: Digest | None = None

    @property
    def held_digest(self) -> Digest:
        """The digest of the elements that are held."""
        return self.digest if self.held is None else self.held

    def copy(self, *, shared: Container[str] = ()) -> Mirror:
        """Returns a mirror with a copy of the memory, but for tensors in ``shared``, whose memory
        both have where that is possible."""
        tensors = {n: bits if n in shared else bits.copy() for n, bits in self.tensors.items()}
        return Mirror(tensors, self.version, self.digest, dict(self.starts), self.held)

    def fresh(self, run: Run) -> Mirror:
        """Returns an empty mirror of the whole model, in the same kind of memory."""
        return empty_mirror(run)

    def clear(self) -> None:
        """Sets all elements to zero, and takes the memory for them: first writes to fresh pages
        would slow the copy that a trainer waits for.
        """
        for bits in self.tensors.values():
            bits.fill(0)

    def touched(self, size: int) -> None:
        """Counts ``size`` bytes that were read or written, for mirrors that bound how much of
        their content is in memory."""

    def close(self) -> None:
        """Gives back what the mirror holds; do not use the tensors afterwards."""

    def find(self, name: str, start: int, count: int) -> Bits | None:
        """Returns the memory of elements ``start … start+count`` of a tensor, None unless all of
        them are held."""
        bits = self.tensors.get(name)
        at = start - self.starts.get(name, 0)
        if bits is None or at < 0 or at + count > bits.size:
            return None
        return bits[at : at + count]

    def move(
        self, pieces: Sequence[PiecePatch], version: int, digest: Digest, held: Digest | None
    ) -> None:
        """Applies pieces that were already checked, which moves the mirror to ``version``. Cannot
        fail for a reason that the check could have found.
        """
        self.begin()
        for piece in pieces:
            target = self.find(piece.name, piece.start, 1 + int(piece.positions[-1]))
            assert target is not None
            target[piece.positions] = piece.bits
        self.finish(version, digest, held)

    def begin(self) -> None:
        """Marks the content as no version until `finish`, because it is about to change."""
        self.version, self.held = -1, None

    def finish(self, version: int, digest: Digest, held: Digest | None) -> None:
        """Marks the content as ``version``."""
        self.version, self.digest, self.held = version, digest, held

    def compute_held(self) -> Digest:
        """Computes the digest of what is held, in one pass over it."""
        total = codec.ZERO
        for name, bits in self.tensors.items():
            total += codec.digest_bits(name, bits, self.starts.get(name, 0))
        return total


def select(
    run: Run, wanted: Mapping[str, tuple[int, int] | None] | Iterable[str] | None
) -> dict[str, Elements]:
    """Returns the elements that a mirror must hold of the tensors that are ``wanted``: names, or
    rows ``(first, end)`` of each (None: all rows). ``wanted=None`` is the whole model.

    Ranges are widened to whole chunks, because a piece is decoded whole. Raises `InputError` for a
    name that is not in the run, or rows that the tensor does not have.
    """
    specs = {spec.name: spec for spec in run.tensors}
    if wanted is None:
        return {name: Elements(0, spec.count) for name, spec in specs.items()}
    rows = dict(wanted) if isinstance(wanted, Mapping) else dict.fromkeys(wanted)
    spans: dict[str, Elements] = {}
    for alias, part in rows.items():
        name = run.aliases.get(alias, alias)
        if name not in specs:
            raise InputError(
                f"the run has no tensor {name[:80]!r}", hint="use the names in run.json"
            )
        found = _widened(specs[name], part, run.chunk)
        held = spans.get(name, found)
        spans[name] = Elements(min(held.start, found.start), max(held.stop, found.stop))
    return spans


def _widened(spec: TensorSpec, rows: tuple[int, int] | None, chunk: int) -> Elements:
    if rows is None:
        return Elements(0, spec.count)
    first, end = rows
    if not spec.shape or not 0 <= first <= end <= spec.shape[0]:
        raise InputError(
            f"tensor {spec.name} of shape {spec.shape} has no rows {first} to {end}",
            hint="give the first row and the row after the last",
        )
    width = spec.count // spec.shape[0] if spec.shape[0] else 0
    start = first * width // chunk * chunk
    return Elements(start, min(-(-end * width // chunk) * chunk, spec.count))


def rows_of(mirror: Mirror, spec: TensorSpec, rows: tuple[int, int] | None = None) -> Bits:
    """Returns rows ``(first, end)`` of a tensor in its shape, as a view of the mirror's memory.

    Raises `InputError` if the mirror does not hold them.
    """
    first, end = rows or (0, spec.shape[0] if spec.shape else 1)
    width = spec.count // spec.shape[0] if spec.shape and spec.shape[0] else spec.count
    bits = mirror.find(spec.name, first * width, (end - first) * width)
    if bits is None:
        raise InputError(
            f"the mirror does not hold rows {first} to {end} of {spec.name}",
            hint="load it with these rows in wanted",
        )
    return bits.reshape((end - first, *spec.shape[1:]) if spec.shape else ())


def empty_mirror(run: Run, spans: Mapping[str, Elements] | None = None) -> Mirror:
    """Allocates a mirror in private memory that holds no version yet.

    Raises `InputError` if the model that run.json states does not fit into this machine's memory.
    """
    spans = select(run, None) if spans is None else spans
    dtypes = {spec.name: codec.unsigned_of(spec.dtype) for spec in run.tensors}
    total = sum((span.stop - span.start) * dtypes[n].itemsize for n, span in spans.items())
    if total > (room := memory_bytes()):
        raise InputError(
            f"the model needs {total} bytes; this machine has {room} bytes of memory",
            hint="use a larger machine, or load only some of the tensors",
        )
    tensors: dict[str, Bits] = {
        name: np.empty(span.stop - span.start, dtypes[name]) for name, span in spans.items()
    }
    return Mirror(tensors, -1, codec.ZERO, starts_of(spans))


def starts_of(spans: Mapping[str, Elements]) -> dict[str, int]:
    """Returns the first element of each partly held tensor, as `Mirror` takes it."""
    return {name: span.start for name, span in spans.items() if span.start}


def memory_bytes() -> int:
    """Returns the size of this machine's memory in bytes."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 1 << 62
