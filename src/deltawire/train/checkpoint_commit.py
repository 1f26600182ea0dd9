"""Defines the commit of a trainer's state: where the shards of its tensors lie.

It imports no tensor library, so that a fork that shares a state starts at once.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from deltawire.errors import CorruptError
from deltawire.wire.ledger import Ledger
from deltawire.wire.objects import FORMAT, decode_json, encode_json
from deltawire.wire.payload import Index
from deltawire.wire.run import Hash

if TYPE_CHECKING:
    from torch import Tensor

MAX_CHUNKS = 1 << 20
MAX_COMMIT_BYTES = 256 << 20
MAX_TENSORS = 1 << 22

_Extent = Annotated[list[Index], Meta(max_length=16)]


class StoredShard(msgspec.Struct, frozen=True):
    """One shard of a tensor: its box, and where its bytes lie in which part."""

    offsets: _Extent
    sizes: _Extent
    part: Index
    start: Index
    hash: Hash


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor of a state: torch's name of its dtype, its whole shape, and its shards."""

    dtype: Annotated[str, Meta(max_length=16)]
    shape: _Extent
    chunks: Annotated[list[StoredShard], Meta(max_length=MAX_CHUNKS)]

    def check(self, name: str, like: Tensor, *, run: str, key: str) -> None:
        """Raises `CorruptError` unless the shards make up a tensor of the shape and dtype of
        ``like``."""
        dtype = str(like.dtype).removeprefix("torch.")
        fits = (self.dtype, tuple(self.shape)) == (dtype, tuple(like.shape))
        inside = all(
            len(chunk.offsets) == len(chunk.sizes) == len(self.shape)
            and all(
                offset + size <= length
                for offset, size, length in zip(chunk.offsets, chunk.sizes, self.shape, strict=True)
            )
            for chunk in self.chunks
        )
        whole = sum(math.prod(chunk.sizes) for chunk in self.chunks) == math.prod(self.shape)
        if not (fits and inside and whole):
            raise CorruptError(
                f"the checkpoint does not fit the model at {name[:80]}", run=run, key=key
            )


_PackedShard = tuple[_Extent, _Extent, Index, Index]
_Row = tuple[
    Annotated[str, Meta(max_length=16)],
    _Extent,
    Annotated[list[_PackedShard], Meta(max_length=MAX_CHUNKS)],
]


def pack_table(tensors: Mapping[str, TensorEntry]) -> bytes:
    """Packs a table of tensors into about a fifth of its bytes as JSON: its rows, and the 32 bytes
    of each shard's hash in their order, as MessagePack in zlib's format."""
    rows = {
        name: (
            entry.dtype,
            entry.shape,
            [(shard.offsets, shard.sizes, shard.part, shard.start) for shard in entry.chunks],
        )
        for name, entry in tensors.items()
    }
    hashes = (bytes.fromhex(shard.hash) for entry in tensors.values() for shard in entry.chunks)
    return zlib.compress(msgspec.msgpack.encode((rows, b"".join(hashes))), 9)


def unpack_table(table: bytes, *, limit: int, run: str, key: str) -> dict[str, TensorEntry]:
    """Returns the tensors of `pack_table`; raises `CorruptError` for a table that is damaged, or of
    more than ``limit`` bytes."""
    try:
        inflater = zlib.decompressobj()
        data = inflater.decompress(table, limit)
        if not inflater.eof:
            raise CorruptError("a table of tensors is cut short or too large", run=run, key=key)
        rows, packed = msgspec.msgpack.decode(data, type=tuple[dict[str, _Row], bytes])
    except (zlib.error, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptError(f"a table of tensors: {error}", run=run, key=key) from error
    shards = sum(len(chunks) for _, _, chunks in rows.values())
    if len(packed) != 32 * shards:
        raise CorruptError("a table of tensors has no hash for each shard", run=run, key=key)
    hashes = (packed[at : at + 32].hex() for at in range(0, 32 * shards, 32))
    return {
        name: TensorEntry(dtype, shape, [StoredShard(*shard, next(hashes)) for shard in chunks])
        for name, (dtype, shape, chunks) in rows.items()
    }


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """Commits a state: its tensors, in shards of ``ranks`` processes. ``digest`` is that of the
    weights published at ``version`` of the run ``run``. The object in the bucket of a fork has the
    tensors in ``table``; that of a trainer in ``tensors``, which earlier releases read."""

    format: int = FORMAT
    run: Annotated[str, Meta(max_length=64)] = ""
    version: Index
    digest: Annotated[str, Meta(max_length=32)]
    ranks: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    tensors: Annotated[dict[str, TensorEntry], Meta(max_length=MAX_TENSORS)] = {}
    table: bytes = b""
    ledger: Ledger

    def encode(self, *, packed: bool = False) -> bytes:
        """Returns the bytes of the object; ``packed``, earlier releases do not read it."""
        if not packed:
            return encode_json(self)
        small = msgspec.structs.replace(self, tensors={}, table=pack_table(self.tensors))
        return encode_json(small)

    @classmethod
    def decode(cls, data: bytes, *, run: str, key: str) -> Commit:
        """Reads an object's bytes; raises `CorruptError`."""
        found = decode_json(data, cls, run=run, key=key)
        if not found.table:
            return found
        tensors = unpack_table(found.table, limit=MAX_COMMIT_BYTES, run=run, key=key)
        return msgspec.structs.replace(found, tensors=tensors, table=b"")
