"""A worker that gets each version late: ``late_worker.py BUCKET NAME SECONDS``, seconds late.

Its groups are sampled from an older version than the trainer's.
"""

import time

from odd_workers import run_odd

from deltawire.store.delegating import DelegatingBucket
from deltawire.wire import keys


class LateBucket(DelegatingBucket):
    """Shows a new manifest some time after it was first asked for."""

    def __init__(self, inner, seconds):
        super().__init__(inner)
        self.seconds = seconds
        self.asked_at = {}

    def get(self, key, *, limit):
        found = self.inner.get(key, limit=limit)
        if found is None or not key.startswith(keys.MANIFESTS) or key == keys.manifest(0):
            return found
        late = time.monotonic() - self.asked_at.setdefault(key, time.monotonic()) < self.seconds
        return None if late else found


if __name__ == "__main__":
    run_odd(LateBucket)
