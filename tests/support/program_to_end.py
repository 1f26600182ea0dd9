"""Programs that publish and end in a chosen way, without closing their publisher.

``python program_to_end.py`` reads ``start URL WAY`` and ``wait PID`` from stdin, a line each, and
answers with the process id and the status. It forks for each program, which then ends as any
program does, and writes to URL.said: what they import takes longer than they run. The newest
version takes a moment to be committed.
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import deltawire
import deltawire.slime
from deltawire.errors import RetryError
from deltawire.store import DelegatingBucket, open_bare_bucket

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


def publish_with_slime(url):
    """Publishes three directories from slime's hook; the store is away at the last one, and comes
    back before the end."""
    bucket = SlowBucket(open_bare_bucket(url, create=True))
    deltawire.slime.open_bucket = lambda *_, **__: bucket
    os.environ[deltawire.slime.RUN] = url
    for version in range(3):
        folder = Path(f"{url}-slime") / f"weight_v{version + 1}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"model_type": "none"}))
        save_file(weights(version), folder / "model.safetensors")
        bucket.away = version == 2
        done = deltawire.slime.publish(None, folder, [])
        assert (done is None) == bucket.away
    bucket.away = False


def publish_from_open_publisher(url, way):
    """Publishes versions 1 and 2; the store is away from then on if the way says so."""
    bucket = SlowBucket(open_bare_bucket(url, create=True))
    publisher = deltawire.open_publisher(bucket, weights(0))
    if way == "own handler":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
    if way == "two":
        other = deltawire.open_publisher(open_bare_bucket(f"{url}-2", create=True), weights(0))
        other.publish(weights(1))
    for version in (1, 2):
        publisher.publish(weights(version), metadata={"global_step": 10 * version})
    bucket.away = way in ("away", "away, interrupted")
    bucket.hangs = way == "hangs, terminated"
    return publisher


def main(url, way):
    if way.startswith("slime, "):
        way = way.removeprefix("slime, ")
        publish_with_slime(url)
    else:
        publisher = publish_from_open_publisher(url, way)
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


def next_program():
    """Forks a process for each program that is asked for; returns its arguments there, and None in
    the process that was asked once nothing more comes."""
    for line in sys.stdin:
        verb, *rest = json.loads(line)
        if verb == "start":
            told = os.open(f"{rest[0]}.said", os.O_WRONLY | os.O_CREAT, 0o600)
            child = os.fork()
            if not child:
                os.dup2(told, 2)
                return rest
            os.close(told)
            os.write(1, f"{child}\n".encode())
        else:
            status = os.waitstatus_to_exitcode(os.waitpid(rest[0], 0)[1])
            os.write(1, f"{status}\n".encode())
    return None


if __name__ == "__main__":
    asked = next_program()
    if asked is not None:
        main(*asked)
