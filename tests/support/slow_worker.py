"""A worker with a slow link: ``slow_worker.py BUCKET NAME SECONDS``, seconds a request.

The link carries one request at a time. With ``LINK_LOG`` in the environment, each request is a byte
in that file, except those of the heartbeat thread, which come with time and not with work.
"""

import os
import threading
import time
from pathlib import Path

from odd_workers import run_odd

from deltawire.store.delegating import DelegatingBucket
from deltawire.wire import keys

BY_TIME = (keys.HEARTBEATS, keys.LEASES)


class SlowBucket(DelegatingBucket):
    """Takes a while for each request."""

    def __init__(self, inner, seconds):
        super().__init__(inner)
        self.local = False  # As a store in a network: readers ask for several objects at once.
        self.seconds = seconds
        self.link = threading.Lock()
        self.log = os.environ.get("LINK_LOG")

    def with_inner(self, inner):
        return self._moved(inner)

    def _call(self, verb, key, operation):
        with self.link:
            time.sleep(self.seconds)
            if self.log and not key.startswith(BY_TIME):
                with Path(self.log).open("ab") as log:
                    log.write(b".")
            return operation()


if __name__ == "__main__":
    run_odd(SlowBucket)
