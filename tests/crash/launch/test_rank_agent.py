"""A trainer's process that starts ranks: one that is killed ends all, and the supervisor starts all
again."""

import os
import signal
import time
from pathlib import Path

import pytest
from rank_runs import VERSIONS, begin, digests, environment, start_trainer

from deltawire.events import Life
from deltawire.runtime import supervisor as supervising
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.fleet import read_trainer
from deltawire.runtime.supervisor import Supervisor
from deltawire.sync import newest_version

pytestmark = [pytest.mark.drills, pytest.mark.long, pytest.mark.timeout(900)]


def until(condition, seconds=250.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def ranks_of(pid):
    """The ranks that a trainer's process has started, by number."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        raw = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        values = dict(line.split(b"=", 1) for line in raw if b"=" in line)
        if b"RANK" in values:
            found[int(values[b"RANK"])] = int(child)
    return found


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("struck", [1, "agent"])
def test_the_supervisor_starts_all_ranks_again(tmp_path, monkeypatch, struck):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(supervising, "RESTART_PAUSE_S", 0.1)
    bucket = begin(tmp_path, versions=200, ranks=2)
    supervisor = Supervisor(bucket, tmp_path / "logs")
    supervisor.start()
    try:
        supervisor.add("trainer", "trainer", ["trainer", bucket.url, "--supervised"])
        child = supervisor._children[0]
        until(lambda: not supervisor.check() and (newest_version(bucket) or 0) >= 3)
        ranks = ranks_of(child.process.pid)
        assert sorted(ranks) == [0, 1]
        os.kill(child.process.pid if struck == "agent" else ranks[struck], signal.SIGKILL)
        until(lambda: not any(map(is_running, ranks.values())))
        until(lambda: supervisor.check() or child.starts > 1)
        at = newest_version(bucket)
        until(lambda: supervisor.check() or newest_version(bucket) > at + 2)
        assert child.starts == 2
    finally:
        supervisor.stop()
    status = read_trainer(bucket)
    assert status.phase in ("stopped", "finished")
    assert len(set(digests(bucket))) == status.version + 1
    (died,) = [
        event for event in EventTail(bucket).read()
        if isinstance(event, Life) and event.what == "died"
    ]  # fmt: skip
    by = "signal 9" if struck == "agent" else f"rank {struck} was ended by signal 9 (SIGKILL)"
    assert by in died.detail


def test_a_signal_lets_all_ranks_finish_and_save(tmp_path):
    bucket = begin(tmp_path, versions=200, ranks=2)
    process = start_trainer(bucket)
    try:
        until(lambda: (newest_version(bucket) or 0) >= 3)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=250)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, output
    status = read_trainer(bucket)
    assert (status.phase, status.version) == ("stopped", newest_version(bucket))
    assert VERSIONS // 2 <= status.version < 200


def test_an_error_of_a_rank_is_the_trainers(tmp_path):
    """Three ranks do not divide into two copies: each says so, and it is reported once."""
    bucket = begin(tmp_path, ranks=2, replicate=2)
    process = start_trainer(bucket, torchrun=3)
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0
    assert "rank 0: train: 3 ranks do not divide into replicate = 2 copies" in output
