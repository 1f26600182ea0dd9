"""Copies what a fork begins with to another bucket, and notes the fork in its parent.

The note comes first: an erasure at the parent that runs meanwhile names the fork. Payloads are
copied before the manifests that name them, each checked by its hash, and the fork's ``run.json``
comes last, so a copy that stopped is no run, and the same call copies what is missing.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence

import torch
from blake3 import blake3

from deltawire.errors import CorruptError, InputError
from deltawire.store import Bucket
from deltawire.store.forked import split_fork
from deltawire.sync.maintain.blob_copies import BlobCopies
from deltawire.train.checkpoint import Commit
from deltawire.wire import keys
from deltawire.wire.coordination import MAX_CHILD_BYTES, ForkNote
from deltawire.wire.manifest import Manifest
from deltawire.wire.objects import decode_json, encode_json
from deltawire.wire.payload import BlobRef
from deltawire.wire.run import Run


def check_place(parent: Bucket, location: str) -> None:
    """Raises `InputError` for a place that belongs to a run as its fork, or is the parent's."""
    if split_fork(location)[1]:
        raise InputError(
            f"{location[:200]} is the place of a fork of another run",
            hint="choose a bucket that is not below a run",
        )
    if location.rstrip("/") == parent.url.rstrip("/"):
        raise InputError("a run cannot be forked into its own bucket", run=parent.url)


def register_child(parent: Bucket, run: Run, name: str, child: Run, version: int, url: str) -> None:
    """Notes a fork elsewhere in its parent; raises `InputError` if another one has the name."""
    note = ForkNote(run=run.id, child=child.id, version=version, url=url, at=time.time())
    key = keys.child(name)
    if parent.create(key, encode_json(note)):
        return
    data = parent.get(key, limit=MAX_CHILD_BYTES)
    if data is None or decode_json(data, ForkNote, run=parent.url, key=key).child != child.id:
        raise InputError(
            "another fork has this name",
            hint="choose another name; if that fork is gone, delete its note",
            run=parent.url,
            key=key,
        )


def children_from(bucket: Bucket, version: int) -> list[str]:
    """Returns the places of the forks in other buckets that began with ``version`` or a later one,
    as they were noted. A note that cannot be read counts, by its key."""
    found = []
    for key in bucket.list(keys.CHILDREN):
        data = bucket.get(key, limit=MAX_CHILD_BYTES)
        if data is None:
            continue
        try:
            note = decode_json(data, ForkNote, run=bucket.url, key=key)
        except CorruptError:
            found.append(key)
            continue
        if note.version >= version:
            found.append(note.url)
    return found


def copy_payloads(parent: Bucket, run: Run, place: Bucket, chain: Sequence[Manifest]) -> int:
    """Copies the blobs that versions and the run's files need and the place lacks; returns their
    bytes. Raises `CorruptError` if the parent lost or damaged one."""
    copies = BlobCopies(parent, place, run)
    copies.copy_missing([BlobRef(file.blob, file.bytes) for file in run.model_files])
    for manifest in chain:
        copies.copy_missing(copies.blobs_of(manifest.payloads, manifest.version), manifest.version)
        copies.copy_files(manifest)
    return copies.crossed


def copy_state(parent: Bucket, place: Bucket, commit: Commit) -> None:
    """Copies the parts of a stored state that the place lacks, and checks each shard; raises
    `CorruptError`."""
    shards: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for entry in commit.tensors.values():
        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype):
            key = keys.checkpoint_commit(commit.version)
            raise CorruptError(f"no dtype {entry.dtype!r}", run=parent.url, key=key)
        for chunk in entry.chunks:
            size = math.prod(chunk.sizes) * dtype.itemsize
            shards[chunk.part].append((chunk.start, size, chunk.hash))
    for number, listed in sorted(shards.items()):
        key = keys.checkpoint_part(commit.version, number)
        length = max(start + size for start, size, _ in listed)
        if place.size(key) == length:
            continue
        data = parent.get(key, limit=length)
        whole = data is not None and all(
            blake3(data[start : start + size]).hexdigest() == stated
            for start, size, stated in listed
        )
        if data is None or not whole:
            raise CorruptError(
                "a part of the trainer's state is missing or damaged", run=parent.url, key=key
            )
        place.put(key, data)
