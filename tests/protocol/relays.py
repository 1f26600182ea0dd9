"""The world of relays: versions that a relay copies to a second bucket while they are published.

Both buckets are in one store, the second below ``region/``. The thread that makes anchors again in
the region is left out: readers need it for fewer bytes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from exploring import World
from stepping import Process, ScriptedBucket
from worlds import Commits, History, Snapshot, writer

from deltawire import codec
from deltawire.store import ObjectMeta, RetryingBucket
from deltawire.sync import load_mirror
from deltawire.sync.chain.payloads import all_blobs
from deltawire.sync.maintain.relay import Relay
from deltawire.wire import keys

REGION = "region/"


class RegionBucket(ScriptedBucket):
    """The second bucket, in the same script of requests."""

    def __init__(self, store: ScriptedBucket) -> None:
        super().__init__([])
        self.url = "memory://region"
        self._store = store

    def ask(self, verb: str, key: str, *data: Any, after: str | None = None, **more: Any) -> Any:
        after = None if after is None else REGION + after
        return self._store.ask(verb, REGION + key, *data, after=after, **more)

    def list(self, prefix: str, *, after: str | None = None) -> list[str]:
        return [key.removeprefix(REGION) for key in super().list(prefix, after=after)]

    def list_objects(self, prefix: str, *, after: str | None = None) -> list[ObjectMeta]:
        return [
            ObjectMeta(one.key.removeprefix(REGION), one.bytes, one.modified)
            for one in super().list_objects(prefix, after=after)
        ]

    def is_listed(self, key: str) -> bool:
        folder = f"{key.rpartition('/')[0]}/" if "/" in key else ""
        return REGION + key in self.ask("keys", folder, after=key[:-1])


def relay(name: str, versions: int) -> Process:
    """Copies the next versions, without pauses between polls."""

    def body(bucket: ScriptedBucket) -> None:
        region = RegionBucket(bucket)
        made = Relay(
            RetryingBucket(bucket), RetryingBucket(region), strides=(), retain=False, threads=1
        )
        for _ in range(versions):
            done = made.step()
            if done is not None:
                bucket.note("copied", done.version)

    return Process(name, body, writes=(REGION,))


def reader(name: str, history: History) -> Process:
    """A reader of the region."""

    def body(bucket: ScriptedBucket) -> None:
        mirror = load_mirror(RetryingBucket(RegionBucket(bucket)), history.run, threads=1)
        bucket.note("holds", mirror.version, codec.digest_model(mirror.tensors).hex())

    return Process(name, body)


class Copies(Commits):
    """Checks that the region has the source's bytes, and all blobs of what was copied."""

    def invariant(self, objects: dict[str, bytes], notes: dict[str, tuple[Any, ...]]) -> str | None:
        for key, data in objects.items():
            copied = key.startswith(
                (REGION + keys.MANIFESTS, REGION + keys.BLOBS, REGION + keys.RUN)
            )
            if copied and objects.get(key.removeprefix(REGION)) != data:
                return f"{key} is not what the source has"
        for stated in notes.values():
            for note in stated:
                if note[0] == "copied" and (fault := self._lacks(objects, note[1])):
                    return fault
        return super().invariant(objects, notes)

    def _lacks(self, objects: dict[str, bytes], version: int) -> str | None:
        data = objects.get(REGION + keys.manifest(version))
        if data is None:
            return f"version {version} was copied and is not there"
        refs = all_blobs(Snapshot({}), self.run, self.decode(data, version))
        if any(REGION + keys.blob(ref.hash) not in objects for ref in refs):
            return f"version {version} was copied without a blob"
        return None


def relays(*, count: int = 1, reading: bool = False, values: Sequence[int] = (11,)) -> World:
    """A writer at the source, relays to one region, and a reader there."""
    history = History([10])
    checks = Copies(history.run)
    processes = [writer("writer", history, values)]
    processes += [relay(f"relay {n + 1}", 1 + len(values)) for n in range(count)]
    if reading:
        processes.append(reader("reader", history))
    return World(history.objects(), processes, checks.invariant, checks.may_write)
