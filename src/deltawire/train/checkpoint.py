"""Stores the trainer's resumable state in the bucket: safetensors objects, then a small commit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import blake3
import msgspec
import safetensors
import safetensors.torch
from msgspec import Meta
from torch import Tensor

from deltawire.errors import CorruptError
from deltawire.store import Bucket, RetryingBucket
from deltawire.wire import keys
from deltawire.wire.ledger import Ledger
from deltawire.wire.objects import FORMAT, decode_json, encode_json
from deltawire.wire.payload import Index
from deltawire.wire.run import Hash

PART_BYTES = 256 << 20
"""A part of the state is closed when it holds this many bytes; one tensor is never divided."""

MAX_PART_BYTES = 1 << 40
MAX_PARTS = 1 << 20
MAX_COMMIT_BYTES = 256 << 20
KEPT = 2


class StatePart(msgspec.Struct, frozen=True):
    """One safetensors object of a state: the BLAKE3 of its content, and its size."""

    hash: Hash
    bytes: Index


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """Commits a state of ``parts``. ``digest`` is that of the weights published at ``version``."""

    format: int = FORMAT
    version: Index
    digest: Annotated[str, Meta(max_length=32)]
    parts: Annotated[list[StatePart], Meta(max_length=MAX_PARTS)]
    ledger: Ledger


def save_checkpoint(
    bucket: Bucket,
    state: dict[str, Tensor],
    ledger: Ledger,
    *,
    version: int,
    digest: str,
    keep: int = KEPT,
) -> None:
    """Store the state of a committed version, and remove all but the last ``keep``; 0 keeps all.

    A state of any size needs the memory of one part in addition to its own.
    """
    bucket = RetryingBucket.over(bucket)
    parts = []
    for number, tensors in enumerate(_divided(state)):
        data = safetensors.torch.save(tensors)
        bucket.put(keys.checkpoint_part(version, number), data)
        parts.append(StatePart(blake3.blake3(data).hexdigest(), len(data)))
    commit = Commit(version=version, digest=digest, parts=parts, ledger=ledger)
    bucket.put(keys.checkpoint_commit(version), encode_json(commit))
    _remove_old(bucket, keep)


def _divided(state: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Group tensors into parts, in order; at least one part, even of nothing."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in state.items():
        part[name] = tensor.contiguous()
        size += tensor.nbytes
        if size >= PART_BYTES:
            yield part
            part, size = {}, 0
    if part or not state:
        yield part


def _remove_old(bucket: Bucket, keep: int) -> None:
    """Remove everything older than what is kept, commits first.

    That includes parts whose commit is gone because an earlier removal was interrupted.
    """
    kept = checkpoint_versions(bucket)[-keep:]
    for key in bucket.list(keys.CHECKPOINTS):  # Sorted: a commit comes before its parts.
        number = keys.trailing_number(key.rpartition("/")[0])
        if number is not None and kept and number < kept[0]:
            bucket.delete(key)


def load_checkpoint(bucket: Bucket, *, newest: int) -> tuple[Commit, dict[str, Tensor]] | None:
    """Load the newest complete state of a version at or before ``newest``; None if there is none.

    A damaged one is passed over for an older one.
    """
    bucket = RetryingBucket.over(bucket)
    for version in reversed(checkpoint_versions(bucket)):
        if version > newest:
            continue
        try:
            return _load(bucket, version)
        except CorruptError:
            continue
    return None


def _load(bucket: Bucket, version: int) -> tuple[Commit, dict[str, Tensor]]:
    key = keys.checkpoint_commit(version)
    raw = bucket.get(key, limit=MAX_COMMIT_BYTES)
    if raw is None:
        raise CorruptError("a checkpoint's commit is missing", run=bucket.url, key=key)
    commit = decode_json(raw, Commit, run=bucket.url, key=key)
    if commit.format != FORMAT or commit.version != version:
        raise CorruptError(
            f"format {commit.format}, version {commit.version}", run=bucket.url, key=key
        )
    state: dict[str, Tensor] = {}
    for number, part in enumerate(commit.parts):
        tensors = _load_part(bucket, keys.checkpoint_part(version, number), part)
        if tensors.keys() & state.keys():
            raise CorruptError("a checkpoint holds a tensor twice", run=bucket.url, key=key)
        state |= tensors
    return commit, state


def _load_part(bucket: Bucket, key: str, part: StatePart) -> dict[str, Tensor]:
    data = bucket.get(key, limit=min(part.bytes, MAX_PART_BYTES))
    if data is None or blake3.blake3(data).hexdigest() != part.hash:
        raise CorruptError("a checkpoint's state is damaged", run=bucket.url, key=key)
    try:
        return safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise CorruptError(f"checkpoint: {error}", run=bucket.url, key=key) from error


def checkpoint_versions(bucket: Bucket) -> list[int]:
    """List the versions with a commit, oldest first."""
    found = []
    for key in bucket.list(keys.CHECKPOINTS):
        parts = key.split("/")
        number = keys.trailing_number(parts[1]) if len(parts) == 3 else None
        if number is not None and key == keys.checkpoint_commit(number):
            found.append(number)
    return sorted(found)
