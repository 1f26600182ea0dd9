"""Names cost their writer nothing, so a flood of them makes a bounded number of objects."""

from __future__ import annotations

import pytest

from deltawire.config import RunConfig
from deltawire.rl.control import challenges
from deltawire.rl.control.challenges import Challenges, read_challenge
from deltawire.rl.control.worker_guard import WorkerGuard
from deltawire.store import open_bucket
from deltawire.wire import keys

MOST = 40


@pytest.fixture
def bucket(monkeypatch):
    monkeypatch.setattr(challenges, "MOST_WORKERS", MOST)
    return open_bucket("memory://", create=True)


def test_a_flood_of_names_makes_a_bounded_number_of_objects(bucket):
    guard = WorkerGuard(bucket, RunConfig(name="test"))
    flood = {f"a{number:05}" for number in range(1000)}
    honest = {"w0", "w1"}
    for _ in range(3):
        readable = guard.poll(flood | honest, {}, honest)
        assert len(bucket.list(keys.CHALLENGES)) == MOST
        assert honest < readable, "those from which groups may come are first"
        assert len(readable) == MOST
    (found,) = [one for one in guard.incidents.listed() if one.kind == "too many workers"]
    assert found.count == 1002 - MOST


def test_names_that_left_without_a_grant_leave_no_object(bucket):
    guard = WorkerGuard(bucket, RunConfig(name="test"))
    names = {f"a{number:03}" for number in range(2 * MOST)}
    first = guard.poll(names, {"a000": 3})
    for name in sorted(first):
        guard.forget(name)
    assert bucket.list(keys.CHALLENGES) == [keys.challenge("a000")]
    assert guard.poll(names - first, {}) == names - first, "others take their places"


def test_a_worker_that_returns_after_a_grant_has_its_secret(bucket):
    table = Challenges(bucket)
    table.ensure({"w0"})
    before = table.secret_of("w0")
    table.forget("w0", granted=1)
    table.ensure({"w0"})
    assert table.secret_of("w0") == before == read_challenge(bucket, "w0")
