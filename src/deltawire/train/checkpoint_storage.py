"""Carries torch's distributed checkpoints to and from a bucket, without pickle.

torch plans which rank writes and reads which shard. The writer stores shards as raw bytes, many in
a part; where each lies, and its BLAKE3, are plain data that the caller commits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import blake3
import numpy as np
import torch
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
from deltawire.train.checkpoint_commit import StoredShard, TensorEntry
from deltawire.wire import keys

PART_BYTES = 256 << 20
"""A part is closed when it holds this many bytes; one shard is never divided."""

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
