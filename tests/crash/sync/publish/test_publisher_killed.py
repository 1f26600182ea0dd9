"""A publisher that is killed at any moment leaves a complete chain for its successor."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from history import LIMIT, check_bucket, snapshot, weights

from deltawire.sync import find_run, load_mirror, newest_version, read_manifest
from deltawire.testing.tiny import same_bits, start_publisher
from deltawire.wire import keys

SCRIPT = Path(__file__).parents[3] / "support/publishers_to_kill.py"
KILLS = 100
KILLS_A_RUN = 5

pytestmark = [
    pytest.mark.drills,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork and no SIGKILL"),
]


class Driver:
    """Starts publishers as forks, and kills them."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def life(self, bucket, number, *, options, kill_at=None, done=False, until=None, pause_s=0.0):
        """One publisher's life, ended by SIGKILL; the newest version it knew to be committed.

        It is killed at an operation, or ``pause_s`` after it knew of version ``until`` (after its
        start, if that is -1).
        """
        order = {
            "location": bucket.url,
            "options": options,
            "life": number,
            "kill_at": kill_at,
            "done": done,
        }
        self.process.stdin.write(json.dumps(order) + "\n")
        child = int(self.process.stdout.readline())
        known, killed = -1, False
        while True:
            if until is not None and known >= until and not killed:
                time.sleep(pause_s)
                os.kill(child, signal.SIGKILL)
                killed = True
            word, value = self.process.stdout.readline().split()
            if word == "ended":
                assert int(value) == -signal.SIGKILL, f"it ended by itself, with {value}"
                return known
            known = int(value)

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait(120) == 0


@pytest.fixture(scope="module")
def driver():
    driver = Driver()
    yield driver
    driver.close()


@pytest.fixture(params=["folder", "s3"])
def place(request, new_bucket):
    """Returns an empty bucket, and how another process opens it."""
    options = {}
    if request.param == "s3":
        server = request.getfixturevalue("s3_server")
        options = {
            "endpoint": server.endpoint,
            "access_key_id": "testing",
            "secret_access_key": "testing",
            "region": "us-east-1",
        }
    return lambda: (new_bucket(request.param), options)


def audit(bucket, *, only_head=False):
    """Every committed version, or the newest, holds what the life that its manifest names has
    published. Returns the newest version, and the names of blobs that no object names: somebody
    was killed between the two."""
    bucket = snapshot(bucket)
    run, newest = find_run(bucket), newest_version(bucket)

    def published(version):
        life = read_manifest(bucket, run, version).metadata["life"]
        return weights(version, seed=life if version else 0)

    if not only_head:
        check_bucket(bucket, published)
    elif newest is not None:
        assert same_bits(load_mirror(bucket, run).tensors, published(newest))
    names = [*bucket.list(keys.MANIFESTS), *bucket.list(keys.COMPACTED)]
    objects = b"".join(bucket.get(key, limit=LIMIT) for key in names)
    unnamed = [key for key in bucket.list(keys.BLOBS) if key[-64:].encode() not in objects]
    return -1 if newest is None else newest, unnamed


def test_killed_at_a_hundred_random_moments(driver, place, drill_seed):
    rng = random.Random(drill_seed)
    started = time.monotonic()
    bucket, options = place()
    driver.life(bucket, 0, options=options, until=5)
    # A machine that is busy elsewhere must not make a hundred long pauses of one long life.
    version_s = min((time.monotonic() - started) / 6, 0.04)
    progressed = unfinished = 0
    for _ in range(KILLS // KILLS_A_RUN):
        bucket, options = place()
        head = -1
        for life in range(KILLS_A_RUN):
            # Within the time of two versions after its start, or after one of its own versions.
            until = rng.choice([-1, head + 1, head + 2])
            pause_s = rng.uniform(0.0, 2 * version_s)
            known = driver.life(bucket, life, options=options, until=until, pause_s=pause_s)
            found, unnamed = audit(bucket, only_head=True)
            assert found >= max(head, known), "a version that was committed is gone"
            progressed += found > head
            unfinished += bool(unnamed)
            head = found
            # The object that the killed one was writing is invisible: no half object under any
            # name.
            assert not [key for key in bucket.list("") if "#" in key]
        publisher = start_publisher(bucket, anchor_every=3)
        assert publisher.version == head
        for version in range(head + 1, head + 3):
            tensors = weights(version, seed=77 if version else 0)
            assert publisher.publish(tensors, metadata={"life": 77}) == version
        publisher.close()
        assert audit(bucket)[0] == head + 2
    # Else they were killed before they began, or always between two versions.
    assert progressed > KILLS // 4
    assert unfinished > 0


def test_killed_at_each_operation(driver, place):
    """The first life's 26 operations reach past the third anchor."""
    for at in range(1, 27):
        # On the slower store one of the two: before or after it.
        for done in (False, True) if place()[0].local else (at % 2 == 0,):
            bucket, options = place()
            known = driver.life(bucket, 1, options=options, kill_at=at, done=done)
            head, _ = audit(bucket, only_head=True)
            assert head >= known
            # The second life is killed as it reads what the first has left, or a little later.
            second = driver.life(bucket, 2, options=options, kill_at=at, done=done)
            assert audit(bucket)[0] >= max(head, second)
