"""Status writer: stores a large run's status as one object, for all who look at it.

A status is made from one heartbeat and one event stream per process: with 1,000 workers, that is
2,000 requests for each look of each view. The supervisor reads once for all of them.
"""

from __future__ import annotations

import contextlib
import threading
import time

from deltawire.dashboard.status import FRESH_S, Watch
from deltawire.errors import DeltawireError
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.objects import encode_json

EVERY_S = FRESH_S / 8
MANY = 16
"""With fewer processes, a view reads their objects itself."""


class StatusWriter(threading.Thread):
    """Stores the status of a run in ``status.json`` every `EVERY_S`, until `close` deletes it.

    Spends at most half of the time writing. While the store does not answer, the stored status
    becomes outdated, and views compute a status themselves.

    Example::

        writer = StatusWriter(bucket)
        writer.start()
        writer.close()
    """

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(name="status-writer", daemon=True)
        self._bucket = bucket
        self._watch = Watch(bucket, stored=False)
        self._written = False
        self._closed = threading.Event()

    def run(self) -> None:
        """Stores the status until `close`."""
        pause_s = EVERY_S
        while not self._closed.wait(pause_s):
            began = time.monotonic()
            with contextlib.suppress(DeltawireError):
                self.write()
            pause_s = max(EVERY_S, time.monotonic() - began)

    def write(self) -> bool:
        """Stores the present status, if the run has many processes; returns whether it did.

        Raises `DeltawireError`, such as `InputError` if there is no run yet.
        """
        found = self._watch.poll()
        if len(found.processes) < MANY:
            return False
        self._bucket.put(keys.STATUS, encode_json(found))
        self._written = True
        return True

    def close(self) -> None:
        """Ends the thread, and deletes what it stored: it would show a run that continues."""
        self._closed.set()
        if self.is_alive():
            self.join()
        if self._written:
            with contextlib.suppress(DeltawireError):
                self._bucket.delete(keys.STATUS)
