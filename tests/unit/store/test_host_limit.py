"""One window of requests for the processes of a host."""

import os
import subprocess
import sys
import threading

import pytest

from deltawire.store import host_limit, open_bucket
from deltawire.store.answer_times import ROUND
from deltawire.store.host_limit import HostLimit
from deltawire.store.request_limit import MOST, limit_of, share_limit
from deltawire.store.translation import outcome_of
from deltawire.sync.follow.blob_cache import BlobCache


class SlowDownError(Exception):
    """A refusal as `outcome_of` knows it."""

    def __init__(self):
        super().__init__("Server returned non-2xx status code: 503")


def refuse(limit):
    with pytest.raises(SlowDownError), limit.request(outcome_of):
        raise SlowDownError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "limit"


def test_what_one_process_learns_the_others_know(path):
    one, other = HostLimit(path), HostLimit(path)
    refuse(one)
    refuse(one)
    with other.request(outcome_of):
        assert other.window.refusals == 2
        assert other.window.size < 1
        assert isinstance(other.window.refusals, int)


@pytest.mark.parametrize(("objects", "held"), [(0, False), (1, True)])
def test_a_window_waits_for_an_effect_that_any_process_may_see(path, objects, held):
    """It grows again once a round of answers could not tell, of all processes together."""
    one, other = HostLimit(path), HostLimit(path)
    one.window._held = True
    for limit, answers in ((one, ROUND - 1), (other, objects), (one, 1)):
        for _ in range(answers):
            with limit.request(outcome_of) as asked:
                asked.size = None if limit is one else 1000
    assert one.window._held is held


def test_the_requests_of_all_processes_count(path):
    limit = HostLimit(path)
    limit.window.most = 1.0
    with limit.request(outcome_of):  # So that the file has a window, of one.
        limit.window.size = 1.0
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from deltawire.store.host_limit import HostLimit\n"
        "from deltawire.store.translation import outcome_of\n"
        "with HostLimit(Path(sys.argv[1])).request(outcome_of):\n"
        "    print('under way', flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert other.stdout.readline() == b"under way\n"
        done = threading.Event()

        def ask():
            with limit.request(outcome_of):
                done.set()

        thread = threading.Thread(target=ask)
        thread.start()
        assert not done.wait(0.3), "the other process has the only place"
        other.stdin.write(b"\n")
        other.stdin.flush()
        thread.join(60)
        assert done.is_set()
    finally:
        other.kill()
        other.wait()
        other.stdin.close()
        other.stdout.close()


def test_a_forked_process_counts_its_parents_requests_once(path, monkeypatch):
    """The file has them under the parent's id, and the child a copy of its parent's count."""
    now = [100.0]
    limit = HostLimit(path, clock=lambda: now[0])
    child = os.getpid() + 1
    with limit.request(outcome_of):
        now[0] = 101.0
        monkeypatch.setattr(host_limit.os, "getpid", lambda: child)
        assert limit._admit(bulk=False) == 0
        assert limit._under_way == 2
        assert limit._begun == [101.0]


def test_a_process_that_died_or_was_stopped_is_not_waited_for(path):
    now = [100.0]
    limit = HostLimit(path, clock=lambda: now[0])
    for pid in range(1, 5):  # Their requests never end.
        limit._pid = pid
        limit._mine = 60
        limit._began = 100.0
        limit._store()
    limit._pid, limit._mine = 0, 0
    now[0] = 110.0
    assert limit._admit(bulk=False) > 0
    now[0] = 131.0
    assert limit._admit(bulk=False) == 0


def test_a_lock_that_is_held_for_ever_costs_a_second_and_not_the_request(path, monkeypatch):
    monkeypatch.setattr(host_limit, "LOCK_S", 0.05)
    limit = HostLimit(path)
    code = (
        "import fcntl, sys\nfile = open(sys.argv[1], 'r+b')\nfcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\nsys.stdin.readline()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert other.stdout.readline() == b"locked\n"
        refuse(limit)
        assert limit.window.refusals == 1
    finally:
        other.kill()
        other.wait()
        other.stdin.close()
        other.stdout.close()


@pytest.mark.parametrize("damage", [b"", b"\xff" * 5000, b"\x00" * 50, os.urandom(7000)])
def test_a_damaged_file_is_a_new_window(path, damage):
    path.touch(mode=0o600)
    path.write_bytes(damage)
    limit = HostLimit(path)
    with limit.request(outcome_of):
        assert 0 < limit.window.size <= MOST


def test_times_before_a_restart_of_the_machine_do_not_count(path):
    before = HostLimit(path, clock=lambda: 1e6)
    refuse(before)
    after = HostLimit(path, clock=lambda: 5.0)
    with after.request(outcome_of):
        assert after.window.refusals == 0


def test_the_first_shared_limit_stays(path):
    url = "s3://the-first-shared-limit/run"
    own = limit_of(url)
    share_limit(url, lambda: HostLimit(path))
    shared = limit_of(url)
    assert shared is not own
    share_limit(url, lambda: pytest.fail("made again"))
    assert limit_of(url) is shared
    assert not isinstance(limit_of(url, first=True), HostLimit)


def test_a_window_of_another_layout_has_another_file(tmp_path):
    """A release whose window has other figures would take them for its own."""
    cache = BlobCache(open_bucket("memory://"), tmp_path / "blobs")
    assert str(host_limit._WINDOW.size) in cache.limit_path.name.split("-")
