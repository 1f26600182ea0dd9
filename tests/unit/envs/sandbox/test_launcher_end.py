"""The launcher of an interactive command: what ends it, and when."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import deltawire
from deltawire.envs.sandbox.box import CommandLimits, Sandbox
from deltawire.envs.sandbox.plan import pack_request

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the launcher needs signals")
SOURCE = str(Path(deltawire.__file__).parents[1])
START = """
import os, signal, sys
sys.path.append(sys.argv[1])
from deltawire.envs.sandbox import launcher
"""
INTERRUPTED = """
launcher.write_files = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
"""
ORPHANED = """
parents = [os.getpid() + 1]
launcher.os.getppid = lambda: parents[-1]
read = launcher.read_header
launcher.read_header = lambda given: (parents.append(1), read(given))[1]
"""
LATE = """
def drained(self, output):
    def kill(*_):
        sys.exit("killed")
    os.kill = os.killpg = kill
    self.end()
launcher.Running._drain = drained
"""


def launched(code, *command):
    request = Sandbox(isolation="process").request(command, CommandLimits(wall_s=2), {})
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"{START}{code}\nlauncher.main()", SOURCE],
        input=pack_request(replace(request, interactive=True), {}),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    length = int.from_bytes(done.stderr[:8], "little")
    return json.loads(done.stderr[8 : 8 + length])["result"], done.stdout.decode()


def test_a_signal_before_the_command_runs_ends_it_in_order():
    result, _ = launched(INTERRUPTED, "sleep", "60")
    assert result["cause"] == "cancelled"


def test_a_worker_that_died_before_the_command_ran_is_noticed():
    result, _ = launched(ORPHANED, "sleep", "60")
    assert result["cause"] == "cancelled"


def test_nothing_is_killed_after_the_command_was_waited_for():
    result, _ = launched(LATE, "true")
    assert (result["status"], result["cause"]) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="the mask is read from /proc")
def test_a_command_can_be_ended_by_a_signal():
    _, said = launched("", "grep", "SigBlk", "/proc/self/status")
    assert int(said.split()[1], 16) == 0
