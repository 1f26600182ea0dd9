"""Kills a worker of a run that another process drives, as soon as it has stored a group."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence

from deltawire.runtime.heartbeat import read_heartbeat
from deltawire.store import Bucket
from deltawire.wire import keys


def run_and_kill_a_worker(
    process: subprocess.Popen[bytes], bucket: Bucket, workers: Sequence[str], *, within_s: float
) -> str | None:
    """Waits for the end of ``process``, and kills the first of ``workers`` that has stored a group.

    Stored groups are watched because they stay: a heartbeat is written every two seconds, and a
    short run may be over before one of them counts a group. Returns the worker that was killed.
    The end is not awaited for longer than ``within_s`` seconds.
    """
    deadline = time.monotonic() + within_s
    killed = None
    while process.poll() is None and time.monotonic() < deadline:
        if killed is None:
            killed = next((one for one in workers if bucket.list(keys.rollouts_of(one))), None)
            if killed is not None:
                heartbeat = read_heartbeat(bucket, killed)
                assert heartbeat is not None, "a worker's heartbeat precedes its groups"
                with contextlib.suppress(ProcessLookupError):  # Somebody else restarts it.
                    os.kill(heartbeat.pid, signal.SIGKILL)
        time.sleep(0.02)
    return killed
