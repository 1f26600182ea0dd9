"""An interrupted `make test` leaves no linter running."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from documents import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")

SLEEPS = """#!/bin/sh
echo $$ >"$1"
exec sleep 600
"""


def awaited(path):
    deadline = time.monotonic() + 60
    while not (path.is_file() and path.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(path.read_text())


def is_alive(process):
    """Returns whether a process runs; one that ended and was not waited for does not."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_ctrl_c_ends_lint_too(tmp_path):
    sleeps = tmp_path / "sleeps"
    sleeps.write_text(SLEEPS)
    sleeps.chmod(0o755)
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    command = ["make", "-o", "setup", f"BIN={tmp_path}", "test"]
    command += [f"LINT={sleeps} {tmp_path}/lint", f"PYTEST={sleeps} {tmp_path}/tests"]
    with subprocess.Popen(
        command, cwd=tmp_path, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as make:  # fmt: skip
        lint = None
        try:
            lint = awaited(tmp_path / "lint")
            awaited(tmp_path / "tests")
            os.killpg(make.pid, signal.SIGINT)
            assert make.wait(60) != 0
            deadline = time.monotonic() + 60
            while is_alive(lint) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not is_alive(lint)
        finally:
            make.kill()
            if lint is not None and is_alive(lint):
                os.kill(lint, signal.SIGKILL)
