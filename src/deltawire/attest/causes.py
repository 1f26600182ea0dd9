"""Names the cause of a difference: a transformation of known weights that gives exactly these bits.

A digest is compared with that of each candidate, so the elements are needed on one side only, and a
cause is never a guess: two sets of bits with one digest are one chance in 2^64. Which rows hold
other weights is found from one digest too: the change of the digest is the sum of the changes of
those rows, and a range of rows is the difference of two running sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from deltawire import codec
from deltawire.attest.places import CHUNK_ELEMENTS, Place
from deltawire.attest.sides import Side
from deltawire.codec import Bits, Digest

CAUSES = {
    "zeros": "all elements are zero",
    "version": "the weights of another given version",
    "scales": "the scales of another given version, with the weights of the reference",
    "exchanged": "two tensors in each other's places",
    "tensor": "the weights of another tensor of the reference",
    "transposed": "the last two dimensions exchanged",
    "scaled": "multiplied by a power of two",
    "rank": "rows or columns of another rank",
    "untied": "tied in the reference, with other values here",
}
"""The words for causes, and what they mean."""

SCALES = (2.0, 0.5, 4.0, 0.25, -1.0)
RANKS = (2, 3, 4, 8, 16)
MAX_ALIKE = 512
"""Tensors of the same shape that are tried in a tensor's place."""
MAX_ROWS = 1 << 18

Found = TypeVar("Found")

_FLOATS = {"F16": np.float16, "F32": np.float32, "F64": np.float64}


class Cause(NamedTuple):
    """A word of `CAUSES`, a sentence, and the rows that it is about if these are not all."""

    kind: str
    text: str
    rows: tuple[int, int] | None = None


class Known:
    """The weights that candidates are made of. ``asked`` says whether a cause was looked for,
    ``failed`` why it could not be."""

    def __init__(self, reference: Side, found: Side, others: Callable[[], Sequence[Side]]) -> None:
        self.reference = reference
        self.found = found
        self._others = others
        self.asked = False
        self.failed = ""

    def tried(self, find: Callable[[], Found | None]) -> Found | None:
        """Returns what ``find`` does; None if it fails with any error, such as for a file that was
        replaced meanwhile. A difference that was found is one without a cause too."""
        try:
            return find()
        except Exception as error:
            self.failed = f"{type(error).__name__}: {str(error)[:200]}"
            return None

    @property
    def has_elements(self) -> bool:
        """Returns whether one side has elements."""
        return self.reference.elements is not None or self.found.elements is not None

    @cached_property
    def others(self) -> list[Side]:
        """The further versions."""
        return list(self._others())

    @cached_property
    def disagreeing(self) -> frozenset[str]:
        """The found tensors of which ranks hold different copies."""
        return frozenset(self.found.digests.copies_disagree)

    @cached_property
    def alike(self) -> dict[tuple[tuple[int, ...], str], list[str]]:
        """The names of the reference's tensors by shape and dtype, at most `MAX_ALIKE` + 1."""
        groups: dict[tuple[tuple[int, ...], str], list[str]] = {}
        for tensor in self.reference.digests.tensors:
            group = groups.setdefault((tensor.shape, tensor.dtype), [])
            if len(group) <= MAX_ALIKE:
                group.append(tensor.name)
        return groups

    @cached_property
    def alias_of(self) -> dict[str, str]:
        """One further name of each tensor that the reference ties."""
        return {name: alias for alias, name in self.reference.digests.aliases.items()}


def name_cause(name: str, place: Place, digest: Digest, known: Known) -> Cause | None:
    """Returns the first cause that gives ``digest`` at ``place`` of a tensor, None if none does."""
    known.asked = True
    spec = known.reference.digests.by_name[known.reference.digests.aliases.get(name, name)]
    # A file without elements may state any size: zeros never take more memory than a part.
    if place.count <= spec.spec.count and _digest_of_zeros(name, place, spec.dtype) == digest:
        return Cause("zeros", "all elements are zero")
    for find in (_of_other_versions, _of_other_tensors, _of_transformed, _of_rows):
        cause = find(name, place, digest, known)
        if cause is not None:
            return cause
    return None


def _digest_of_zeros(name: str, whole: Place, dtype: str) -> Digest:
    """Returns the digest of a tensor of zeros, computed in parts."""
    zeros = np.zeros(min(whole.count, CHUNK_ELEMENTS), codec.unsigned_of(dtype))
    total = codec.ZERO
    for first in range(0, whole.count, CHUNK_ELEMENTS):
        total += codec.digest_bits(name, zeros[: whole.count - first], first)
    return total


def _of_other_versions(name: str, place: Place, digest: Digest, known: Known) -> Cause | None:
    for other in known.others:
        held = other.digests.by_name.get(name)
        if held is None or held.shape != place.shape or held.digest != digest.hex():
            continue
        if is_scale(name) and _weight_is_equal(name, known):
            return Cause("scales", f"these are the scales of {other.name}; the weights are newer")
        return Cause("version", f"these are the weights of {other.name}")
    return None


def is_scale(name: str) -> bool:
    """Returns whether a tensor holds the scales of another one."""
    return "scale" in name.rpartition(".")[2]


def _weight_is_equal(name: str, known: Known) -> bool:
    """Returns whether the weight that the scales belong to is the reference's."""
    last = name.rpartition(".")[2]
    for end in ("_scale_inv", "_scale"):
        if last.endswith(end):
            weight = name[: -len(end)]
            ours = known.found.digests.by_name.get(weight)
            return ours is not None and ours == known.reference.digests.by_name.get(weight)
    return False


def _of_other_tensors(name: str, place: Place, digest: Digest, known: Known) -> Cause | None:
    tensor = known.reference.digests.by_name.get(name)
    if tensor is None:
        return None
    alike = [one for one in known.alike.get((place.shape, tensor.dtype), []) if one != name]
    for candidate in alike[:MAX_ALIKE]:
        if not _holds(name, place, digest, candidate, known):
            continue
        held = known.found.digests.by_name.get(candidate)
        back = held is not None and _holds(
            candidate, place, Digest.from_hex(held.digest), name, known
        )
        if back:
            return Cause("exchanged", f"it is exchanged with {candidate}")
        return Cause("tensor", f"these are the weights of {candidate}")
    return None


def _holds(name: str, place: Place, digest: Digest, other: str, known: Known) -> bool:
    """Returns whether the found tensor ``name`` has the reference's bits of ``other``."""
    bits = known.reference.values(other)
    if bits is not None:
        return place.digest(name, bits) == digest
    bits = known.found.values(name)
    if bits is None:
        return False
    return place.digest(other, bits).hex() == known.reference.digests.by_name[other].digest


def _of_transformed(name: str, place: Place, digest: Digest, known: Known) -> Cause | None:
    """Transforms the reference's elements, or else undoes the same in the found ones."""
    reference = known.reference.digests
    spec = reference.by_name[reference.aliases.get(name, name)]
    bits = known.reference.values(name)
    if bits is not None:
        for cause, made in _transformed(bits.reshape(spec.shape), spec.dtype, undo=False):
            if made.shape == place.shape and place.digest(name, _flat(made)) == digest:
                return cause
        return None
    bits = known.found.values(name)
    if bits is None or name not in reference.by_name:
        return None
    whole = Place.whole(spec.spec)
    goal = Digest.from_hex(spec.digest)
    for cause, made in _transformed(bits.reshape(place.shape), spec.dtype, undo=True):
        if made.shape == spec.shape and whole.digest(name, _flat(made)) == goal:
            return cause
    return None


def _flat(bits: NDArray[np.unsignedinteger]) -> Bits:
    return np.ascontiguousarray(bits).reshape(-1)


def _transformed(bits: Bits, dtype: str, *, undo: bool) -> Iterator[tuple[Cause, Bits]]:
    if bits.ndim >= 2:
        turned = np.swapaxes(bits, -1, -2)
        yield Cause("transposed", "the last two dimensions are exchanged"), turned
        # The bytes of the transposed matrix in the shape of the original one.
        mixed = np.swapaxes(bits.reshape(turned.shape), -1, -2) if undo else turned
        text = "the last two dimensions are exchanged, in the shape of the original"
        yield Cause("transposed", text), np.ascontiguousarray(mixed).reshape(bits.shape)
    for factor in SCALES:
        scaled = scaled_bits(_flat(bits), dtype, 1 / factor if undo else factor)
        if scaled is not None:
            yield Cause("scaled", f"multiplied by {factor:g}"), scaled.reshape(bits.shape)
    for axis, word in enumerate(("rows", "columns")[: bits.ndim]):
        for ranks in RANKS:
            if not bits.shape[axis] or bits.shape[axis] % ranks:
                continue
            parts = np.split(bits, ranks, axis)
            for turn in range(1, ranks):
                turned = np.concatenate(parts[turn:] + parts[:turn], axis)
                if undo:
                    turned = np.concatenate(parts[-turn:] + parts[:-turn], axis)
                text = f"each of {ranks} ranks has the {word} of the rank {turn} after it"
                yield Cause("rank", text), turned
            for source in () if undo else range(ranks):
                text = f"each of {ranks} ranks has the {word} of rank {source}"
                yield Cause("rank", text), np.concatenate([parts[source]] * ranks, axis)


def scaled_bits(bits: Bits, dtype: str, factor: float) -> Bits | None:
    """Multiplies values by a factor and rounds them to the dtype; None for a dtype without
    arithmetic here."""
    with np.errstate(all="ignore"):
        if dtype in _FLOATS:
            values = bits.view(_FLOATS[dtype]) * _FLOATS[dtype](factor)
            found: Bits = values.view(bits.dtype)
            return found
        if dtype == "BF16":
            wide = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
            product = (wide * np.float32(factor)).view(np.uint32)
            # A power of two changes no digit, so the lower half stays zero but for tiny numbers.
            return (product >> np.uint32(16)).astype(np.uint16)
    return None


def _of_rows(name: str, place: Place, digest: Digest, known: Known) -> Cause | None:
    """Finds one range of rows that are zero or of another version, while the others are those of
    the reference."""
    bits = known.reference.values(name)
    if bits is None or not place.shape or place.shape[0] > MAX_ROWS or place.count != bits.size:
        return None
    rows = place.rows()
    width = place.count // len(rows) if rows else 0
    if not width:
        return None
    own = [row.digest(name, bits[n * width : (n + 1) * width]) for n, row in enumerate(rows)]
    change = digest - sum(own, codec.ZERO)
    zeros = np.zeros(width, bits.dtype)
    span = _range_of([row.digest(name, zeros) for row in rows], own, change)
    if span is not None:
        return Cause("zeros", f"{_rows_text(span)} are zero", span)
    for other in known.others:
        held = other.values(name)
        if held is None or held.size != bits.size or held.dtype != bits.dtype:
            continue
        theirs = [row.digest(name, held[n * width : (n + 1) * width]) for n, row in enumerate(rows)]
        span = _range_of(theirs, own, change)
        if span is not None:
            return Cause("version", f"{_rows_text(span)} are those of {other.name}", span)
    return None


def _rows_text(span: tuple[int, int]) -> str:
    first, end = span
    return f"row {first}" if end == first + 1 else f"rows {first} to {end - 1}"


def _range_of(
    others: Sequence[Digest], own: Sequence[Digest], change: Digest
) -> tuple[int, int] | None:
    """Returns the shortest range of rows whose exchange for the others' gives the change. Rows that
    are the same on both sides do not count at its ends."""
    running = codec.ZERO
    last_at = {running: 0}
    best: tuple[int, int] | None = None
    for number, (other, mine) in enumerate(zip(others, own, strict=True)):
        running += other - mine
        first = last_at.get(running - change)
        if first is not None and (best is None or number + 1 - first < best[1] - best[0]):
            best = (first, number + 1)
        last_at[running] = number + 1
    return best
