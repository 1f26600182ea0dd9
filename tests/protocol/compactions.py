"""The world of compaction: compacted deltas that are made while retention deletes.

The delta from version 3 to version 6 is the blob of version 1, which retention is about to delete.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from exploring import World
from stepping import Process, ScriptedBucket
from worlds import History, Kept, Snapshot, deleter, follower, retention

from deltawire.store import RetryingBucket
from deltawire.sync.chain.payloads import all_blobs
from deltawire.sync.publish.compaction import Compactor
from deltawire.wire import keys
from deltawire.wire.manifest import decode_compacted

BASE, TARGET = 3, 6
MODELS = [(10, 10), (12, 12), (11, 11), (10, 10), (12, 10), (12, 11), (12, 12)]


def compactor(name: str, history: History) -> Process:
    """Makes the compacted delta that is due, and says so."""

    def body(bucket: ScriptedBucket) -> None:
        made = Compactor(RetryingBucket(bucket), history.run, (TARGET - BASE,), threads=1)
        for base, target in made.compact_up_to(TARGET):
            bucket.note("compacted", base, target)

    return Process(name, body, writes=(keys.BLOBS, keys.CLOCK, keys.COMPACTED))


class Compacted(Kept):
    """Checks that a compacted delta that was made has its blobs while it is there, and leads from
    one version to another. Another compactor, whose blobs were deleted, may delete it again."""

    def invariant(self, objects: dict[str, bytes], notes: dict[str, tuple[Any, ...]]) -> str | None:
        made = {note[1:] for stated in notes.values() for note in stated if note[0] == "compacted"}
        for base, target in made:
            if fault := self._fault_of(objects, base, target):
                return f"the compacted delta {base} to {target} {fault}"
        return super().invariant(objects, notes)

    def _fault_of(self, objects: dict[str, bytes], base: int, target: int) -> str | None:
        key = keys.compacted(base, target)
        if (data := objects.get(key)) is None:
            return None
        one = decode_compacted(data, base=base, version=target, table=self.run, run="", key=key)
        ends = [self.decode(objects[keys.manifest(at)], at).digest for at in (base, target)]
        if [one.base_digest, one.digest] != ends:
            return "leads elsewhere"
        refs = all_blobs(Snapshot({}), self.run, one)
        return None if all(keys.blob(ref.hash) in objects for ref in refs) else "lacks a blob"


def compaction(
    *, reading: bool = False, count: int = 1, whole: bool = True, stalls: bool = False
) -> World:
    """Compactors, retention up to version 3, and a reader of that version."""
    history = History(MODELS, anchor_every=BASE)
    checks = Compacted(history, BASE)
    make = partial(retention, cutoff=BASE) if whole else partial(deleter, floor=BASE)
    processes = [make("retention", history)]
    processes += [compactor(f"compactor {n + 1}", history) for n in range(count)]
    if reading:
        processes.append(follower("reader", history, held=BASE))
    return World(history.objects(), processes, checks.invariant, checks.may_write, stalls=stalls)
