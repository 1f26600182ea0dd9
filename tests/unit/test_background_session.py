"""The tests may run as a background job of a shell, which ignores Ctrl-C and so do its children."""

import signal
import subprocess
import sys

from interrupts import hear_interrupts

PROGRAM = "import time; print('ready', flush=True); time.sleep(600)"


def test_a_child_can_be_interrupted_though_the_session_ignores_interrupts():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        hear_interrupts()
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as child:
            try:
                assert child.stdout.readline() == b"ready\n"
                child.send_signal(signal.SIGINT)
                assert child.wait(60) == -signal.SIGINT
            finally:
                child.kill()
    finally:
        signal.signal(signal.SIGINT, before)
