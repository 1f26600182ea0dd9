"""A process of a run that hangs in one way or another: ``process_to_hang.py BUCKET HOW``.

It hangs when it is started for the first time; the next one of its name ends well.
"""

import contextlib
import os
import re
import signal
import sys
import threading
import time

from deltawire.config import FaultsConfig
from deltawire.errors import FencedError
from deltawire.runtime import heartbeat as pulse
from deltawire.runtime import process as processes
from deltawire.store import open_bucket

pulse.PULSE_S = 0.1
pulse.CONFIRMED_S = 0.3


def deadlock():
    lock = threading.Lock()
    with lock:
        lock.acquire()


def hold_the_interpreter():
    re.fullmatch("(a|aa)+b", "a" * 60)


HANGS = {
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "deadlock": deadlock,
    "asleep": lambda: time.sleep(3600),
    "interpreter": hold_the_interpreter,
    "mute": lambda: time.sleep(3600),
}


def main():
    bucket, how = open_bucket(sys.argv[1]), sys.argv[2]
    process = processes.Process(bucket, "child", "worker", supervised=True)
    process.heart.faults = FaultsConfig(silence_s=2, stall_s=0.5, long_s=3)
    first = bucket.create("started", str(os.getpid()).encode())
    if how == "mute":  # Even before its first sign of life.
        if first:
            HANGS[how]()
        return
    with process.beating():
        for _ in range(5):
            process.heart.mark("count")
            time.sleep(0.02)
        if not first:
            return
        if how == "replaced":
            with contextlib.suppress(FencedError):
                replaced(bucket, process)
            return
        with process.heart.taking("hang") if how == "asleep" else contextlib.nullcontext():
            HANGS[how]()


def replaced(bucket, process):
    """Stopped, woken by whoever took the name: what it writes must not come to lie there."""
    bucket.put("ready", b"")
    os.kill(os.getpid(), signal.SIGSTOP)
    process.heart.confirm()
    bucket.put("harm", b"")


if __name__ == "__main__":
    main()
