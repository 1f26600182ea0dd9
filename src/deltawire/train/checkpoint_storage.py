"""Carries torch's distributed checkpoints to and from a bucket, without pickle.

torch plans which rank writes and reads which shard. The writer stores shards as raw bytes, many in
a part; where each lies, and its BLAKE3, are plain data that the caller commits.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import blake3
import msgspec
import numpy as np
import torch
from msgspec import Meta
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from deltawire.errors import CorruptError
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.payload import Index
from deltawire.wire.run import Hash

PART_BYTES = 256 << 20
"""A part is closed when it holds this many bytes; one shard is never divided."""

MAX_CHUNKS = 1 << 20
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
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
        fits = (self.dtype, tuple(self.shape)) == (_name_of(like.dtype), tuple(like.shape))
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


class StagedPlanner(DefaultSavePlanner):
    """Plans as torch does, and writes the copies made of this rank's shards."""

    def __init__(self, staged: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._staged = staged

    def resolve_data(self, write_item: Any) -> Tensor:
        """See `SavePlanner.resolve_data`."""
        return self._staged[write_item.index.fqn]


class WholeLoadPlanner(DefaultLoadPlanner):
    """Plans as torch does, for flat states of tensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)


class BucketWriter(StorageWriter):
    """Puts one rank's shards into parts, and hands the coordinator's table to ``finish``."""

    def __init__(
        self,
        bucket: Bucket,
        version: int,
        *,
        rank: int,
        ranks: int,
        finish: Callable[[dict[str, TensorEntry]], None],
    ) -> None:
        self._bucket = bucket
        self.version = version
        self._rank, self._ranks = rank, ranks
        self._finish = finish

    def reset(self, checkpoint_id: Any = None) -> None:
        """See `StorageWriter`."""
        del checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See `StorageWriter`."""
        del is_coordinator, args, kwargs

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See `StorageWriter`."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """See `StorageWriter`."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Puts this rank's shards, in parts of about `PART_BYTES`."""
        results: list[WriteResult] = []
        held: list[memoryview] = []
        start, number = 0, self._rank
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            data = bytes_of(tensor).data
            sizes = item.tensor_data.chunk.sizes if item.tensor_data else tensor.shape
            offsets = item.tensor_data.chunk.offsets if item.tensor_data else ()
            chunk = StoredShard(
                list(offsets), list(sizes), number, start, blake3.blake3(data).hexdigest()
            )
            results.append(WriteResult(item.index, data.nbytes, chunk))
            held.append(data)
            start += data.nbytes
            if start >= PART_BYTES:
                self._bucket.put(keys.checkpoint_part(self.version, number), b"".join(held))
                held, start, number = [], 0, number + self._ranks
        if held:
            self._bucket.put(keys.checkpoint_part(self.version, number), b"".join(held))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Makes the table of all ranks' shards."""
        tensors = {}
        chunks: dict[str, list[StoredShard]] = {}
        for result in (one for of_rank in results for one in of_rank):
            chunks.setdefault(result.index.fqn, []).append(result.storage_data)
        for name, described in metadata.state_dict_metadata.items():
            assert isinstance(described, TensorStorageMetadata)
            tensors[name] = TensorEntry(
                _name_of(described.properties.dtype), list(described.size), chunks.get(name, [])
            )
        self._finish(tensors)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """See `StorageWriter`."""
        del checkpoint_id
        return True


class BucketReader(StorageReader):
    """Reads the shards that this rank needs; each is verified before it is used."""

    def __init__(self, bucket: Bucket, version: int, tensors: Mapping[str, TensorEntry]) -> None:
        self._bucket = bucket
        self._version = version
        self._tensors = tensors

    def reset(self, checkpoint_id: Any = None) -> None:
        """See `StorageReader`."""
        del checkpoint_id

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Describes the tensors to torch."""
        del args, kwargs
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=_DTYPES[entry.dtype]),
                    torch.Size(entry.shape),
                    [
                        ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes))
                        for one in entry.chunks
                    ],
                )
                for name, entry in self._tensors.items()
            }
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """See `StorageReader`."""
        del metadata, is_coordinator, args, kwargs

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See `StorageReader`."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See `StorageReader`."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads every shard that the plan touches, once."""
        wanted: dict[MetadataIndex, list[Any]] = {}
        for item in plan.items:
            wanted.setdefault(item.storage_index, []).append(item)
        for index, items in wanted.items():
            values = self._read(index)
            for item in items:
                source = values
                for dim, (offset, length) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    source = source.narrow(dim, offset, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(source)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, index: MetadataIndex) -> Tensor:
        entry = self._tensors[index.fqn]
        offsets = list(index.offset or ())
        chunk = next(one for one in entry.chunks if one.offsets == offsets)
        dtype = _DTYPES[entry.dtype]
        size = math.prod(chunk.sizes) * dtype.itemsize
        key = keys.checkpoint_part(self._version, chunk.part)
        found = self._bucket.read_ranges(key, [(chunk.start, size)]) if size else [b""]
        if found is None or blake3.blake3(found[0]).hexdigest() != chunk.hash:
            raise CorruptError("a checkpoint's state is damaged", run=self._bucket.url, key=key)
        if not size:
            return torch.empty(chunk.sizes, dtype=dtype)
        return torch.frombuffer(bytearray(found[0]), dtype=dtype).view(chunk.sizes)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """See `StorageReader`."""
        del checkpoint_id
        return True


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Returns the memory of a contiguous CPU tensor of any dtype."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
