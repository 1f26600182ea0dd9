"""The world of ranks: each uploads its part of a version, and the leader commits all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from exploring import FENCED, World
from stepping import Process, ScriptedBucket
from worlds import CHUNK, WRITER_KEYS, History, Kept, deleter, weights, writer

from deltawire import codec
from deltawire.errors import FencedError, InputError, ResyncError, RetryError
from deltawire.store import RetryingBucket
from deltawire.sync.follow.mirror import Mirror
from deltawire.sync.publish.sharded import LEADER, ShardPublisher
from deltawire.wire import keys

RANKS = 2
OLD, NEW = (10, 10), (12, 12)
"""The model of the last version, and that which the ranks publish."""


def rank(name: str, number: int, history: History, *, session: str, epoch: int = 1) -> Process:
    """One rank, which holds a chunk of the newest version of ``history`` and publishes it."""
    version = len(history.values) - 1
    start = number * CHUNK

    def part(model: tuple[int, ...]) -> dict[str, Any]:
        return {"w": weights(model)["w"][start : start + CHUNK].copy()}

    def body(bucket: ScriptedBucket) -> None:
        digest = codec.digest_model(weights(history.values[-1]))
        held = Mirror(part(history.values[-1]), version, digest, {"w": start} if start else {})
        publisher = ShardPublisher(
            RetryingBucket(bucket), history.run, held, rank=number, ranks=RANKS, epoch=epoch,
            session=session, anchor_every=1000, threads=1,
        )  # fmt: skip
        try:
            made = publisher.publish(part(NEW), metadata={"by": session}, wait=True)
        except FencedError:
            bucket.note(FENCED)
            return
        except (InputError, ResyncError, RetryError) as error:
            bucket.note("ended", error.message)
            return
        bucket.note("committed", made, session)
        bucket.note("holds", made, publisher.digest.hex())

    written = (keys.PARTS, *WRITER_KEYS, *(keys.COMPACTED,) * (number == LEADER))
    return Process(name, body, writes=written)


class Together(Kept):
    """Checks that the ranks of a session agree, and end only if another one wrote."""

    def invariant(self, objects: dict[str, bytes], notes: dict[str, tuple[Any, ...]]) -> str | None:
        writers = {one.metadata.get("by") for one in self.manifests(objects).values()}
        for name, stated in notes.items():
            for note in stated:
                if note[0] in (FENCED, "ended") and not writers - {None, name.partition(" ")[0]}:
                    return f"{name} ended, and nobody else wrote: {' '.join(note)}"
        return super().invariant(objects, notes)


def ranks(
    *, sessions: Sequence[str] = ("old",), deleting: bool = False, alone: bool = False
) -> World:
    """Sessions of two ranks that each take themselves for the only one, retention that deletes a
    blob that they need, and a trainer without ranks."""
    history = History([OLD, (12, 10), OLD], anchor_every=2)
    checks = Together(history, 2)
    processes = [
        rank(f"{session} {number}", number, history, session=session, epoch=1 + n)
        for n, session in enumerate(sessions)
        for number in range(RANKS)
    ]
    if deleting:
        processes.append(deleter("retention", history, floor=2))
    if alone:
        processes.append(writer("writer", history, [(11, 11)]))
    return World(history.objects(), processes, checks.invariant, checks.may_write)
