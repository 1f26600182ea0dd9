"""A worker with a slow link: ``slow_worker.py BUCKET NAME SECONDS``, seconds a request."""

import time

from odd_workers import run_odd

from deltawire.store.delegating import DelegatingBucket


class SlowBucket(DelegatingBucket):
    """Takes a while for each request."""

    def __init__(self, inner, seconds):
        super().__init__(inner)
        self.local = False  # As a store in a network: readers ask for several objects at once.
        self.seconds = seconds

    def _call(self, verb, key, operation):
        time.sleep(self.seconds)
        return operation()


if __name__ == "__main__":
    run_odd(SlowBucket)
