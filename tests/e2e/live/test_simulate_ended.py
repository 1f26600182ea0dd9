"""``deltawire simulate`` that is interrupted or killed while it serves users."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_config

from deltawire.store import open_bucket
from deltawire.sync import newest_version
from deltawire.wire import keys

pytestmark = [
    pytest.mark.drills,
    pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="processes are found in /proc"),
]

CONFIG = f"""
name = "live"
{tiny_config.MODEL}[task]
environment = "simulated_users"
heldout = 10
[warm_start]
max_steps = 2
check_every = 2
[rollout]
workers = 0
group_size = 4
max_tokens = 4
slots = 16
context = 64
[train]
versions = 100000
groups_per_step = 1
max_staleness = 1000
loss.advantage = "given"
[trust]
rescore_share = 0.0
[evaluate]
every = 0
[live]
settle_s = 0.5
user_cap = 0.5
"""
PATIENCE_S = 200.0
COMMAND = [sys.executable, "-m", "deltawire"]


def processes_of(folder):
    """Return the command lines of the processes of a simulation in ``folder``, by process id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace")
        except OSError:
            continue  # It ended meanwhile.
        if str(folder) in line and int(path.parent.name) != os.getpid():
            found[int(path.parent.name)] = line.replace("\0", " ")
    return found


def wait_until_none(folder):
    deadline = time.monotonic() + PATIENCE_S
    while left := processes_of(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.fixture
def simulation(tmp_path):
    """A simulation that serves users, and its standard error."""
    (tmp_path / "live.toml").write_text(CONFIG)
    words = tmp_path / "stderr"
    with words.open("wb") as errors:
        process = subprocess.Popen(
            [*COMMAND, "simulate", str(tmp_path / "live.toml"), "--out", str(tmp_path / "out"),
             "--seconds", "100000", "--rate", "4"],
            stdout=subprocess.DEVNULL, stderr=errors, stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + PATIENCE_S
        live = tmp_path / "out" / "bucket" / keys.LIVE_CAPTURES
        while not any(path.is_file() for path in live.rglob("*")):
            assert process.poll() is None, words.read_text()
            assert time.monotonic() < deadline, words.read_text()
            time.sleep(0.1)
        yield process, words
    finally:
        process.kill()
        process.wait()
        for pid in processes_of(tmp_path):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def test_an_interrupt_ends_all_processes_in_one_line_and_keeps_what_was_stored(
    simulation, tmp_path
):
    process, words = simulation
    roles = " ".join(processes_of(tmp_path).values())
    assert all(f"deltawire {name} " in roles for name in ("run", "trainer", "gateway", "replica"))
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    wait_until_none(tmp_path)
    bucket = tmp_path / "out" / "bucket"
    lines = words.read_text().splitlines()
    assert lines[-1] == f"interrupted; stored until then: {bucket} (deltawire report {bucket})"
    assert not any("Traceback" in line or "rror" in line for line in lines)
    assert newest_version(open_bucket(str(bucket))) is not None
    for command in (["status", str(bucket)], ["report", str(bucket)]):
        done = subprocess.run(
            [*COMMAND, *command], cwd=tmp_path, capture_output=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, done.stderr.decode()


@pytest.mark.long
def test_no_process_is_left_if_the_command_is_killed(simulation, tmp_path):
    process, _ = simulation
    process.kill()
    process.wait()
    wait_until_none(tmp_path)
