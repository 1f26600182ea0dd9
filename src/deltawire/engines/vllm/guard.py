"""Runs one command for as long as whoever started this lives: ``python -m … COMMAND``.

Its standard input is a pipe that nobody writes to. However the other end dies, the pipe ends with
it; then the command, and all that it started in its group, ends too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

PATIENCE_S = 10.0


def main() -> None:
    """The guard; to be started in a session of its own."""
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)  # noqa: S603  (our starter's)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Behind the start: the command must hear it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_starter, args=(child,), daemon=True).start()
    child.wait()
    os.killpg(0, signal.SIGKILL)


def _end_with_starter(child: subprocess.Popen[bytes]) -> None:
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(PATIENCE_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
