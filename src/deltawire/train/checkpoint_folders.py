"""Lists and removes checkpoints: which versions have a state, and which states are kept.

No tensor is touched here, so what decides about states needs no tensor library.
"""

from __future__ import annotations

from collections.abc import Iterable

from deltawire.errors import CorruptError
from deltawire.store import Bucket
from deltawire.sync.chain.evidence import listed_twice, unreadable
from deltawire.wire import keys

KEPT = 2
"""States that stay, if nothing else is said."""


def keep_checkpoint(bucket: Bucket, version: int) -> None:
    """Keeps the state of a version, stored already or soon, until `release_checkpoint`."""
    bucket.put(keys.checkpoint_kept(version), b"")


def release_checkpoint(bucket: Bucket, version: int, *, keep: int = KEPT) -> None:
    """Undoes `keep_checkpoint`: the state is removed unless it is one of the last ``keep``."""
    bucket.delete(keys.checkpoint_kept(version))
    remove_old(bucket, keep)


def marked_intervals(
    bucket: Bucket, *, so: str = "nothing was deleted"
) -> dict[tuple[int, int], bool]:
    """Lists the intervals that marks name, each as the versions at its ends, and whether they keep
    it: both ends are marked. Raises `UnreadableError` for a mark that names no interval: what it
    keeps is not known. ``so`` completes the message."""
    found: dict[tuple[int, int], bool] = {}
    for key in listed_twice(bucket, keys.CHECKPOINTS):
        if not key.rpartition("/")[2].startswith(keys.INTERVAL_MARK):
            continue
        interval = keys.interval_of(key)
        if interval is None:
            error = CorruptError("a mark that names no interval", run=bucket.url, key=key)
            raise unreadable(bucket, key, error, so=so)
        found[interval] = interval in found
    return found


def kept_intervals(bucket: Bucket) -> set[tuple[int, int]]:
    """Lists the intervals that are kept; raises as `marked_intervals`."""
    return {interval for interval, kept in marked_intervals(bucket).items() if kept}


def stored_twice(bucket: Bucket) -> set[int]:
    """Returns the versions with a commit that one of two listings shows."""
    return set(committed_in(listed_twice(bucket, keys.CHECKPOINTS)))


def needed_checkpoints(bucket: Bucket, keep: int) -> list[int]:
    """Lists the versions whose states are among the last ``keep`` (0: all), or are kept by a mark
    other than that of an interval, oldest first."""
    listed = listed_twice(bucket, keys.CHECKPOINTS)
    committed = committed_in(listed)
    marked = {
        keys.trailing_number(key.rpartition("/")[0])
        for key in listed
        if keys.keeps_checkpoint(key) and keys.interval_of(key) is None
    }
    newest = committed[-keep:]
    return [version for version in committed if version in newest or version in marked]


def kept_checkpoints(bucket: Bucket) -> set[int]:
    """Lists the versions whose states `keep_checkpoint` keeps."""
    marks = (key.rpartition("/") for key in listed_twice(bucket, keys.CHECKPOINTS))
    found = {keys.trailing_number(folder) for folder, _, name in marks if name == "kept"}
    return {version for version in found if version is not None}


def remove_old(bucket: Bucket, keep: int) -> None:
    """Removes everything older than what is kept, commits first.

    That includes parts without a commit, left by an interrupted removal. A listing that came back
    short would lack the marks of states that are kept. The marks are listed once more after the
    commits are deleted: a fork sets its mark before it reads the commit, so it either finds no
    commit, or its mark is seen here and the parts stay.
    """
    listed = listed_twice(bucket, keys.CHECKPOINTS)
    kept = committed_in(listed)[-keep:]
    old = [
        key
        for key in _unmarked(listed)
        if (number := keys.trailing_number(key.rpartition("/")[0])) is not None
        and kept
        and number < kept[0]
    ]
    commits = [key for key in old if key.endswith("/commit.json")]
    for key in commits:
        bucket.delete(key)
    if commits:
        now = set(_unmarked(listed_twice(bucket, keys.CHECKPOINTS)))
        old = [key for key in old if key in now]
    for key in old:
        bucket.delete(key)


def _unmarked(listed: Iterable[str]) -> list[str]:
    """Returns the keys in folders without a mark that keeps them."""
    listed = list(listed)
    marked = {key.rpartition("/")[0] for key in listed if keys.keeps_checkpoint(key)}
    return [key for key in listed if key.rpartition("/")[0] not in marked]


def checkpoint_versions(bucket: Bucket) -> list[int]:
    """Lists the versions with a commit, oldest first."""
    return committed_in(bucket.list(keys.CHECKPOINTS))


def committed_in(listed: Iterable[str]) -> list[int]:
    """Returns the versions whose commits are among these keys, oldest first."""
    found = []
    for key in listed:
        parts = key.split("/")
        number = keys.trailing_number(parts[1]) if len(parts) == 3 else None
        if number is not None and key == keys.checkpoint_commit(number):
            found.append(number)
    return sorted(found)
