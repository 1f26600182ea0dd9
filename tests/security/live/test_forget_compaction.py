"""An erasure meets a compaction at any request of either, and a compaction is killed at any."""

import itertools
import threading

import pytest
from forgotten_users import BOB, CAROL, tokens_of
from interrupting_bucket import InterruptingBucket, KilledError
from live_answers import answer, put_rows, report

from deltawire.errors import DeltawireError, RetryError
from deltawire.live.compaction import compactor
from deltawire.live.compaction.compactor import StreamCompactor
from deltawire.live.compaction.stream_rows import ServedRows
from deltawire.live.erasure.forgetting import forget_user
from deltawire.live.learning.records import LiveRecords
from deltawire.runtime.compacted_segments import list_compacted
from deltawire.store import DelegatingBucket, open_bare_bucket
from deltawire.testing.tiny import start_run
from deltawire.wire import keys

DRILLS = pytest.mark.drills
COUNT = 6
OWNERS = {0: BOB, 2: CAROL, 5: BOB}
"""Of two segments that are compacted, and of one that stays."""
OTHERS = [n for n in range(COUNT) if n not in OWNERS]


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch):
    """Five segments make two objects, and these one."""
    monkeypatch.setattr(compactor, "FAN_IN", 2)
    monkeypatch.setattr(compactor, "KEPT", 1)


def stored():
    bucket = open_bare_bucket("memory://")
    run = start_run(bucket)
    for n in range(COUNT):
        put_rows(bucket, n, [answer(n, user=OWNERS.get(n))], [report(n, user=OWNERS.get(n))])
    return bucket, run


def compact(bucket, **options):
    for stream in ("captures", "feedback"):
        StreamCompactor(bucket, ServedRows(stream), "g0", **options).compact()


def assert_whole(bucket, gone):
    """Nothing of these users is stored, and everything of all others can be read."""
    users = {BOB, CAROL} & set(gone)
    for key in bucket.list(""):
        data = bucket.get(key, limit=1 << 28)
        numbers = [n for n, user in OWNERS.items() if user in users]
        assert not [n for n in numbers if tokens_of(n) in data], key
        if not key.startswith(keys.LIVE_FORGOTTEN):
            assert not [user for user in users if user.encode() in data], key
    records = LiveRecords(bucket)
    records.poll()
    left = sorted({*OTHERS, *(n for n, user in OWNERS.items() if user not in users)})
    assert records.alarm == ""
    assert sorted(int(one, 16) for one in records.answers) == left
    assert sorted(int(one, 16) for one in records.reports) == left


@pytest.mark.parametrize(
    ("after", "ends"),
    [(False, None), *(pytest.param(True, n, marks=DRILLS) for n in (None, 0, 1, 2, 5))],
)
def test_an_erasure_at_any_request_of_a_compaction_leaves_nothing(after, ends):
    """Also if the compaction is killed there, and none runs afterwards."""
    for at in itertools.count(1):
        bucket, run = stored()
        meeting = InterruptingBucket(
            bucket, at, lambda b=bucket, r=run: forget_user(b, r, BOB), after=after, ends=ends
        )
        try:
            compact(meeting)
        except KilledError:
            assert_whole(bucket, [BOB])
        if meeting.left > 0:
            break
        assert_whole(bucket, [BOB])
        compact(bucket, clock=lambda: 1e12)
        assert_whole(bucket, [BOB])
        forget_user(bucket, run, CAROL)
        assert_whole(bucket, [BOB, CAROL])
    assert at > 20, "reading, storing and deleting segments are requests to meet at"


def interleave(bucket, run, i, j):
    """Stops a compaction of answers before its ``i``-th request and an erasure before its
    ``j``-th, then finishes the compaction, and then the erasure; returns whether each came so
    far."""
    stopped, go = threading.Event(), threading.Event()
    failed = []

    def stop():
        stopped.set()
        assert go.wait(60)

    def work():
        try:
            StreamCompactor(compaction, ServedRows("captures"), "g0").compact()
        except Exception as error:
            failed.append(error)
        finally:
            stopped.set()

    def finish():
        go.set()
        thread.join(60)
        assert not thread.is_alive()

    compaction, erasure = InterruptingBucket(bucket, i, stop), InterruptingBucket(bucket, j, finish)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert stopped.wait(60)
    forget_user(erasure, run, BOB)
    finish()
    assert not failed
    return compaction.left <= 0, erasure.left <= 0


ANNOUNCES, READ = 15, 25
"""The requests by which a compaction of `FEW` segments announces the object that it makes, and by
which an erasure begins to list what was compacted."""
FEW = 3


@pytest.mark.parametrize(
    ("stops", "resumes"),
    [
        (range(ANNOUNCES + 2, ANNOUNCES + 7), range(READ + 6, READ + 16)),
        pytest.param(range(1, 1000), range(1, 1000), marks=DRILLS),
    ],
)
def test_an_erasure_that_goes_on_to_any_request_while_a_compaction_stands_leaves_nothing(
    stops, resumes
):
    pairs = 0
    for i in stops:
        for j in resumes:
            bucket = open_bare_bucket("memory://")
            run = start_run(bucket)
            for n in range(FEW):
                put_rows(bucket, n, [answer(n, user=OWNERS.get(n))], [])
            came = interleave(bucket, run, i, j)
            for key in bucket.list("live/"):
                data = bucket.get(key, limit=1 << 28)
                assert tokens_of(0) not in data, (i, j, key)
                assert key.startswith(keys.LIVE_FORGOTTEN) or BOB.encode() not in data, (i, j, key)
            records = LiveRecords(bucket)
            records.poll()
            assert sorted(int(one, 16) for one in records.answers) == [1, 2], (i, j)
            if not all(came):
                break
            pairs += 1
        if not came[0]:
            break
    assert pairs >= 50, "both have requests to stand at"


@pytest.mark.parametrize(
    ("after", "before"), [(False, True), pytest.param(True, False, marks=DRILLS)]
)
def test_a_compaction_at_any_request_of_an_erasure_leaves_nothing(after, before):
    """Of segments, and of objects that were compacted ``before`` and are merged meanwhile."""
    for at in itertools.count(1):
        bucket, run = stored()
        if before:
            compact(bucket)
        meeting = InterruptingBucket(
            bucket, at, lambda b=bucket: compact(b, clock=lambda: 1e12), after=after
        )
        forget_user(meeting, run, BOB)
        if meeting.left > 0:
            break
        assert_whole(bucket, [BOB])
    assert at > 20, "an erasure has requests to meet at"


def test_a_compaction_between_all_requests_of_an_erasure_leaves_nothing(monkeypatch):
    monkeypatch.setattr(compactor, "ABANDONED_S", 1e15)

    class Restless(DelegatingBucket):
        busy = False

        def _call(self, verb, key, operation):
            if not self.busy:
                self.busy = True
                compact(self.inner, clock=lambda: 1e12)
                self.busy = False
            return operation()

    bucket, run = stored()
    forget_user(Restless(bucket), run, BOB)
    assert_whole(bucket, [BOB])


@DRILLS
def test_two_erasures_of_users_of_one_object_leave_nothing_of_either():
    for after in (False, True):
        for at in itertools.count(1):
            bucket, run = stored()
            compact(bucket)
            meeting = InterruptingBucket(
                bucket, at, lambda b=bucket, r=run: forget_user(b, r, CAROL), after=after
            )
            forget_user(meeting, run, BOB)
            if meeting.left > 0:
                break
            assert_whole(bucket, [BOB, CAROL])


@DRILLS
@pytest.mark.parametrize("answer_lost", [False, True])
def test_a_compaction_that_fails_at_any_request_loses_nothing(answer_lost):
    """The store stops answering there, having done the request or not; then it is run again."""
    for at in itertools.count(1):
        bucket, run = stored()

        def fail():
            raise RetryError("no answer")

        meeting = InterruptingBucket(bucket, at, fail, after=answer_lost)
        failed = False
        try:
            compact(meeting)
        except DeltawireError:
            failed = True
        assert_whole(bucket, [])
        if not failed:
            break
        compact(bucket)
        assert_whole(bucket, [])
        forget_user(bucket, run, BOB)
        assert_whole(bucket, [BOB])
        compact(bucket, clock=lambda: 1e12)
        assert_whole(bucket, [BOB])
        listing = list_compacted(bucket, "captures", "g0")
        assert listing.indexes.keys() == listing.segments.keys(), "nothing abandoned is left"
        assert not listing.pending
    assert at > 20
