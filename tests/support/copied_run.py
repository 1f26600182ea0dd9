"""Copies a run between two buckets as ``aws s3 sync --delete`` and ``rclone sync`` do: what is new
or was written again, and then deletes what the source no longer has."""

from __future__ import annotations

from dataclasses import dataclass

from deltawire.store import Bucket, in_parallel
from deltawire.wire import keys

LARGEST = 1 << 30


@dataclass
class Copied:
    """The result of one pass."""

    objects: int = 0
    bytes: int = 0
    deleted: int = 0


def sync_run(source: Bucket, target: Bucket) -> Copied:
    """Makes ``target`` hold what ``source`` holds now, ``run.json`` last.

    An object is copied if it is missing, of another size, or older than the source's.
    """
    here = {one.key: one for one in source.list_objects("")}
    there = {one.key: one for one in target.list_objects("")}
    wanted = [
        key
        for key, one in here.items()
        if key not in there or one.bytes != there[key].bytes or one.modified > there[key].modified
    ]
    done = Copied()

    def copy(key: str) -> int:
        data = source.get(key, limit=LARGEST)
        if data is None:
            return 0  # The run deleted it meanwhile.
        target.put(key, data)
        return len(data)

    last = [key for key in wanted if key == keys.RUN]
    sizes = in_parallel(source, copy, [key for key in wanted if key != keys.RUN])
    sizes += [copy(key) for key in last]
    gone = [key for key in there if key not in here]
    in_parallel(target, target.delete, gone)
    done.objects, done.bytes, done.deleted = len(sizes), sum(sizes), len(gone)
    return done
