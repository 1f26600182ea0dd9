"""A publisher killed at any moment leaves a whole chain, and its successor continues it."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deltawire.store import open_bucket
from deltawire.testing.tiny import audit, start_publisher, weights
from deltawire.wire import keys

SCRIPT = Path(__file__).with_name("publisher_to_kill.py")
KILLS = 5


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_killed_at_any_moment(tmp_path):
    random_moment = random.Random(20)
    bucket = open_bucket(str(tmp_path))
    heads = [-1]
    for _ in range(KILLS):
        with subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path)], stdout=subprocess.PIPE
        ) as process:
            try:
                assert process.stdout.readline() == b"publishing\n"
                time.sleep(random_moment.uniform(0.0, 0.08))
            finally:
                process.kill()
        assert process.returncode == -9, "it ended by itself"
        heads.append(audit(bucket, weights))
    assert heads == sorted(heads)
    assert heads[-1] >= KILLS, "hardly anything was under way when it was killed"
    # What the killed ones were writing is invisible: no half object under any name.
    listed = bucket.list("")
    assert not [key for key in listed if "#" in key]
    assert keys.manifest(heads[-1]) in listed
    publisher = start_publisher(bucket)
    head = heads[-1]
    assert publisher.version == head
    for version in range(head + 1, head + 4):
        assert publisher.publish(weights(version)) == version
    publisher.close()
    assert audit(bucket, weights) == head + 3
