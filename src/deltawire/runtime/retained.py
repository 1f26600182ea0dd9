"""Reads and raises the floors of ``retained.json``, which state what was deleted on purpose."""

from __future__ import annotations

import threading

from deltawire.errors import CorruptError
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.objects import decode_json, encode_json
from deltawire.wire.retained import MAX_RETAINED_BYTES, Retained


def read_retained(bucket: Bucket) -> Retained:
    """Reads which objects were deleted on purpose; none if ``retained.json`` cannot be read."""
    try:
        data = bucket.get(keys.RETAINED, limit=MAX_RETAINED_BYTES)
        if data is None:
            return Retained()
        return decode_json(data, Retained, run=bucket.url, key=keys.RETAINED)
    except CorruptError:
        return Retained()


class RetainedFile:
    """Raises the floors of ``retained.json``, from several threads of the trainer.

    A floor is raised before anything below it is deleted, so that readers do not report deleted
    objects as lost. Floors never fall.

    Example::

        floors = RetainedFile(bucket)
        floors.raise_to(rollouts=100)  # then delete the groups of versions before 100
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._lock = threading.Lock()

    def raise_to(self, *, rollouts: int = 0, archives: int = 0) -> None:
        """Stores the higher of these floors and the present ones; raises `RetryError`."""
        with self._lock:
            now = read_retained(self._bucket)
            raised = Retained(
                rollouts=max(now.rollouts, rollouts), archives=max(now.archives, archives)
            )
            if raised != now:
                self._bucket.put(keys.RETAINED, encode_json(raised))
