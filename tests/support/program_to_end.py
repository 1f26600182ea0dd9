"""A program that publishes and ends in a chosen way, without closing its publisher.

``python program_to_end.py URL WAY``; the newest version takes a moment to be committed.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time

import numpy as np

import deltawire
from deltawire.errors import RetryError
from deltawire.store import DelegatingBucket, open_bucket

SLOW_S = 0.3


class SlowBucket(DelegatingBucket):
    """Takes a moment to create each manifest; ``away`` from then on, nothing is answered."""

    away = False
    hangs = False

    def _call(self, verb, key, operation):
        if self.hangs:
            time.sleep(3600)
        if self.away:
            raise RetryError("the store is away")
        if verb == "create" and "manifests" in key:
            time.sleep(SLOW_S)
        return operation()


def weights(version):
    return {"w": np.full(1000, version, np.float32)}


def publish_in_a_child(publisher):
    """A forked child ends like any program; it must not commit what its parent published."""
    child = os.fork()
    if not child:
        sys.exit(0)
    os.waitpid(child, 0)
    other = multiprocessing.get_context("fork").Process(target=publisher.close)
    other.start()
    other.join()
    assert other.exitcode == 0


def publish_from_a_daemon(publisher):
    def forever():
        for version in range(3, 1000):
            publisher.publish(weights(version))

    threading.Thread(target=forever, daemon=True).start()
    time.sleep(2 * SLOW_S)


def main(url, way):
    bucket = SlowBucket(open_bucket(url, create=True))
    publisher = deltawire.open_publisher(bucket, weights(0))
    if way == "own handler":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
    if way == "two":
        other = deltawire.open_publisher(open_bucket(f"{url}-2", create=True), weights(0))
        other.publish(weights(1))
    for version in (1, 2):
        publisher.publish(weights(version), metadata={"global_step": 10 * version})
    if way in ("away", "away, interrupted"):
        bucket.away = True
    if way == "hangs, terminated":
        bucket.hangs = True
    if way == "exit":
        sys.exit(3)
    if way in ("error", "away"):
        raise ValueError("the program's own")
    if way == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
    if way in ("terminated", "own handler", "hangs, terminated"):
        os.kill(os.getpid(), signal.SIGTERM)
    if way == "_exit":
        os._exit(4)
    if way == "fork":
        publish_in_a_child(publisher)
    if way == "daemon":
        publish_from_a_daemon(publisher)
    # "return", and "away, interrupted": the interrupt comes while the end waits.


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
