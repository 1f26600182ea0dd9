"""A worker with a slow link: ``slow_worker.py BUCKET NAME SECONDS``, seconds a request."""

import sys
import time

from deltawire.rl.rollout.worker import run_worker
from deltawire.runtime.process import Process
from deltawire.store import open_bucket
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


def main():
    bucket = SlowBucket(open_bucket(sys.argv[1]), float(sys.argv[3]))
    process = Process(bucket, sys.argv[2], "worker", supervised=True)
    process.handle_signals()
    with process.registered():
        run_worker(process, patience_s=60.0, report=print)


if __name__ == "__main__":
    main()
