"""The worlds that are explored: small runs, the code of their processes, and what must hold."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from exploring import FENCED, World
from stepping import Process, ScriptedBucket

from deltawire import codec
from deltawire.errors import CorruptError, FencedError, InputError, ResyncError, RetryError
from deltawire.store import Bucket, RetryingBucket, open_bucket
from deltawire.sync import Mirror, Publisher, create_run, load_mirror
from deltawire.sync.chain.gc_intents import delete_blobs, drop_dead_intents, store_clock
from deltawire.sync.chain.objects import read_compacted_delta, read_manifest
from deltawire.sync.chain.payloads import all_blobs
from deltawire.sync.chain.retention import _References as References
from deltawire.sync.chain.retention import prune
from deltawire.sync.chain.tags import add_tag
from deltawire.sync.publish.commit_thread import CommittedLateError
from deltawire.wire import keys
from deltawire.wire.manifest import Manifest, decode_manifest
from deltawire.wire.run import Run, TensorSpec

CHUNK = 4
Weights = dict[str, Any]


Model = int | tuple[int, ...]
"""The number that the four of a chunk follow from, or one for each of several chunks."""


def weights(value: Model) -> Weights:
    """A model of four numbers a chunk."""
    chunks = value if isinstance(value, tuple) else (value,)
    bits = [bits for one in chunks for bits in (one, one + 1, 3 * one, 7)]
    return {"w": np.array(bits, np.uint16)}


def mirror_of(version: int, value: Model) -> Mirror:
    found = weights(value)
    return Mirror(found, version, codec.digest_model(found))


class History:
    """A run with some versions, as its objects; ``values`` are the models of its versions."""

    def __init__(self, values: Sequence[Model], *, anchor_every: int = 1000) -> None:
        bucket = open_bucket("memory://")
        first = weights(values[0])
        described = Run(
            id="ab" * 16,
            name="r",
            created_at=1.0,
            tensors=[TensorSpec("w", first["w"].shape, "BF16")],
            digest=codec.digest_model(first).hex(),
            chunk=CHUNK,
        )
        self.run = create_run(bucket, described)
        blank = Mirror({"w": np.zeros_like(first["w"])}, -1, codec.ZERO)
        self.values = list(values)
        self.bucket = bucket
        with publisher_of(bucket, self.run, blank, epoch=0, anchor_every=anchor_every) as publisher:
            for value in values:
                publisher.publish(weights(value), wait=True)
                publisher.wait_for_anchor()

    def objects(self) -> dict[str, bytes]:
        """All objects by key."""
        found = {key: self.bucket.get(key, limit=1 << 20) for key in self.bucket.list("")}
        return {key: data for key, data in found.items() if data is not None}


def publisher_of(bucket: Any, run: Run, mirror: Mirror, *, epoch: int, **options: Any) -> Publisher:
    return Publisher(
        RetryingBucket(bucket),
        run,
        mirror,
        epoch=epoch,
        compaction_strides=(),
        threads=1,
        **options,
    )


def writer(name: str, history: History, values: Sequence[int], *, anchors: bool = False) -> Process:
    """A trainer that holds the newest version of ``history`` and publishes further ones.

    With ``anchors`` it may also make one later, if it is told that there is none yet.
    """
    newest = len(history.values) - 1

    def body(bucket: ScriptedBucket) -> None:
        held = mirror_of(newest, history.values[-1])
        publisher = publisher_of(bucket, history.run, held, epoch=1, anchor_every=1000)
        publish(bucket, publisher, name, values)

    return Process(name, body, writes=(*WRITER_KEYS, *(keys.COMPACTED,) * anchors))


def restarted(name: str, history: History, values: Sequence[int]) -> Process:
    """A trainer that starts while others may still run: it loads the newest version first."""

    def body(bucket: ScriptedBucket) -> None:
        held = load_mirror(RetryingBucket(bucket), history.run, threads=1)
        head = read_manifest(bucket, history.run, held.version)
        if head is None:
            raise CorruptError("its manifest is missing")
        publisher = publisher_of(bucket, history.run, held, epoch=head.epoch + 1, anchor_every=1000)
        publish(bucket, publisher, name, values)

    return Process(name, body, writes=(*WRITER_KEYS, keys.COMPACTED))


WRITER_KEYS = (keys.MANIFESTS, keys.BLOBS, keys.CLOCK)


def publish(bucket: ScriptedBucket, publisher: Publisher, name: str, values: Sequence[int]) -> None:
    """Publishes models one after another, and tries once more after it was fenced."""
    for value in values:
        try:
            version = publisher.publish(weights(value), metadata={"by": name}, wait=True)
        except FencedError:
            bucket.note(FENCED)
            try:
                publisher.publish(weights(value), wait=True)
            except FencedError:
                return
            raise AssertionError("a fenced publisher published") from None
        except CommittedLateError:
            return
        except (InputError, ResyncError) as error:
            bucket.note("refused", error.message)
            return
        bucket.note("committed", version, name)


def reader(name: str, history: History, *, polls: int = 2) -> Process:
    """A reader that loads the newest version, and then again from what it holds."""

    def body(bucket: ScriptedBucket) -> None:
        held = None
        for _ in range(polls):
            held = load_mirror(RetryingBucket(bucket), history.run, into=held, threads=1)
            bucket.note("holds", held.version, codec.digest_model(held.tensors).hex())

    return Process(name, body)


def version_of(key: str) -> int | None:
    """The version whose manifest is at ``key``, None if it is no manifest's key."""
    return keys.trailing_number(key) if key.startswith(keys.MANIFESTS) else None


class Commits:
    """Checks commits."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._decoded: dict[tuple[bytes, int], Manifest] = {}

    def decode(self, data: bytes, version: int) -> Manifest:
        known = self._decoded.get((data, version))
        if known is None:
            key = keys.manifest(version)
            known = decode_manifest(data, version=version, table=self.run, run="", key=key)
            self._decoded[data, version] = known
        return known

    def manifests(self, objects: dict[str, bytes]) -> dict[int, Manifest]:
        """The manifests by version."""
        return {
            version: self.decode(data, version)
            for key, data in objects.items()
            if (version := version_of(key)) is not None
        }

    def invariant(self, objects: dict[str, bytes], notes: dict[str, tuple[Any, ...]]) -> str | None:
        found = self.manifests(objects)
        for version, one in found.items():
            if one.base is not None and not one.pruned:
                base = found.get(one.base)
                if base is None or base.digest != one.base_digest:
                    return f"version {version} builds on what no manifest names"
        for name, stated in notes.items():
            if (FENCED,) in stated and not any(
                one.metadata.get("by") not in (None, name) for one in found.values()
            ):
                return f"{name} was fenced, and nobody else wrote"
            for note in stated:
                if note[0] == "refused":
                    return f"{name} ended, and nobody changed the run: {note[1]}"
                if note[0] == "committed":
                    one = found.get(note[1])
                    if one is None or one.metadata.get("by") != note[2]:
                        return f"{name} committed version {note[1]}, which is not its own"
        return self.readers_hold_versions(objects, notes)

    def readers_hold_versions(
        self, objects: dict[str, bytes], notes: dict[str, tuple[Any, ...]]
    ) -> str | None:
        """Checks what readers hold."""
        found = self.manifests(objects)
        for name, stated in notes.items():
            for note in stated:
                if note[0] == "holds":
                    one = found.get(note[1])
                    if one is None or one.digest != note[2]:
                        return f"{name} holds bits of version {note[1]} that no manifest names"
        return None

    def may_write(self, key: str, before: bytes | None, after: bytes | None) -> str | None:
        """A manifest is replaced by its tombstone only."""
        version = version_of(key)
        if version is None or before is None or before == after:
            return None
        if after is None:
            return f"the manifest of version {version} was deleted"
        old, new = (self.decode(data, version) for data in (before, after))
        if new.pruned and new.digest == old.digest and new.nonce == old.nonce:
            return None
        return f"the manifest of version {version} was replaced"


def commits(
    *,
    values: Sequence[Sequence[int]],
    reading: int = 0,
    restart: bool = False,
    readers_only: bool = False,
) -> World:
    """Writers that each take themselves for the only one, and a reader.

    With ``readers_only``, only the reader's invariant counts.
    """
    history = History([10])
    checks = Commits(history.run)
    names = "ABC"
    processes = [writer(names[n], history, one) for n, one in enumerate(values)]
    if restart:
        processes.append(restarted("R", history, [50]))
    if reading:
        processes.append(reader("reader", history, polls=reading))
    if readers_only:
        return World(history.objects(), processes, checks.readers_hold_versions)
    return World(history.objects(), processes, checks.invariant, checks.may_write)


class Snapshot(Bucket):
    """The objects of one state, for code that reads them."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(None, "", local=True)  # type: ignore[arg-type]
        self._objects = objects

    def get(self, key: str, *, limit: int) -> bytes | None:
        return self._objects.get(key)


class Kept(Commits):
    """Checks commits while retention deletes.

    The versions from ``anchor`` on stay readable, and so does each further one from the moment when
    its writer says that it is committed.
    """

    def __init__(self, history: History, anchor: int) -> None:
        super().__init__(history.run)
        self._from = anchor
        self._to = len(history.values) - 1
        objects = history.objects()
        self._anchor = keys.compacted(None, anchor)
        assert self._anchor in objects
        made = read_compacted_delta(history.bucket, history.run, None, anchor)
        assert made is not None
        self._needed = {ref.hash for ref in all_blobs(history.bucket, history.run, made)}
        self._blobs: dict[bytes, set[str]] = {}

    def invariant(self, objects: dict[str, bytes], notes: dict[str, tuple[Any, ...]]) -> str | None:
        if self._anchor not in objects:
            return f"the anchor of version {self._from} was deleted"
        if not self._are_there(self._needed, objects):
            return f"a blob of the anchor of version {self._from} was deleted"
        stated = [note for found in notes.values() for note in found]
        committed = {note[1] for note in stated if note[0] == "committed"}
        for version in {*range(self._from, self._to + 1), *committed}:
            data = objects.get(keys.manifest(version))
            if data is None or self.decode(data, version).pruned:
                return f"version {version} was pruned"
            if not self._are_there(self._blobs_of(data, version), objects):
                return f"a blob of version {version} was deleted"
        for note in stated:
            if note[0] == "cannot read":
                return f"a reader cannot read version {note[1]}: {note[2]}"
        return super().invariant(objects, notes)

    def _are_there(self, hashes: set[str], objects: dict[str, bytes]) -> bool:
        return all(keys.blob(one) in objects for one in hashes)

    def _blobs_of(self, data: bytes, version: int) -> set[str]:
        if data not in self._blobs:
            one = self.decode(data, version)
            found = all_blobs(Snapshot({}), self.run, one)
            self._blobs[data] = {ref.hash for ref in found}
        return self._blobs[data]


class Tagged(Commits):
    """Checks that a version that was tagged stays readable, from its anchor on."""

    def __init__(self, history: History, version: int, anchor: int) -> None:
        super().__init__(history.run)
        self._needed = range(anchor, version + 1)
        data = history.objects()
        found = [self.decode(data[keys.manifest(one)], one) for one in self._needed]
        blobs = [ref.hash for one in found for ref in all_blobs(Snapshot({}), self.run, one)]
        self._blobs = {keys.blob(one) for one in blobs}

    def invariant(self, objects: dict[str, bytes], notes: dict[str, tuple[Any, ...]]) -> str | None:
        if any(note[0] == "tagged" for stated in notes.values() for note in stated):
            for version in self._needed:
                data = objects.get(keys.manifest(version))
                if data is None or self.decode(data, version).pruned:
                    return f"version {version}, which a tag needs, was pruned"
            if not self._blobs <= objects.keys():
                return "a blob of a tagged version was deleted"
        return super().invariant(objects, notes)


RETENTION_KEYS = (
    keys.MANIFESTS, keys.BLOBS, keys.CLOCK, keys.COMPACTED, keys.RETENTION_FLOORS,
    keys.DELETION_INTENTS, keys.PARTS,
)  # fmt: skip


def retention(name: str, history: History, *, cutoff: int, grace: int = 0) -> Process:
    """Prunes what readers of version ``cutoff`` do not need."""

    def body(bucket: ScriptedBucket) -> None:
        prune(RetryingBucket(bucket), history.run, cutoff=cutoff, grace_s=grace)

    return Process(name, body, writes=RETENTION_KEYS)


def tagger(name: str, history: History, version: int) -> Process:
    """Tags a version, and says so once it is done."""

    def body(bucket: ScriptedBucket) -> None:
        with suppress(InputError):
            add_tag(RetryingBucket(bucket), history.run, version, "best")
            bucket.note("tagged", version)

    return Process(name, body, writes=(keys.TAGS,))


def tags() -> World:
    """Retention up to version 2, while version 1 is tagged."""
    history = History([10, 11, 12, 10], anchor_every=2)
    checks = Tagged(history, 1, 0)
    processes = [retention("retention", history, cutoff=2), tagger("tagger", history, 1)]
    return World(history.objects(), processes, checks.invariant, checks.may_write)


def deleter(name: str, history: History, *, floor: int) -> Process:
    """The part of retention that deletes blobs, which no version from ``floor`` on needs."""

    def body(bucket: ScriptedBucket) -> None:
        drop_dead_intents(bucket, store_clock(bucket))
        references = References(bucket, history.run, floor, set())
        kept = references.update()
        doomed = [key for key in bucket.list(keys.BLOBS) if key not in kept]
        for _ in delete_blobs(bucket, history.run, doomed, references.update):
            pass

    return Process(name, body, writes=(keys.BLOBS, keys.CLOCK, keys.DELETION_INTENTS))


def follower(name: str, history: History, *, held: int) -> Process:
    """A reader that holds an old version and loads the newest one."""

    def body(bucket: ScriptedBucket) -> None:
        mirror = mirror_of(held, history.values[held])
        try:
            mirror = load_mirror(RetryingBucket(bucket), history.run, into=mirror, threads=1)
        except (CorruptError, RetryError) as error:
            bucket.note("cannot read", held, error.message)
            raise
        bucket.note("holds", mirror.version, codec.digest_model(mirror.tensors).hex())

    return Process(name, body)


def deletions(
    *,
    reading: bool = False,
    writing: bool = True,
    times: int = 1,
    whole: bool = True,
    stalls: bool = False,
) -> World:
    """Retention, ``whole`` or its last part, and a writer whose next delta is a blob that it is
    about to delete."""
    history = History([10, 11, 12, 10], anchor_every=2)
    checks = Kept(history, 2)
    make = partial(retention, cutoff=2) if whole else partial(deleter, floor=2)
    names = ["retention"] if times == 1 else [f"retention {n + 1}" for n in range(times)]
    processes = [make(name, history) for name in names]
    if writing:
        processes.append(writer("writer", history, [11], anchors=True))
    if reading:
        processes.append(follower("reader", history, held=0))
    return World(history.objects(), processes, checks.invariant, checks.may_write, stalls=stalls)
