"""A fork in another bucket: it copies what it begins with from a run that retention works on."""

from __future__ import annotations

from typing import Any

import msgspec
from exploring import World
from stepping import Process, ScriptedBucket
from worlds import Commits, History, retention

from deltawire import codec
from deltawire.errors import CorruptError, InputError
from deltawire.launch.branches import forking
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, read_run
from deltawire.wire import keys

VERSION = 1


class Copied(Commits):
    """Checks that a fork which begins is whole, and that a copy never meets what is deleted."""

    def __init__(self, history: History) -> None:
        super().__init__(history.run)
        data = history.objects()[keys.manifest(VERSION)]
        self._digest = self.decode(data, VERSION).digest

    def invariant(self, objects: dict[str, bytes], notes: dict[str, tuple[Any, ...]]) -> str | None:
        for note in (one for stated in notes.values() for one in stated):
            if note[0] == "lost":
                return f"a fork was being copied, and retention deleted what it needs: {note[1]}"
            if note[0] == "forked" and note[1] != self._digest:
                return "a fork begins with other weights"
        return super().invariant(objects, notes)


def forker(name: str, history: History) -> Process:
    """Copies a version into its own bucket, which no other process knows, and lets the run go."""
    child = msgspec.structs.replace(history.run, id="cd" * 16, name="copy")

    def body(bucket: ScriptedBucket) -> None:
        place = open_bucket("memory://")
        try:
            forking._make(
                bucket, history.run, place, child, None, VERSION, None, held=child.id, copied=True
            )
        except InputError:
            return  # The version was closed before it was tagged.
        except CorruptError as error:
            bucket.note("lost", error.message)
            raise
        forking._release(bucket, VERSION, child.id)
        mirror = load_mirror(place, read_run(place), at=VERSION, threads=1)
        bucket.note("forked", codec.digest_model(mirror.tensors).hex())

    return Process(name, body, writes=(keys.TAGS, keys.CHECKPOINTS))


def copied_forks() -> World:
    """Retention up to version 2, while version 1 is copied."""
    history = History([10, 11, 12, 10], anchor_every=2)
    checks = Copied(history)
    processes = [retention("retention", history, cutoff=2), forker("forker", history)]
    return World(history.objects(), processes, checks.invariant, checks.may_write)
