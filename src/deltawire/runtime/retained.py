"""Reads and raises the floors of ``retained.json``, which state what was deleted on purpose."""

from __future__ import annotations

import threading

from deltawire.errors import CorruptError
from deltawire.store import Bucket
from deltawire.sync.chain.evidence import require_agreed, unreadable
from deltawire.wire import keys
from deltawire.wire.objects import decode_json, encode_json
from deltawire.wire.retained import MAX_RETAINED_BYTES, Retained

SO = "no floor was raised and nothing was deleted"


def read_retained(bucket: Bucket) -> Retained:
    """Reads which objects were deleted on purpose, for a view; none if ``retained.json`` cannot be
    read. Code that deletes or raises a floor asks `RetainedFile`."""
    try:
        data = bucket.get(keys.RETAINED, limit=MAX_RETAINED_BYTES)
        return Retained() if data is None else _decode(bucket, data)
    except CorruptError:
        return Retained()  # A view then looks for objects that are gone, and finds none.


class RetainedFile:
    """Reads and raises the floors of ``retained.json``, from several threads of the trainer.

    A floor is raised before anything below it is deleted, so that readers do not report deleted
    objects as lost. Floors never fall: a floor is the highest that was read or raised here. The
    file has no seal, so an answer counts if it repeats the one before or if two agree. If it cannot
    be read, no floor is raised, because storing one would lower the other.

    Example::

        floors = RetainedFile(bucket)
        floors.raise_to(rollouts=100)  # then delete the groups of versions before 100
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._lock = threading.Lock()
        self._known = Retained()
        self._last: bytes | None = None
        """The file as it was read or stored last, None if it was not there."""

    def read(self) -> Retained:
        """Returns the floors; raises `UnreadableError` if they cannot be read, and `RetryError`."""
        with self._lock:
            return self._read()

    def raise_to(self, *, rollouts: int = 0, archives: int = 0) -> None:
        """Stores the higher of these floors and the present ones; raises as `read`."""
        with self._lock:
            now = self._read()
            raised = _highest(now, Retained(rollouts=rollouts, archives=archives))
            data = encode_json(raised)
            if raised != now or self._last is None:
                self._bucket.put(keys.RETAINED, data)
                self._known, self._last = raised, data

    def _read(self) -> Retained:
        if self._last is None or not self._is_as_before():
            data = require_agreed(self._bucket, keys.RETAINED, limit=MAX_RETAINED_BYTES, so=SO)
            if data is not None:
                try:
                    found = _decode(self._bucket, data)
                except CorruptError as error:
                    # Two answers agree, and are no floors: storing some would lower them.
                    raise unreadable(self._bucket, keys.RETAINED, error, so=SO) from error
                self._known = _highest(self._known, found)
            self._last = data
        return self._known

    def _is_as_before(self) -> bool:
        try:
            return self._bucket.get(keys.RETAINED, limit=MAX_RETAINED_BYTES) == self._last
        except CorruptError:
            return False  # It is read again, until two answers agree.


def _decode(bucket: Bucket, data: bytes) -> Retained:
    return decode_json(data, Retained, run=bucket.url, key=keys.RETAINED)


def _highest(one: Retained, other: Retained) -> Retained:
    return Retained(
        rollouts=max(one.rollouts, other.rollouts), archives=max(one.archives, other.archives)
    )
