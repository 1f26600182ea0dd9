"""A process of a run that hangs: ``process_to_hang.py BUCKET HOW [MARK]``.

It hangs when it is started for the first time; its successor ends in order. One that is mute hangs
before its first heartbeat, and leaves the file MARK.
"""

import contextlib
import os
import re
import signal
import sys
import threading
import time

if sys.argv[2] == "mute":  # Before the imports: they may take longer than it may be silent.
    try:
        os.close(os.open(sys.argv[3], os.O_CREAT | os.O_EXCL))
        time.sleep(3600)
    except FileExistsError:
        sys.argv[2] = "none"

from deltawire.config import FaultsConfig
from deltawire.errors import FencedError
from deltawire.runtime import heartbeat, lease
from deltawire.runtime import process as processes
from deltawire.store import open_bucket

heartbeat.HEARTBEAT_S = 0.1
lease.FRESH_S = 0.3


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
}


def main():
    bucket, how = open_bucket(sys.argv[1]), sys.argv[2]
    process = processes.Process(bucket, "child", "worker", supervised=True)
    first = bucket.create("started", str(os.getpid()).encode()) and how != "none"
    # Nobody else may be found to stall, however busy the machine is.
    if first and how in ("deadlock", "asleep"):
        process.heartbeat.faults = FaultsConfig(silence_s=2, stall_s=0.5, long_s=3)
    with process.registered():
        for _ in range(5):
            process.heartbeat.progress("count")
            time.sleep(0.02)
        if not first:
            return
        if how == "replaced":
            with contextlib.suppress(FencedError):
                replaced(bucket, process)
            return
        with process.heartbeat.long_task("hang") if how == "asleep" else contextlib.nullcontext():
            HANGS[how]()


def replaced(bucket, process):
    """Is stopped, and resumed after its successor took the name: it must write nothing."""
    bucket.put("ready", b"")
    os.kill(os.getpid(), signal.SIGSTOP)
    process.lease.confirm()
    bucket.put("harm", b"")


if __name__ == "__main__":
    main()
