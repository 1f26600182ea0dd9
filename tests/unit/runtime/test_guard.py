"""The guard of a command: what its end leaves in the log."""

import subprocess
import sys

import pytest

from deltawire.runtime.guard import guarded


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ("sys.exit(7)", "ended with exit code 7"),
        ("os.kill(os.getpid(), 9)", "ended with signal 9"),
        ("sys.exit(0)", ""),
    ],
)
def test_a_command_that_fails_leaves_how_in_the_log(ends, words):
    command = guarded([sys.executable, "-c", f"import os, sys; {ends}"])
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stderr is not None
        said = process.stderr.read().decode()  # Until the guard has ended too.
    assert said.strip().endswith(words)
    assert bool(said) == bool(words)
