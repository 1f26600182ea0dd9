"""Forks publishers to be killed, one for each line of orders: the imports are paid for once.

An order is a JSON object: where the run lies, how the store is reached, the life's number, and at
which operation to kill itself, if at any. Answered by lines: the process id, then each version
whose commit was answered, then ``ended`` and the exit status.

Nothing here may start a thread before the fork, so no store is touched but in the children.
"""

import json
import os
import signal
import sys
import threading
from itertools import count

from deltawire.store import open_bare_bucket
from deltawire.testing.faulty import FaultyBucket
from deltawire.testing.tiny import start_publisher, weights


def say(text):
    os.write(1, f"{text}\n".encode())


def publish(order):
    """Publishes until killed. Each life has its own weights; all begin with the same model."""
    bucket = FaultyBucket(open_bare_bucket(order["location"], **order["options"]))
    if order["kill_at"] is not None:
        bucket.pause(
            at=order["kill_at"],
            done=order["done"],
            wait=lambda: os.kill(os.getpid(), signal.SIGKILL),
        )
    publisher = start_publisher(bucket, anchor_every=3)
    for version in count(publisher.version + 1):
        tensors = weights(version, seed=order["life"] if version else 0)
        publisher.publish(tensors, metadata={"life": order["life"]})
        if version % 2:  # Every other version is awaited; the next is staged after it.
            publisher.flush()
            say(f"committed {version}")


def main():
    weights(1)  # Modules that are imported at the first use are imported here.
    assert threading.active_count() == 1
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                publish(json.loads(line))
            finally:
                os._exit(1)
        say(child)
        _, status = os.waitpid(child, 0)
        say(f"ended {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
