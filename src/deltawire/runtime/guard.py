"""Runs a command for as long as the process that started it lives: ``python -m … COMMAND``.

Standard input is a pipe that is never written to. However the starting process dies, the pipe
reaches its end; the guard then ends the command and every process in its group. A command that
fails leaves its exit code as the last line of standard error, because the guard itself ends by a
signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

TERMINATE_WITHIN_S = 10.0


def guarded(command: list[str]) -> list[str]:
    """Returns the command line of ``command`` under a guard; start it in a new session, with
    ``stdin=subprocess.PIPE``. Signals for the command go to that process group."""
    return [sys.executable, "-P", "-m", "deltawire.runtime.guard", *command]


def main() -> None:
    """Runs the guard, which must be the leader of a new session."""
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)  # noqa: S603  (the starting process chose it)
    # Ignored only now: the command must not inherit it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(child,), daemon=True).start()
    if code := child.wait():
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        with contextlib.suppress(OSError):
            print(f"{Path(sys.argv[1]).name} ended with {how}", file=sys.stderr, flush=True)  # noqa: T201
    os.killpg(0, signal.SIGKILL)


def _end_with_parent(child: subprocess.Popen[bytes]) -> None:
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(TERMINATE_WITHIN_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
