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

from deltawire.codec import delta
from deltawire.codec import patch as patches
from deltawire.codec.anchors import decode_full, encode_full
from deltawire.codec.digest import (
    ZERO,
    Digest,
    digest_bits,
    digest_model,
    digest_patch,
    tensor_key,
)
from deltawire.codec.dtypes import ITEMSIZE, Bits, bits_of, dtype_of, unsigned_of
from deltawire.codec.patch import Patch, diff, undo

__all__ = [
    "ITEMSIZE",
    "ZERO",
    "Bits",
    "Digest",
    "Patch",
    "apply",
    "bits_of",
    "decode",
    "decode_full",
    "decode_patch",
    "diff",
    "digest_bits",
    "digest_model",
    "digest_patch",
    "dtype_of",
    "encode",
    "encode_full",
    "tensor_key",
    "undo",
    "unsigned_of",
]


def encode(base: object, target: object, *, dtype: str | None = None) -> bytes:
    """The delta from ``base`` to ``target``, never more than target's raw bytes and 64.

    Both are contiguous arrays or CPU tensors of COUNT elements and one dtype: of ``dtype``, a wire
    dtype, if it is given. Naming it matters for bits that are carried as integers: floats are
    coded in half the space when they are known to be floats. Raises InputError if they are not.
    """
    layout = delta.layout_of(dtype or dtype_of(target))
    return delta.encode(bits_of(base, dtype), bits_of(target, dtype), layout)


def decode(payload: bytes | memoryview, base: object, *, dtype: str | None = None) -> Bits:
    """The bits of the target that ``payload`` was encoded for, uint[COUNT], in new memory.

    ``base`` is as it was for ``encode``. Raises CorruptError if the payload is not a delta for
    such a base, InputError if ``base`` is not a contiguous array or CPU tensor of ``dtype``.
    """
    base_bits = bits_of(base, dtype)
    patch = delta.decode_patch(payload, base_bits)
    target_bits = base_bits.copy()
    patches.apply(patch, target_bits)
    return target_bits


def decode_patch(payload: bytes | memoryview, base: object, *, dtype: str | None = None) -> Patch:
    """The positions and new bits that ``payload`` holds; ``base`` and errors as for ``decode``."""
    return delta.decode_patch(payload, bits_of(base, dtype))


def apply(patch: Patch, target: object) -> None:
    """Write ``patch`` into ``target``, a contiguous array or CPU tensor, in place.

    Raises CorruptError if a position is out of bounds, and InputError if the widths differ or the
    array is read-only; then nothing has been written.
    """
    patches.apply(patch, bits_of(target))
