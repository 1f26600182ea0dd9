"""Processes that hang are noticed and replaced; replaced processes do no harm."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from heartbeats import make_heartbeat, put_heartbeat

from deltawire.config import FaultsConfig
from deltawire.errors import FencedError
from deltawire.events import Life, decode_lines
from deltawire.runtime import lease as leasing
from deltawire.runtime import supervisor as supervising
from deltawire.runtime import watchdog as watching
from deltawire.runtime.fleet import Fleet
from deltawire.runtime.heartbeat import HeartbeatWriter, read_heartbeat
from deltawire.runtime.lease import Lease
from deltawire.runtime.liveness import Liveness
from deltawire.runtime.process import Process
from deltawire.runtime.reaper import Reaper
from deltawire.runtime.supervisor import ChildError, Supervisor
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.status import Heartbeat

SCRIPT = str(Path(__file__).parents[2] / "support/process_to_hang.py")
PATIENCE_S = 120.0


def heartbeat(number: int, *, pid: int = 7, **changes) -> Heartbeat:
    return make_heartbeat("w0", number=number, pid=pid, **changes)


@pytest.fixture
def bucket(new_bucket) -> Bucket:
    return new_bucket("folder")


@pytest.fixture
def supervisor(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "WATCH_S", 0.05)
    monkeypatch.setattr(supervising, "RESTART_PAUSE_S", 0.01)
    made = Supervisor(
        bucket,
        tmp_path / "logs",
        faults=FaultsConfig(silence_s=2.0),
        command=(sys.executable, SCRIPT),
    )
    made.start()
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
def test_a_hanging_process_is_killed_and_replaced(
    bucket, supervisor, tmp_path, monkeypatch, how
) -> None:
    if how == "mute":
        monkeypatch.setattr(watching, "FIRST_HEARTBEAT_S", 5.0)
    supervisor.add("child", "trainer", [bucket.url, how, str(tmp_path / "mark")])
    (child,) = supervisor._children
    deadline = time.monotonic() + PATIENCE_S
    while not supervisor.check():
        assert time.monotonic() < deadline, "it was not replaced"
        if child.process is None:  # Its successor may take any time to start.
            monkeypatch.setattr(watching, "FIRST_HEARTBEAT_S", PATIENCE_S)
        time.sleep(0.02)
    died = [life.detail for life in lives(bucket) if life.what == "died"]
    assert len(died) == 1
    assert died[0].startswith(f"killed: {CAUSES[how]}")
    assert sum(life.what == "restarted" for life in lives(bucket)) == 1


def test_the_children_of_a_killed_process_are_killed(bucket, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(supervising, "RESTART_PAUSE_S", 0.01)
    code = "import subprocess,sys;p=subprocess.Popen(['sleep','3600']);print(p.pid,flush=True)"
    supervisor = Supervisor(bucket, tmp_path / "logs", command=(sys.executable, "-c", code))
    supervisor.start()
    supervisor.add("child", "trainer", [])
    deadline = time.monotonic() + PATIENCE_S
    while not supervisor.check():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    supervisor.stop()
    orphan = int((tmp_path / "logs" / "child.log").read_text())
    while _runs(orphan):
        assert time.monotonic() < deadline, "the process is still running"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    if not Path("/proc/self/stat").exists():
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_replaced_process_that_is_resumed_writes_nothing(bucket) -> None:
    command = [sys.executable, SCRIPT, bucket.url, "replaced"]
    old = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while bucket.get("ready", limit=1) is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert subprocess.run(command, timeout=PATIENCE_S, check=False).returncode == 0
        time.sleep(0.5)  # Longer than its last check of the lease is valid.
        os.kill(old.pid, signal.SIGCONT)
        assert old.wait(PATIENCE_S) == 0
    finally:
        old.kill()
        old.wait()
    assert bucket.get("harm", limit=1) is None
    assert [bucket.exists(keys.lease("child", number)) for number in range(3)] == [1, 1, 0]


def writer_of(bucket: Bucket, nonce: str) -> HeartbeatWriter:
    return HeartbeatWriter(bucket, "w0", "worker", nonce=nonce, host="h", supervised=True)


@pytest.mark.parametrize("refused_s", [1.0, float("inf")])
def test_time_in_which_the_store_refuses_does_not_count(bucket, monkeypatch, refused_s) -> None:
    """A rank that waits for a commit on a store that throttles is late and does not hang."""
    monkeypatch.setattr("deltawire.runtime.heartbeat.HEARTBEAT_S", 0.01)
    monkeypatch.setattr("deltawire.runtime.heartbeat.refused_ago_s", lambda _: refused_s)
    writer = writer_of(bucket, "a")
    writer.start()
    writer._excused_at = 0.0
    object.__setattr__(writer._progress, "at", 0.0)
    deadline = time.monotonic() + PATIENCE_S
    number = 0
    while number < 3:
        assert time.monotonic() < deadline
        found = read_heartbeat(bucket, "w0")
        number = found.number if found is not None else 0
    assert (found.quiet_s < 5.0) is (refused_s < 5.0)
    writer.close()


def test_the_later_of_two_processes_with_one_name_stays(bucket) -> None:
    first, second = writer_of(bucket, "a"), writer_of(bucket, "b")
    first.start()
    second.start()
    first.lease.check()
    with pytest.raises(FencedError, match="another process now has the name w0"):
        first.progress("work")
    second.lease.confirm()
    second.progress("work")
    first.close()
    second.close()
    assert (read_heartbeat(bucket, "w0") or heartbeat(0)).nonce == "b"


def test_a_late_heartbeat_of_the_predecessor_does_not_fence(bucket) -> None:
    """A dead predecessor's request may still arrive; its heartbeat names a lower lease."""
    first, second = writer_of(bucket, "a"), writer_of(bucket, "b")
    first.start()
    late = bucket.get(keys.heartbeat("w0"), limit=1 << 20)
    second.start()
    bucket.put(keys.heartbeat("w0"), late)
    second.lease.check()
    second.progress("work")
    with pytest.raises(FencedError, match="another process now has the name w0"):
        first.lease.confirm(fresh=True)  # Although the heartbeat that is stored is its own.
    third = writer_of(bucket, "c")
    third.start()
    assert (first.lease.number, second.lease.number, third.lease.number) == (0, 1, 2)
    with pytest.raises(FencedError, match="another process now has the name w0"):
        second.lease.confirm(fresh=True)
    for writer in (first, second, third):
        writer.close()


def test_a_damaged_or_hostile_heartbeat_is_none(bucket) -> None:
    damaged = encode_json(heartbeat(0)).replace(b"5.0", b"-1")
    for data in (b"", b"{", b"[" * 10_000, damaged):
        bucket.put(keys.heartbeat("w0"), data)
        assert read_heartbeat(bucket, "w0") is None
    bucket.put(keys.heartbeat("other"), encode_json(heartbeat(0)))
    assert read_heartbeat(bucket, "other") is None, "it claims to be w0"
    assert keys.process_of("heartbeats/../trainer.json") is None


def test_an_unsupervised_worker_refuses_the_name_of_a_living_one(bucket, monkeypatch) -> None:
    monkeypatch.setattr("deltawire.runtime.heartbeat.HEARTBEAT_S", 0.05)
    monkeypatch.setattr("deltawire.runtime.process.HEARTBEAT_S", 0.2)
    first, second = (Process(bucket, "w0", "worker", supervised=False) for _ in range(2))
    with (
        first.registered(),
        pytest.raises(FencedError, match="a worker named w0 is alive"),
        second.registered(),
    ):
        pass
    with second.registered():
        second.lease.confirm(fresh=True)


def test_a_process_that_ended_and_does_not_exit_is_killed(bucket, monkeypatch) -> None:
    """It was stopped, or waits for a thread, between its last heartbeat and its exit."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: clock.now))
    killed = []
    process = SimpleNamespace(pid=77, returncode=None, kill=lambda: killed.append(clock.now))
    child = watching.Child("w0", "worker", [], process=process)
    put_heartbeat(bucket, "w0", pid=77, ended=True)
    dog = watching.Watchdog(bucket, [child], silence_s=5.0)
    while not killed and clock.now < 1000:
        dog.check(child)
        clock.now += 1.0
    assert watching.EXIT_S < killed[0] <= watching.EXIT_S + 3
    assert "did not exit" in child.killed_for


@pytest.mark.parametrize(
    ("runnable", "share", "local", "after_s"),
    [
        (True, 0.05, True, 1200),
        (True, 1.0, True, 60),
        (False, 0.05, True, 60),
        (True, 0, False, 60),
    ],
    ids=["starved", "endless loop", "asleep", "elsewhere"],
)
def test_a_process_that_waits_for_a_processor_may_start_more_slowly(
    bucket, monkeypatch, runnable, share, local, after_s
) -> None:
    """Before the first heartbeat only its own time counts, so a loop without end is still found."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(watching, "processor_of", lambda _: (runnable, share * clock.now))
    killed = []
    process = SimpleNamespace(
        pid=77, returncode=None, kill=lambda: killed.append(clock.now),
        memory=object() if local else None,
    )  # fmt: skip
    child = watching.Child("w0", "worker", [], process=process)
    dog = watching.Watchdog(bucket, [child], silence_s=5.0)
    while not killed and clock.now < 5000:
        dog.check(child)
        clock.now += 1.0
    assert after_s < killed[0] <= after_s + 21
    assert child.killed_for.startswith("no sign of life for 6")


def test_the_time_of_a_processor_is_read() -> None:
    assert watching.processor_of(1 << 30) == (False, 0.0)
    if not Path("/proc/self/stat").exists():
        return
    runnable, used_s = watching.processor_of(os.getpid())
    assert runnable
    assert 0 < used_s <= time.process_time() + 0.1


def test_silence_counts_only_while_it_could_be_noticed() -> None:
    liveness = Liveness(silence_s=10)
    assert liveness.observe(heartbeat(1), 1) == "alive"
    for _ in range(100):
        assert liveness.observe(heartbeat(1), 0) == "alive", "the store did not answer"
    for _ in range(10):
        assert liveness.observe(heartbeat(1), 1) == "alive"
    assert liveness.observe(heartbeat(1), 1) == "silent"
    assert liveness.reason == "no sign of life for 11 s"


def test_each_heartbeat_ends_the_silence_and_a_stall_counts_at_once() -> None:
    liveness = Liveness(silence_s=10)
    for number in range(100):
        assert liveness.observe(heartbeat(number), 5) == "alive"
    assert liveness.observe(heartbeat(100, quiet_s=4.9), 1) == "alive"
    assert liveness.observe(heartbeat(101, quiet_s=5.6), 1) == "stalled"
    assert "no progress for 6 s at: 'sample'" in liveness.reason
    assert liveness.observe(heartbeat(102, quiet_s=99, ended=True), 1) == "ended"
    assert liveness.reason == ""


def test_a_process_may_start_slowly_before_its_first_heartbeat() -> None:
    liveness = Liveness(silence_s=10, first_s=60)
    assert [liveness.observe(None, 1) for _ in range(61)] == [*["alive"] * 60, "silent"]


def test_an_old_heartbeat_is_silent_at_first_sight_and_any_change_is_life() -> None:
    """Clocks of two machines may differ by hours: age counts only while nothing else is known."""
    liveness = Liveness(silence_s=10)
    assert liveness.observe(heartbeat(1), 0, age_s=3600) == "silent"
    assert liveness.observe(heartbeat(2), 1, age_s=3600) == "alive"
    assert Liveness(silence_s=10).observe(heartbeat(1), 0, age_s=-3600) == "alive"


def test_a_long_task_is_limited_by_the_longest_of_its_kind(bucket, monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr("deltawire.runtime.heartbeat.time.monotonic", lambda: now[0])
    writer = writer_of(bucket, "a")
    writer.faults = FaultsConfig(silence_s=10, stall_s=30, long_s=1000)
    with writer.long_task("train"):
        assert writer._progress.allowed_s == 1000, "the first may take as long as anything may"
        now[0] += 4
    assert writer._progress.allowed_s == 30
    with writer.long_task("train"):
        assert writer._progress.allowed_s == 80
        now[0] += 60
    with writer.long_task("train"):
        assert writer._progress.allowed_s == 1000, "never more than the longest"
    with writer.long_task("publish"):
        now[0] += 0.1
    with writer.long_task("publish"):
        assert writer._progress.allowed_s == 30, "never less than anything may take"


KILLED_EACH_TIME = """
import os, signal, sys, time
from deltawire.runtime import heartbeat
from deltawire.store import open_bucket
heartbeat.HEARTBEAT_S = 0.02
bucket = open_bucket(sys.argv[1])
writer = heartbeat.HeartbeatWriter(
    bucket, "child", "trainer", nonce=str(os.getpid()), host="h", supervised=True
)
writer.start()
if sys.argv[2] == "useful":
    writer.count_finished()
    while not bucket.exists(f"seen-{os.getpid()}"):
        time.sleep(0.01)
if writer.lease.number == 6:
    writer.close()
    sys.exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def reap(bucket) -> None:
    """Remove what all workers left, as the trainer does once they are gone for long."""
    fleet = Fleet(bucket, silence_s=0.0)
    fleet.poll()
    fleet.states = dict.fromkeys(fleet.heartbeats, "silent")
    Reaper(bucket, after_s=0.0).run(fleet, lambda _name: True)
    assert bucket.list(keys.LEASES) == bucket.list(keys.HEARTBEATS) == []


def test_a_worker_that_was_reaped_while_it_slept_takes_its_lease_again(bucket, monkeypatch) -> None:
    monkeypatch.setattr(leasing, "FRESH_S", -1.0)
    lease = Lease(bucket, "w0", "a")
    lease.acquire(0)
    put_heartbeat(bucket, "w0", lease=0)
    reap(bucket)
    lease.confirm()
    assert bucket.get(keys.lease("w0", 0), limit=64) == b"a"
    other = Lease(bucket, "w0", "b")
    other.acquire(1)
    with pytest.raises(FencedError):
        lease.confirm()


@pytest.mark.parametrize("successors", [1, 2, 3])
@pytest.mark.parametrize("alive", [True, False])
def test_a_worker_that_slept_while_its_successors_were_reaped_is_fenced(
    bucket, monkeypatch, successors, alive
) -> None:
    monkeypatch.setattr(leasing, "FRESH_S", -1.0)
    first = Lease(bucket, "w0", "a")
    first.acquire(0)
    for number in range(1, successors + 1):
        Lease(bucket, "w0", f"b{number}").acquire(number)
    put_heartbeat(bucket, "w0", lease=successors)
    reap(bucket)
    if alive:
        Lease(bucket, "w0", "c").acquire(successors + 1)
    with pytest.raises(FencedError):
        first.confirm()


def test_processes_that_start_at_once_do_not_share_a_lease(bucket) -> None:
    writers = [writer_of(bucket, nonce) for nonce in "abcdefgh"]
    threads = [threading.Thread(target=writer.start) for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(writer.lease.number for writer in writers) == list(range(8))
    for writer in writers:
        if writer.lease.number < 7:
            with pytest.raises(FencedError):
                writer.lease.confirm(fresh=True)
        else:
            writer.lease.confirm(fresh=True)
    for writer in writers:
        writer.close()


def until_done(supervisor: Supervisor, bucket: Bucket, deadline: float) -> None:
    """Also tells each child once the supervisor has seen that it finished something."""
    (child,) = supervisor._children
    while not supervisor.check():
        assert time.monotonic() < deadline
        if child.productive and child.process is not None:
            bucket.put(f"seen-{child.process.pid}", b"")
        time.sleep(0.02)


@pytest.mark.parametrize("kind", ["useful", "useless"])
def test_only_a_process_that_finishes_nothing_is_given_up(bucket, tmp_path, monkeypatch, kind):
    """Six deaths in a row where two are allowed, of a process that finishes something each time and
    of one that finishes nothing."""
    monkeypatch.setattr(watching, "WATCH_S", 0.05)
    monkeypatch.setattr(supervising, "RESTART_PAUSE_S", 0.01)
    monkeypatch.setattr(supervising, "RESTARTS", 2)
    supervisor = Supervisor(
        bucket, tmp_path / "logs", command=(sys.executable, "-c", KILLED_EACH_TIME)
    )
    supervisor.start()
    supervisor.add("child", "trainer", [bucket.url, kind])
    deadline = time.monotonic() + PATIENCE_S
    try:
        if kind == "useless":
            with pytest.raises(ChildError, match="child ended with signal 9"):
                until_done(supervisor, bucket, deadline)
            return
        until_done(supervisor, bucket, deadline)
    finally:
        supervisor.stop()
    assert sum(life.what == "died" for life in lives(bucket)) == 6


def test_an_unreachable_store_uses_up_no_restarts(bucket, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(supervising, "RESTART_PAUSE_S", 0.01)
    monkeypatch.setattr(supervising, "RESTARTS", 1)
    mark = tmp_path / "starts"
    code = (
        "import sys; from pathlib import Path; p = Path(sys.argv[1]); n = len(p.read_text()) if "
        "p.exists() else 0; p.write_text('x' * (n + 1)); sys.exit([75, 75, 75, 75, 9, 0][n])"
    )
    supervisor = Supervisor(bucket, tmp_path / "logs", command=(sys.executable, "-c", code))
    supervisor.start()
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
    """Logs continue from one session to the next; earlier lines are not the cause."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(supervising.shutil, "disk_usage", lambda path: usage._replace(free=free))
    code = f"import sys; sys.stderr.write({says + chr(10)!r}); sys.exit(2)"
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "child.log").write_text("error: of yesterday\n")
    supervisor = Supervisor(bucket, tmp_path / "logs", command=(sys.executable, "-c", code))
    supervisor.start()
    try:
        with pytest.raises(ChildError, match=expected) as raised:
            supervisor.run("child", "trainer", [], lambda: time.sleep(0.01))
    finally:
        supervisor.stop()
    assert raised.value.exit_code == 2
    assert "yesterday" not in str(raised.value)


def test_a_process_that_ignores_sigterm_is_killed_in_a_hurry(bucket, tmp_path) -> None:
    code = "import signal,time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)\n"
    code += "time.sleep(3600)"
    supervisor = Supervisor(bucket, tmp_path / "logs", command=(sys.executable, "-c", code))
    supervisor.start()
    supervisor.add("child", "trainer", [])
    deadline = time.monotonic() + PATIENCE_S
    while not (tmp_path / "logs" / "child.log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    asked = []
    supervisor.stop(hurry=lambda: len(asked) > 2 or asked.append(1))
    assert len(asked) == 3
    assert not supervisor.running()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; sys.exit('error: the model is not here')", "the model is not here"),
        ("raise RuntimeError('out of memory')", "RuntimeError: out of memory"),
        ("raise SystemExit(3)", "exit code 3"),
    ],
)
def test_a_process_that_dies_at_start_is_shown_with_its_last_words(
    bucket, tmp_path, monkeypatch, code, words
) -> None:
    """Within seconds, and not only after the last restart."""
    monkeypatch.setattr(watching, "WATCH_S", 0.05)
    supervisor = Supervisor(bucket, tmp_path / "logs", command=(sys.executable, "-c", code))
    supervisor.start()
    supervisor.add("child", "worker", [])
    deadline = time.monotonic() + PATIENCE_S
    try:
        while not (died := [life for life in lives(bucket) if life.what == "died"]):
            assert time.monotonic() < deadline
            supervisor.check()
            time.sleep(0.02)
    finally:
        supervisor.stop()
    assert words in died[0].detail
