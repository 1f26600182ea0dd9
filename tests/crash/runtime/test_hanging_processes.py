"""Processes that hang are noticed and replaced; those that were replaced do no harm."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deltawire.config import FaultsConfig
from deltawire.errors import FencedError
from deltawire.events import Life, decode_lines
from deltawire.runtime import supervisor as supervising
from deltawire.runtime import watchdog as watching
from deltawire.runtime.heartbeat import Heart, read_pulse
from deltawire.runtime.supervisor import ChildError, Supervisor
from deltawire.runtime.watchdog import FIRST_PULSE_S, Vigil
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.status import Pulse

SCRIPT = str(Path(__file__).parents[2] / "support/process_to_hang.py")
PATIENCE_S = 60.0


def pulse(beat: int, *, pid: int = 7, quiet_s: float = 0.0, ended: bool = False) -> Pulse:
    return Pulse(
        process="w0",
        role="worker",
        nonce="n",
        tenure=0,
        supervised=True,
        host="h",
        pid=pid,
        started_at=0.0,
        at=0.0,
        beat=beat,
        doing="sample",
        quiet_s=quiet_s,
        allowed_s=5.0,
        ended=ended,
    )


@pytest.fixture
def bucket(new_bucket) -> Bucket:
    return new_bucket("folder")


@pytest.fixture
def supervisor(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "WATCH_S", 0.05)
    monkeypatch.setattr(watching, "FIRST_PULSE_S", 5.0)
    monkeypatch.setattr(supervising, "RESTART_PAUSE_S", 0.01)
    made = Supervisor(
        bucket,
        tmp_path / "logs",
        faults=FaultsConfig(silence_s=2.0),
        command=(sys.executable, SCRIPT),
    )
    made.begin()
    yield made
    made.stop()


def lives(bucket: Bucket) -> list[Life]:
    found = []
    for key in bucket.list(keys.EVENTS):
        found += decode_lines(bucket.get(key, limit=1 << 20) or b"")
    return [event for event in found if isinstance(event, Life) and event.process == "child"]


CAUSES = {
    "stopped": "no sign of life",
    "interpreter": "no sign of life",
    "mute": "no sign of life",
    "deadlock": "no progress",
    "asleep": "no progress",
}


@pytest.mark.parametrize("how", CAUSES)
def test_a_hanging_process_is_killed_and_replaced(bucket, supervisor, how) -> None:
    supervisor.add("child", "trainer", [bucket.url, how])
    deadline = time.monotonic() + PATIENCE_S
    while not supervisor.check():
        assert time.monotonic() < deadline, "nobody replaced it"
        time.sleep(0.02)
    died = [life.detail for life in lives(bucket) if life.what == "died"]
    assert len(died) == 1
    assert died[0].startswith(f"killed: {CAUSES[how]}")
    assert sum(life.what == "restarted" for life in lives(bucket)) == 1


def test_what_a_killed_process_started_goes_with_it(bucket, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(supervising, "RESTART_PAUSE_S", 0.01)
    code = "import subprocess,sys;p=subprocess.Popen(['sleep','3600']);print(p.pid,flush=True)"
    supervisor = Supervisor(bucket, tmp_path / "logs", command=(sys.executable, "-c", code))
    supervisor.begin()
    supervisor.add("child", "trainer", [])
    deadline = time.monotonic() + PATIENCE_S
    while not supervisor.check():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    supervisor.stop()
    orphan = int((tmp_path / "logs" / "child.log").read_text())
    while _runs(orphan):
        assert time.monotonic() < deadline, "it was left behind"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_one_that_was_stopped_and_replaced_wakes_up_and_writes_nothing(bucket) -> None:
    command = [sys.executable, SCRIPT, bucket.url, "replaced"]
    old = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while bucket.get("ready", limit=1) is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert subprocess.run(command, timeout=PATIENCE_S, check=False).returncode == 0
        time.sleep(0.5)  # Longer than what it last confirmed holds good.
        os.kill(old.pid, signal.SIGCONT)
        assert old.wait(PATIENCE_S) == 0
    finally:
        old.kill()
        old.wait()
    assert bucket.get("harm", limit=1) is None
    assert [bucket.exists(keys.tenure("child", number)) for number in range(3)] == [1, 1, 0]


def heart_of(bucket: Bucket, nonce: str) -> Heart:
    return Heart(bucket, "w0", "worker", nonce=nonce, host="h", supervised=True)


def test_the_later_of_two_with_one_name_stays(bucket) -> None:
    first, second = heart_of(bucket, "a"), heart_of(bucket, "b")
    first.begin()
    second.begin()
    first._look()
    with pytest.raises(FencedError, match="another process is w0"):
        first.mark("work")
    second.confirm()
    second.mark("work")
    first.close()
    second.close()
    assert (read_pulse(bucket, "w0") or pulse(0)).nonce == "b"


def test_a_late_put_of_the_one_before_does_not_fence(bucket) -> None:
    """A dead predecessor's request may still arrive: it lies there with a lower tenure."""
    first, second = heart_of(bucket, "a"), heart_of(bucket, "b")
    first.begin()
    late = bucket.get(keys.pulse("w0"), limit=1 << 20)
    second.begin()
    bucket.put(keys.pulse("w0"), late)
    second._look()
    second.mark("work")
    with pytest.raises(FencedError, match="another process is w0"):
        first.confirm(anew=True)  # Its own pulse lies there.
    third = heart_of(bucket, "c")
    third.begin()
    assert (first.tenure, second.tenure, third.tenure) == (0, 1, 2)
    with pytest.raises(FencedError, match="another process is w0"):
        second.confirm(anew=True)
    for heart in (first, second, third):
        heart.close()


def test_a_damaged_or_hostile_pulse_is_none(bucket) -> None:
    for data in (b"", b"{", b"[" * 10_000, encode_json(pulse(0)).replace(b"5.0", b"-1")):
        bucket.put(keys.pulse("w0"), data)
        assert read_pulse(bucket, "w0") is None
    bucket.put(keys.pulse("other"), encode_json(pulse(0)))
    assert read_pulse(bucket, "other") is None, "it says that it is w0"
    assert keys.process_of("pulses/../trainer.json") is None


def test_silence_counts_only_while_it_could_be_broken() -> None:
    vigil = Vigil(7, silence_s=10)
    assert vigil.observe(pulse(1), 1) == ""
    for _ in range(100):
        assert vigil.observe(pulse(1), 0) == "", "the store did not answer in between"
    for _ in range(10):
        assert vigil.observe(pulse(1), 1) == ""
    assert "no sign of life for 11 s" in vigil.observe(pulse(1), 1)


def test_each_beat_breaks_the_silence_and_stuck_is_believed_at_once() -> None:
    vigil = Vigil(7, silence_s=10)
    for beat in range(100):
        assert vigil.observe(pulse(beat), 5) == ""
    assert vigil.observe(pulse(100, quiet_s=4.9), 1) == ""
    assert "no progress for 6 s at: 'sample'" in vigil.observe(pulse(101, quiet_s=5.6), 1)
    assert vigil.observe(pulse(102, quiet_s=99, ended=True), 1) == ""


def test_the_pulse_of_the_process_before_counts_for_nobody() -> None:
    vigil = Vigil(8, silence_s=10)
    spent = 0.0
    while not (cause := vigil.observe(pulse(int(spent), pid=7, quiet_s=99), 1)):
        spent += 1
    assert spent == FIRST_PULSE_S, "until its first pulse, an interpreter's start is allowed"
    assert "no sign of life" in cause


def test_what_takes_long_is_held_to_what_it_took_before(bucket, monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr("deltawire.runtime.heartbeat.time.monotonic", lambda: now[0])
    heart = heart_of(bucket, "a")
    heart.faults = FaultsConfig(silence_s=10, stall_s=30, long_s=1000)
    with heart.taking("train"):
        assert heart._mark.allowed_s == 1000, "the first may take whatever the longest may"
        now[0] += 4
    assert heart._mark.allowed_s == 30
    with heart.taking("train"):
        assert heart._mark.allowed_s == 80
        now[0] += 60
    with heart.taking("train"):
        assert heart._mark.allowed_s == 1000, "never more than the longest"
    with heart.taking("publish"):
        now[0] += 0.1
    with heart.taking("publish"):
        assert heart._mark.allowed_s == 30, "never less than anything may take"


KILLED_EACH_TIME = """
import os, signal, sys, time
from deltawire.runtime.heartbeat import Heart
from deltawire.rl import pulse
from deltawire.store import open_bucket
pulse.PULSE_S = 0.02
bucket = open_bucket(sys.argv[1])
heart = Heart(bucket, "child", "trainer", nonce=str(os.getpid()), host="h", supervised=True)
heart.begin()
if sys.argv[2] == "useful":
    heart.achieve()
time.sleep(0.5)
if heart.tenure == 6:
    heart.close()
    sys.exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_two_that_begin_at_once_do_not_share_a_tenure(bucket) -> None:
    hearts = [heart_of(bucket, nonce) for nonce in "abcdefgh"]
    threads = [threading.Thread(target=heart.begin) for heart in hearts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(heart.tenure for heart in hearts) == list(range(8))
    for heart in hearts:
        if heart.tenure < 7:
            with pytest.raises(FencedError):
                heart.confirm(anew=True)
        else:
            heart.confirm(anew=True)
    for heart in hearts:
        heart.close()


def until_done(supervisor: Supervisor, deadline: float) -> None:
    while not supervisor.check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("kind", ["useful", "useless"])
def test_only_what_never_gets_anything_done_is_given_up(bucket, tmp_path, monkeypatch, kind):
    """Six deaths in a row, where two may be: of a process that finishes something each time, and
    of one that does not."""
    monkeypatch.setattr(watching, "WATCH_S", 0.05)
    monkeypatch.setattr(supervising, "RESTART_PAUSE_S", 0.01)
    monkeypatch.setattr(supervising, "RESTARTS", 2)
    supervisor = Supervisor(
        bucket, tmp_path / "logs", command=(sys.executable, "-c", KILLED_EACH_TIME)
    )
    supervisor.begin()
    supervisor.add("child", "trainer", [bucket.url, kind])
    deadline = time.monotonic() + PATIENCE_S
    try:
        if kind == "useless":
            with pytest.raises(ChildError, match="child ended with signal 9"):
                until_done(supervisor, deadline)
            return
        until_done(supervisor, deadline)
    finally:
        supervisor.stop()
    assert sum(life.what == "died" for life in lives(bucket)) == 6


def test_a_store_that_is_away_uses_up_no_restarts(bucket, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(supervising, "RESTART_PAUSE_S", 0.01)
    monkeypatch.setattr(supervising, "RESTARTS", 1)
    mark = tmp_path / "starts"
    code = (
        "import sys; from pathlib import Path; p = Path(sys.argv[1]); n = len(p.read_text()) if "
        "p.exists() else 0; p.write_text('x' * (n + 1)); sys.exit([75, 75, 75, 75, 9, 0][n])"
    )
    supervisor = Supervisor(bucket, tmp_path / "logs", command=(sys.executable, "-c", code))
    supervisor.begin()
    supervisor.add("child", "trainer", [str(mark)])
    deadline = time.monotonic() + PATIENCE_S
    while not supervisor.check():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    supervisor.stop()
    assert len(mark.read_text()) == 6


@pytest.mark.parametrize(
    ("says", "free", "expected"),
    [
        ("error: the cause", 1 << 30, "the cause"),
        ("", 1 << 30, "child ended with exit code 2; its log is "),
        ("", 0, "no space left on the disk of .*; free some"),
    ],
)
def test_the_cause_is_that_of_the_last_start(
    bucket, tmp_path, monkeypatch, says, free, expected
) -> None:
    """Logs go on from one session to the next; what stood there before is no cause of today's."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(supervising.shutil, "disk_usage", lambda path: usage._replace(free=free))
    code = f"import sys; sys.stderr.write({says + chr(10)!r}); sys.exit(2)"
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "child.log").write_text("error: of yesterday\n")
    supervisor = Supervisor(bucket, tmp_path / "logs", command=(sys.executable, "-c", code))
    supervisor.begin()
    try:
        with pytest.raises(ChildError, match=expected) as raised:
            supervisor.run("child", "trainer", [], lambda: time.sleep(0.01))
    finally:
        supervisor.stop()
    assert raised.value.exit_code == 2
    assert "yesterday" not in str(raised.value)


def test_a_process_that_does_not_stop_is_killed_by_whoever_is_in_a_hurry(bucket, tmp_path) -> None:
    code = "import signal,time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)\n"
    code += "time.sleep(3600)"
    supervisor = Supervisor(bucket, tmp_path / "logs", command=(sys.executable, "-c", code))
    supervisor.begin()
    supervisor.add("child", "trainer", [])
    deadline = time.monotonic() + PATIENCE_S
    while not (tmp_path / "logs" / "child.log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    asked = []
    supervisor.stop(hurry=lambda: len(asked) > 2 or asked.append(1))
    assert len(asked) == 3
    assert not supervisor.running()
