"""The mirror: a host copy of the weights at one version, whole or in part."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltawire import codec
from deltawire.codec import Digest, Patch
from deltawire.errors import InputError
from deltawire.wire.run import Run, TensorSpec

Bits = NDArray[np.unsignedinteger[Any]]


class Span(NamedTuple):
    """Elements ``start`` to ``stop`` of a tensor."""

    start: int
    stop: int


class PiecePatch(NamedTuple):
    """What changes in one piece: ``positions``, uint32[N], ascending and counted from ``start`` in
    the tensor ``name``; ``bits``, uint[N]. Half the memory of a `Patch` of the whole tensor."""

    name: str
    start: int
    positions: NDArray[np.uint32]
    bits: Bits


class Patches(Mapping[str, Patch]):
    """Patches by tensor name, each made of its pieces when it is asked for and not before."""

    def __init__(self, pieces: Iterable[PiecePatch]) -> None:
        self._pieces: dict[str, list[PiecePatch]] = {}
        for piece in pieces:
            if len(piece.positions):
                self._pieces.setdefault(piece.name, []).append(piece)

    def __getitem__(self, name: str) -> Patch:
        """The patch of one tensor: positions counted from its first element."""
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
    """Tensors' bits as flat unsigned arrays, at ``version``, with the whole model's digest.

    ``starts`` says for a tensor that is held in part which of its elements comes first; the
    others are held whole. ``held`` is the digest of what is held: that of the model, if all is.
    """

    tensors: dict[str, Bits]
    version: int
    digest: Digest
    starts: dict[str, int] = field(default_factory=dict)
    held: Digest | None = None

    @property
    def held_digest(self) -> Digest:
        """The digest of what is held."""
        return self.digest if self.held is None else self.held

    def copy(self) -> Mirror:
        """A mirror of its own memory."""
        tensors = {name: bits.copy() for name, bits in self.tensors.items()}
        return Mirror(tensors, self.version, self.digest, dict(self.starts), self.held)

    def find(self, name: str, start: int, count: int) -> Bits | None:
        """The memory of elements ``start … start+count`` of a tensor, None if it holds none of
        them."""
        bits = self.tensors.get(name)
        at = start - self.starts.get(name, 0)
        if bits is None or at < 0 or at + count > bits.size:
            return None
        return bits[at : at + count]

    def move(
        self, pieces: Sequence[PiecePatch], version: int, digest: Digest, held: Digest | None
    ) -> None:
        """Move forward by pieces that were checked before. Nothing in here can fail for a reason
        that checking could have found."""
        self.begin()
        for piece in pieces:
            target = self.find(piece.name, piece.start, 1 + int(piece.positions[-1]))
            assert target is not None
            target[piece.positions] = piece.bits
        self.finish(version, digest, held)

    def begin(self) -> None:
        """Something is about to be written that makes this no version at all, until `finish`."""
        self.version, self.held = -1, None

    def finish(self, version: int, digest: Digest, held: Digest | None) -> None:
        """What is held is a version again."""
        self.version, self.digest, self.held = version, digest, held

    def compute_held(self) -> Digest:
        """The digest of what is held, by one pass over it."""
        total = codec.ZERO
        for name, bits in self.tensors.items():
            total += codec.digest_bits(name, bits, self.starts.get(name, 0))
        return total


def select(
    run: Run, wanted: Mapping[str, tuple[int, int] | None] | Iterable[str] | None
) -> dict[str, Span]:
    """The spans that a mirror must hold for the tensors that are ``wanted``: their names, or rows
    ``(first, end)`` of each (None: all of it). ``None`` is the whole model.

    Spans are widened to whole chunks, because a piece is decoded whole. Raises `InputError` for a
    name that is not in the run, or rows that the tensor does not have.
    """
    specs = {spec.name: spec for spec in run.tensors}
    if wanted is None:
        return {name: Span(0, spec.count) for name, spec in specs.items()}
    rows = dict(wanted) if isinstance(wanted, Mapping) else dict.fromkeys(wanted)
    spans: dict[str, Span] = {}
    for alias, part in rows.items():
        name = run.aliases.get(alias, alias)
        if name not in specs:
            raise InputError(f"the run has no tensor {name[:80]!r}")
        found = _widened(specs[name], part, run.chunk)
        held = spans.get(name, found)
        spans[name] = Span(min(held.start, found.start), max(held.stop, found.stop))
    return spans


def _widened(spec: TensorSpec, rows: tuple[int, int] | None, chunk: int) -> Span:
    if rows is None:
        return Span(0, spec.count)
    first, end = rows
    if not spec.shape or not 0 <= first <= end <= spec.shape[0]:
        raise InputError(f"tensor {spec.name} of shape {spec.shape} has no rows {first} to {end}")
    width = spec.count // spec.shape[0] if spec.shape[0] else 0
    start = first * width // chunk * chunk
    return Span(start, min(-(-end * width // chunk) * chunk, spec.count))


def rows_of(mirror: Mirror, spec: TensorSpec, rows: tuple[int, int] | None = None) -> Bits:
    """Rows ``(first, end)`` of a tensor in its shape, a view of the mirror's own memory.

    Raises `InputError` if the mirror does not hold them.
    """
    first, end = rows or (0, spec.shape[0] if spec.shape else 1)
    width = spec.count // spec.shape[0] if spec.shape and spec.shape[0] else spec.count
    bits = mirror.find(spec.name, first * width, (end - first) * width)
    if bits is None:
        raise InputError(f"the mirror does not hold rows {first} to {end} of {spec.name}")
    return bits.reshape((end - first, *spec.shape[1:]) if spec.shape else ())


def empty_mirror(run: Run, spans: Mapping[str, Span] | None = None) -> Mirror:
    """A mirror in private memory that holds no version yet.

    Raises `InputError` if the model that run.json states does not fit into this machine.
    """
    spans = select(run, None) if spans is None else spans
    dtypes = {spec.name: codec.unsigned_of(spec.dtype) for spec in run.tensors}
    total = sum((span.stop - span.start) * dtypes[n].itemsize for n, span in spans.items())
    if total > (room := memory_bytes()):
        raise InputError(
            f"the model has {total} bytes, this machine's memory {room}",
            hint="take a larger machine, or a part of the tensors",
        )
    tensors: dict[str, Bits] = {
        name: np.empty(span.stop - span.start, dtypes[name]) for name, span in spans.items()
    }
    return Mirror(tensors, -1, codec.ZERO, starts_of(spans))


def starts_of(spans: Mapping[str, Span]) -> dict[str, int]:
    """Where partly held tensors start, as `Mirror` wants it."""
    return {name: span.start for name, span in spans.items() if span.start}


def memory_bytes() -> int:
    """How much memory this machine has."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 1 << 62
