"""The codec: lossless deltas and whole copies of a tensor's bits, and the digest of a model.

    payload = encode(base, target)          # what changed, as bytes
    patch = decode_patch(payload, base)     # positions and new bits
    apply(patch, base)                      # base now holds target's bits

``encode``, ``decode``, ``decode_patch`` and ``apply`` take NumPy arrays (``ml_dtypes`` included)
and CPU torch tensors, all contiguous. The rest takes bits: the unsigned, one-dimensional view that
``bits_of`` gives. A base and a target may be whole tensors or the same piece of each.

Legend: COUNT = elements of the tensor or piece; uint = unsigned integers of an element's width.
"""

from __future__ import annotations

from collections.abc import Sequence

from deltawire.codec import delta, packed
from deltawire.codec import patch as patches
from deltawire.codec.anchors import decode_full, encode_full
from deltawire.codec.delta import ChangedRange, Delta
from deltawire.codec.digest import (
    ZERO,
    Digest,
    digest_at,
    digest_bits,
    digest_model,
    digest_patch,
    digest_rounded,
    tensor_key,
)
from deltawire.codec.dtypes import ITEMSIZE, Bits, bits_of, dtype_of, unsigned_of
from deltawire.codec.patch import Patch, diff, undo

__all__ = [
    "ITEMSIZE",
    "ZERO",
    "Bits",
    "ChangedRange",
    "Delta",
    "Digest",
    "Patch",
    "advance",
    "apply",
    "bits_of",
    "decode",
    "decode_full",
    "decode_named",
    "decode_patch",
    "diff",
    "digest_at",
    "digest_bits",
    "digest_model",
    "digest_patch",
    "digest_rounded",
    "dtype_of",
    "encode",
    "encode_batch",
    "encode_full",
    "encode_named",
    "tensor_key",
    "undo",
    "unsigned_of",
]


def encode(
    base: object,
    target: object,
    *,
    dtype: str | None = None,
    threads: int | None = None,
    columns: int | None = None,
) -> bytes:
    """Encodes the delta from ``base`` to ``target``: at most 20 bytes more than the raw target.

    Both are contiguous arrays or CPU tensors of COUNT elements and one dtype: of ``dtype``, a wire
    dtype, if it is given. Naming it matters for bits that are carried as integers: known floats
    take half the space. So does ``columns``, the length of the tensor's rows, for arrays that lost
    their shape. ``threads`` defaults to the number of cores. Raises InputError if the arrays do not
    meet these conditions.
    """
    return _encode(None, base, target, dtype=dtype, threads=threads, columns=columns).payload


def encode_named(
    name: str,
    base: object,
    target: object,
    *,
    start: int = 0,
    dtype: str | None = None,
    threads: int | None = None,
    columns: int | None = None,
) -> Delta:
    """`encode` for elements ``start`` and on of the tensor ``name``, in one pass with what its
    model's digest gains: ``(payload, changed, moved)``.

    A tensor whose name says that its elements hold 4-bit codes is coded code by code if that takes
    fewer bytes (`deltawire.codec.packed`).
    """
    return _encode(name, base, target, start=start, dtype=dtype, threads=threads, columns=columns)


def encode_batch(changes: Sequence[ChangedRange], *, dtype: str) -> list[Delta]:
    """`encode_named` of many small changes of one wire dtype, in one native call.

    A model of 60,000 small tensors takes longer to hand over one by one than to code. Raises
    InputError as `encode_named` does.
    """
    coded = delta.encode_batch(changes, delta.layout_of(dtype))
    return [
        _smaller(one, change.name, change.base_bits, change.target_bits, change.columns, threads=1)
        for one, change in zip(coded, changes, strict=True)
    ]


def _encode(
    name: str | None,
    base: object,
    target: object,
    *,
    start: int = 0,
    dtype: str | None,
    threads: int | None,
    columns: int | None,
) -> Delta:
    layout = delta.layout_of(dtype or dtype_of(target))
    if columns is None:
        shape: tuple[int, ...] = target.shape  # type: ignore[attr-defined]
        columns = shape[-1] if len(shape) > 1 else 0
    base_bits, target_bits = bits_of(base, dtype), bits_of(target, dtype)
    coded = delta.encode(
        base_bits, target_bits, layout, columns=columns, threads=threads, name=name, start=start
    )
    return _smaller(coded, name or "", base_bits, target_bits, columns, threads=threads)


def _smaller(
    coded: Delta,
    name: str,
    base_bits: Bits,
    target_bits: Bits,
    columns: int,
    *,
    threads: int | None,
) -> Delta:
    """Returns a delta with the smaller payload: as it is, or by 4-bit codes if its tensor's name
    says that its elements hold such."""
    codes = packed.codes_of(name, base_bits.itemsize) if coded.changed else None
    if codes is None:
        return coded
    payload = packed.encode_packed(base_bits, target_bits, codes, columns=columns, threads=threads)
    return coded._replace(payload=payload) if len(payload) < len(coded.payload) else coded


def decode(
    payload: bytes | memoryview,
    base: object,
    *,
    dtype: str | None = None,
    threads: int | None = None,
) -> Bits:
    """Decodes the bits of the target that ``payload`` was encoded for: uint[COUNT], in new memory.

    ``base`` is as it was for ``encode``. Raises CorruptError if the payload is not a delta for this
    base, InputError if ``base`` is not a contiguous array or CPU tensor of ``dtype``.
    """
    target_bits = bits_of(base, dtype).copy()
    advance(payload, target_bits, threads=threads)
    return target_bits


def decode_patch(
    payload: bytes | memoryview,
    base: object,
    *,
    dtype: str | None = None,
    threads: int | None = None,
) -> Patch:
    """Decodes the positions and new bits that ``payload`` holds; ``base`` and errors as for
    ``decode``.
    """
    if packed.is_packed(payload):
        return packed.decode_packed(payload, bits_of(base, dtype), threads=threads)
    return delta.decode_patch(payload, bits_of(base, dtype), threads=threads)


def decode_named(
    payload: bytes | memoryview,
    name: str,
    base: object,
    *,
    start: int = 0,
    dtype: str | None = None,
    threads: int | None = None,
) -> tuple[Patch, Digest]:
    """`decode_patch` of a delta for elements ``start`` and on of the tensor ``name``, in one pass
    with what its model's digest gains."""
    base_bits = bits_of(base, dtype)
    if packed.is_packed(payload):
        patch = packed.decode_packed(payload, base_bits, threads=threads)
        return patch, digest_patch(name, patch, base_bits[patch.positions], start=start)
    return delta.decode_moved(payload, base_bits, name, start=start, threads=threads)


def advance(
    payload: bytes | memoryview,
    base: object,
    *,
    dtype: str | None = None,
    threads: int | None = None,
) -> int:
    """Turns ``base`` into the target, in place; returns how many elements changed. Takes the memory
    of a few blocks, and for 4-bit codes twice that of the base.

    Use it for payloads that were verified: if CorruptError is raised, some blocks may already have
    been applied.
    """
    bits = bits_of(base, dtype)
    if packed.is_packed(payload):
        patch = packed.decode_packed(payload, bits, threads=threads)
        patches.apply(patch, bits)
        return len(patch)
    return delta.advance(payload, bits, threads=threads)


def apply(patch: Patch, target: object) -> None:
    """Writes ``patch`` into ``target``, a contiguous array or CPU tensor, in place.

    Raises CorruptError if a position is out of bounds, and InputError if the widths differ or the
    array is read-only; then nothing has been written.
    """
    patches.apply(patch, bits_of(target))
