"""A worker that is always one version late: ``late_worker.py BUCKET NAME``.

Its groups are sampled from an older version than the trainer's.
"""

from odd_workers import run_odd

from deltawire.store.delegating import DelegatingBucket
from deltawire.wire import keys


class LateBucket(DelegatingBucket):
    """Once ``opened``, shows a manifest when the next one is there.

    Before, the machine's memory of the newest version would call it a rollback.
    """

    opened = False

    def __init__(self, inner, seconds):
        super().__init__(inner)
        del seconds

    def get(self, key, *, limit):
        version = keys.trailing_number(key) if key.startswith(keys.MANIFESTS) else None
        if self.opened and version and not self.inner.exists(keys.manifest(version + 1)):
            return None
        return self.inner.get(key, limit=limit)


if __name__ == "__main__":
    run_odd(LateBucket)
