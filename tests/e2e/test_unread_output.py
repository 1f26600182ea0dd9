"""Closed output, a full disk, Ctrl-C: commands end with one line and an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deltawire.store import open_bucket
from deltawire.sync import open_publisher

FULL = Path("/dev/full")
ONLY_LONG = [pytest.mark.drills, pytest.mark.long]
COMMANDS = [
    "log",
    "status --json",
    *(
        pytest.param(command, marks=ONLY_LONG)
        for command in ("fsck", "status", "log --json", "fsck --json")
    ),
]
"""Each starts a process; where output ends is the same for all."""

needs_full = pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = str(tmp_path_factory.mktemp("run"))
    bucket = open_bucket(place)
    tensors = {"w": np.arange(64, dtype=np.uint16)}
    open_publisher(bucket, tensors, name="run").close()
    return place


def deltawire(command: str, run: str, *, unbuffered: bool = False) -> list[str]:
    flags = ["-u"] if unbuffered else []
    return [sys.executable, *flags, "-m", "deltawire", *command.split(), run]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@needs_full
@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_under_the_output(run: str, command: str, unbuffered: bool) -> None:
    with FULL.open("w") as full:
        ended = subprocess.run(  # noqa: PLW1510 - its code is looked at
            deltawire(command, run, unbuffered=unbuffered),
            stdout=full, stderr=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
    assert ended.returncode == 74
    assert ended.stderr == "error: No space left on device; free some space\n"


@needs_full
def test_a_full_disk_under_the_log_keeps_the_exit_code(tmp_path: Path) -> None:
    """A supervisor goes by it: 2 is what a restart would meet again."""
    with FULL.open("w") as full:
        ended = subprocess.run(
            deltawire("log", str(tmp_path)), stderr=full, env=environment(), check=False
        )
    assert ended.returncode == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_pipe_without_a_reader(run: str, command: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        ended = subprocess.run(  # noqa: PLW1510 - its code is looked at
            deltawire(command, run),
            stdout=pipe, stderr=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (1, "")


@pytest.mark.skipif(os.name != "posix", reason="signals are posix's")
def test_an_interrupt_while_the_flags_are_read() -> None:
    code = (
        "import os, signal; from deltawire.cli import main as cli\n"
        "cli.import_module = lambda name: os.kill(os.getpid(), signal.SIGINT)\n"
        "raise SystemExit(cli.main(['log', 'x']))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")
