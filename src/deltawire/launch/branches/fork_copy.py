"""Copies what a fork begins with to another bucket, and notes the fork in its parent.

The note comes first: an erasure at the parent that runs meanwhile names the fork. Its key is the
fork's id, so forks with one name in several buckets have a note each. Payloads are
copied before the manifests that name them, each checked by its hash, and the fork's ``run.json``
comes last, so a copy that stopped is no run, and the same call copies what is missing.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from blake3 import blake3

from deltawire.errors import CorruptError, InputError, UnreadableError
from deltawire.store import Bucket
from deltawire.store.forked import split_fork
from deltawire.store.opening import refuse_credentials
from deltawire.sync.chain.evidence import listed_twice, require_evidence
from deltawire.sync.maintain.blob_copies import BlobCopies
from deltawire.wire import keys
from deltawire.wire.coordination import MAX_CHILD_BYTES, ForkNote
from deltawire.wire.manifest import Manifest
from deltawire.wire.objects import decode_json, encode_json
from deltawire.wire.payload import BlobRef
from deltawire.wire.run import Run

if TYPE_CHECKING:
    from deltawire.train.checkpoint_commit import Commit


class KnownFork(NamedTuple):
    """Where a fork is, and the key of its note in the parent, empty for a fork below its parent.
    ``url`` is the note's key if the note cannot be read, and ``version``, where the fork began, is
    then None."""

    url: str
    note: str = ""
    version: int | None = None


def check_place(parent: Bucket, location: str) -> None:
    """Raises `InputError` for a place that belongs to a run as its fork, or is the parent's, and
    for a URL with credentials, which no message repeats."""
    refuse_credentials(location)
    if split_fork(location)[1]:
        raise InputError(
            f"{location[:200]} is the place of a fork of another run",
            hint="choose a bucket that is not below a run",
        )
    if location.rstrip("/") == parent.url.rstrip("/"):
        raise InputError("a run cannot be forked into its own bucket", run=parent.url)


def register_child(parent: Bucket, run: Run, child: Run, version: int, url: str) -> None:
    """Notes a fork elsewhere in its parent; raises `InputError` if its note names another place."""
    note = ForkNote(run=run.id, child=child.id, version=version, url=url, at=time.time())
    key = keys.child(child.id)
    if parent.create(key, encode_json(note)):
        return
    there = _read_note(parent, key)
    if there is None or (there.child, there.url) != (child.id, url):
        raise InputError(
            "the note of this fork is not there, or names another place",
            hint="run the command again; if the note stays, delete it",
            run=parent.url,
            key=key,
        )


def withdraw_child(parent: Bucket, place: Bucket, child: Run) -> None:
    """Deletes the note of a fork that was refused, unless its place holds weights already."""
    if not listed_twice(place, keys.BLOBS):
        parent.delete(keys.child(child.id))


def _read_note(parent: Bucket, key: str) -> ForkNote | None:
    data = parent.get(key, limit=MAX_CHILD_BYTES)
    return None if data is None else decode_json(data, ForkNote, run=parent.url, key=key)


def children_from(bucket: Bucket, version: int) -> list[KnownFork]:
    """Returns the forks in other buckets that began with ``version`` or a later one, as they were
    noted. A note that cannot be read counts, by its key."""
    found = []
    for key in listed_twice(bucket, keys.CHILDREN):
        try:
            note = require_evidence(bucket, key, partial(_read_note, bucket, key))
        except UnreadableError:
            found.append(KnownFork(key, key))
            continue
        if note is not None and note.version >= version:
            found.append(KnownFork(note.url, key, note.version))
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
    import torch  # `log --graph` and `compare` find forks without it.

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
