"""The window of requests: it follows what the store answers, and readers' windows become alike."""

import threading
import time
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scale.storm import simulate_storm
from deltawire.errors import RetryError, ThrottledError
from deltawire.store import bucket as bucket_module
from deltawire.store import open_bucket, request_limit
from deltawire.store import repeats as repeats_module
from deltawire.store.bucket import Bucket
from deltawire.store.host_limit import HostLimit
from deltawire.store.request_limit import (
    FIRST,
    LEAST,
    MOST,
    STALLED_S,
    WRITERS_LEAST,
    RequestLimit,
    RequestWindow,
    limit_of,
)
from deltawire.store.retrying import RetryPolicy
from deltawire.store.translation import means_throttled, outcome_of, translate


def test_a_store_that_keeps_up_gets_the_most():
    window = RequestWindow()
    for number in range(100):
        window.sent(63, number * 0.1)
        window.answered(number * 0.1, number * 0.1 + 0.02)
    assert window.size == MOST
    assert window.opens_at(63) <= 10
    assert window.opens_at(64) == float("inf")


def grown():
    """A window after a hundred answers."""
    window = RequestWindow()
    for _ in range(100):
        window.sent(63, 0.0)
        window.answered(0.0, 0.1)
    return window


def test_one_refusal_counts_for_all_that_were_under_way():
    window = grown()
    window.refused(0.0, 1.0)
    assert window.size == 0.5 * MOST
    window.refused(0.5, 1.1)  # Sent before the first refusal was known: little of it counts.
    assert window.size == pytest.approx(0.5 * MOST - 0.65)
    size = window.size
    window.refused(1.2, 1.3)
    assert window.size == pytest.approx(0.5 * size)


def test_a_window_that_is_not_used_does_not_grow_and_begins_again():
    window = RequestWindow()
    for second in range(100):
        window.sent(0, second)
        window.answered(second, second + 0.1)
    assert window.size <= 3
    window = grown()
    window.sent(0, 0.2)
    assert window.size == MOST
    window.sent(0, 60.0)
    assert window.size == 2
    for _ in range(40):
        window.sent(2, 60.0)
        window.answered(60.0, 60.1)
    assert 32 < window.size < 34, "it doubles up to half of what it was"


def test_of_a_window_that_was_refused_as_a_whole_one_request_is_left():
    window = grown()
    for _ in range(64):
        window.refused(0.5, 1.0)
    assert window.size == 1


def test_a_store_that_answers_nothing_gets_a_request_in_minutes():
    window, now = RequestWindow(), 0.0
    window.answered(0.0, 0.1)
    for _ in range(40):
        began = max(now, window.opens_at(0))
        window.sent(0, began)
        now = began + 0.1
        window.refused(began, now)
    assert 60 < window.opens_at(0) - now < 120
    began = window.opens_at(0)
    window.sent(0, began)
    window.answered(began, began + 0.1)
    assert window.opens_at(0) - began < 25, "after one answer"


def test_a_few_refusals_by_chance_cost_no_long_pause():
    window, now = RequestWindow(), 1.0
    window.answered(0.0, 0.1)
    for _ in range(12):  # One after another, as the processes of a host may get them.
        window.refused(now, now + 0.01)
        now += 0.02
    assert window.request_s < 0.6 * now, "5 s without the limit on pauses"


def test_a_small_window_loses_less_by_a_refusal():
    window = RequestWindow()
    window.answered(0.0, 1.0)
    window.size = 1.5
    window.refused(1.1, 1.2)
    assert window.size == pytest.approx(0.5 * 1.5)
    window.refused(1.3, 1.4)
    assert window.size == pytest.approx(0.7 * 0.5 * 1.5)


def test_a_request_without_an_answer_leaves_the_window_as_it_is():
    limit = RequestLimit()
    before = limit.window.size
    with suppress(OSError), limit.request(outcome_of):
        raise OSError("connection refused")
    assert limit.window.size == before
    assert limit.window.refusals == 0


@pytest.mark.parametrize("kind", ["process", "host"])
def test_requests_that_hang_do_not_keep_others_from_a_small_window(kind, tmp_path):
    now = [100.0]
    if kind == "process":
        limit = RequestLimit(clock=lambda: now[0])
    else:
        limit = HostLimit(tmp_path / "limit", clock=lambda: now[0])
    limit.window.size = FIRST
    with ExitStack() as hanging:
        for _ in range(int(FIRST)):
            now[0] += 1.0
            hanging.enter_context(limit.request(outcome_of))
        assert limit._under_way == FIRST
        now[0] += STALLED_S - 1.5
        assert limit._admit(bulk=False) == float("inf")
        now[0] += 2.0
        with limit.request(outcome_of):
            pass
    assert limit._under_way == 0
    assert limit._begun == []


def test_no_more_requests_hang_than_a_window_may_have():
    now = [0.0]
    limit = RequestLimit(clock=lambda: now[0])
    with ExitStack() as hanging:
        for _ in range(int(MOST)):
            now[0] += 60.0
            hanging.enter_context(limit.request(outcome_of))
        now[0] += 60.0
        assert limit._admit(bulk=False) == float("inf")


def test_the_window_of_commits_never_becomes_small():
    window = limit_of("s3://commits/run", first=True).window
    for number in range(40):
        window.refused(number, number + 0.5)
    assert window.size == WRITERS_LEAST
    assert limit_of("s3://commits/run").window is not window


def test_other_requests_go_before_bulk_ones():
    limit = RequestLimit(RequestWindow(most=1))
    order, threads = [], []

    def ask(name, *, bulk):
        with limit.request(outcome_of, bulk=bulk):
            order.append(name)

    def waiting(name, *, bulk):
        thread = threading.Thread(target=ask, args=(name,), kwargs={"bulk": bulk})
        threads.append(thread)
        thread.start()

    with limit.request(outcome_of):
        for number in range(8):
            waiting(f"blob {number}", bulk=True)
        waiting("manifest", bulk=False)
        while not limit._preferred:
            time.sleep(0.001)
    for thread in threads:
        thread.join(10)
    assert order[0] == "manifest"
    assert len(order) == 9


@given(st.lists(st.tuples(st.booleans(), st.floats(0.001, 10)), max_size=200))
def test_it_stays_within_its_bounds_and_always_opens_again(ends):
    window, now = RequestWindow(), 0.0
    for refused, taken in ends:
        began, now = now, now + taken
        window.sent(0, began)
        (window.refused if refused else window.answered)(began, now)
        assert LEAST <= window.size <= MOST
        assert window.opens_at(0) <= now + 10 / LEAST
        now = max(now, window.opens_at(0))


@pytest.mark.parametrize("needed_s", [12, 51, 91])
def test_readers_that_outrun_their_store_are_as_late_as_the_store_is_slow(needed_s):
    storm = simulate_storm(needed_s=needed_s, readers=8, blobs=300)
    assert storm.last_vs_needed <= 1.25
    assert storm.attempts <= 1.3
    fixed = simulate_storm(needed_s=needed_s, readers=8, blobs=300, adaptive=False)
    assert fixed.attempts > 3


def test_requests_wait_for_room():
    limit = RequestLimit(RequestWindow(most=1))
    order, entered = [], threading.Event()

    def other():
        with limit.request(outcome_of):
            order.append("other")
        entered.set()

    with limit.request(outcome_of):
        thread = threading.Thread(target=other)
        thread.start()
        assert not entered.wait(0.05)
        order.append("own")
    thread.join(10)
    assert order == ["own", "other"]


def test_refusals_are_waited_out_and_other_failures_counted():
    now, slept, left = [0.0], [], [40]

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    policy = RetryPolicy(
        retries=1, sleep=sleep, rng=lambda: 0.5, clock=lambda: now[0], throttled_s=7200
    )

    def refused():
        left[0] -= 1
        if left[0]:
            raise ThrottledError("slow down")
        return "done"

    assert policy.run(refused, paced=True) == "done"
    assert len(slept) == 39
    assert max(slept) == 2.0
    left[0], began_s = 10**9, now[0]
    slept.clear()
    with pytest.raises(ThrottledError):
        policy.run(refused)
    # A write has no window that sets its pace: the pauses grow with the time of refusals.
    assert slept[0] == pytest.approx(0.01)
    assert max(slept) == 120.0
    assert 7200 < now[0] - began_s < 7200 + 120

    def failed():
        left[0] += 1
        raise RetryError("no answer")

    left[0] = 0
    with pytest.raises(RetryError):
        policy.run(failed)
    assert left[0] == 2


@pytest.mark.parametrize(
    ("status", "refused"), [(503, True), (429, True), (500, False), (404, False)]
)
def test_which_answers_are_refusals_for_too_many_requests(status, refused):
    error = Exception(f"Server returned non-2xx status code: {status} Slow Down")
    assert means_throttled(error) is refused
    made = translate(error, "read", "s3://bucket/run", "run.json")
    assert isinstance(made, ThrottledError) is refused


def test_reads_of_remote_stores_go_through_the_window(monkeypatch):
    monkeypatch.setattr(repeats_module, "TIMEOUT_S", 0.1)  # A bucket reads it when it is made.
    inner = open_bucket("memory://")
    inner.put("one", b"1")
    bucket = Bucket(inner.store, "s3://a-bucket-of-its-own/run", local=False)
    window = bucket_module.limit_of(bucket.url).window
    assert bucket.get("one", limit=10) == b"1"
    assert [bytes(one) for one in bucket.read_ranges("one", [(0, 1)])] == [b"1"]
    assert window.size == 3  # Both were counted; one at a time needs no more.
    assert sum(window._times._count) == 2, "with the bytes of both answers"

    def refused(*_given, **_options):
        raise bucket_module.exceptions.GenericError(
            "Server returned non-2xx status code: 503 Slow Down"
        )

    monkeypatch.setattr(bucket_module.obstore, "get", refused)
    monkeypatch.setattr(repeats_module.time, "sleep", lambda _: None)
    with pytest.raises(ThrottledError):
        bucket.get("one", limit=10)
    assert window.refusals > 1
    assert window.size < 3


@pytest.mark.parametrize(("failures", "made"), [(4, 5), (5, 5)])
def test_a_read_without_an_answer_is_repeated_as_the_store_was_told_to(monkeypatch, failures, made):
    inner = open_bucket("memory://")
    inner.put("one", b"1")
    bucket = Bucket(inner.store, "s3://another-bucket-of-its-own/run", local=False)
    monkeypatch.setattr(repeats_module, "FIRST_PAUSE_S", 0.0)
    real, asked = bucket_module.obstore.get, []

    def flaky(*given, **options):
        asked.append(given)
        if len(asked) <= failures:
            raise bucket_module.exceptions.GenericError("error sending request")
        return real(*given, **options)

    monkeypatch.setattr(bucket_module.obstore, "get", flaky)
    if failures < made:
        assert bucket.get("one", limit=10) == b"1"
    else:
        with pytest.raises(RetryError):
            bucket.get("one", limit=10)
    assert len(asked) == made
    monkeypatch.setattr(bucket_module.obstore, "get", real)
    assert bucket.get("missing", limit=10) is None


def test_a_process_says_for_how_long_its_store_has_refused(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(request_limit, "time", SimpleNamespace(monotonic=lambda: now[0]))
    url = "s3://says-why/run"
    assert request_limit.refusals_of(url) == ""
    assert request_limit.refused_ago_s(url) == float("inf")
    for _ in range(4):
        request_limit.note_refusal(url)
        now[0] += 50.0
    assert "refused requests for 200 s" in request_limit.refusals_of(url)
    assert request_limit.refused_ago_s(url) == 50.0
    now[0] += 20.0
    assert request_limit.refusals_of(url) == ""
    request_limit.note_refusal(url)
    assert "refused requests for 0 s" in request_limit.refusals_of(url)
