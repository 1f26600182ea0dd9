"""The window of requests: it follows what the store answers, and readers' windows become alike."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scale.storm import simulate_storm
from deltawire.errors import RetryError, ThrottledError
from deltawire.store import bucket as bucket_module
from deltawire.store import open_bucket
from deltawire.store.bucket import Bucket
from deltawire.store.request_limit import LEAST, MOST, RequestLimit, RequestWindow
from deltawire.store.retrying import RetryPolicy
from deltawire.store.translation import means_throttled, translate


def test_a_store_that_keeps_up_gets_the_most():
    window = RequestWindow()
    for number in range(100):
        window.answered(number * 0.1, number * 0.1 + 0.02)
    assert window.size == MOST
    assert window.opens_at(63) <= 10
    assert window.opens_at(64) == float("inf")


def test_one_refusal_halves_it_once_for_all_that_were_under_way():
    window = RequestWindow()
    window.refused(0.0, 1.0)
    window.refused(0.5, 1.1)  # Sent before the first refusal was known.
    assert window.size == 4
    window.refused(1.2, 1.3)
    assert window.size == 2


@given(st.lists(st.tuples(st.booleans(), st.floats(0.001, 10)), max_size=200))
def test_it_stays_within_its_bounds_and_always_opens_again(ends):
    window, now = RequestWindow(), 0.0
    for refused, taken in ends:
        began, now = now, now + taken
        (window.refused if refused else window.answered)(began, now)
        assert LEAST <= window.size <= MOST
        assert window.opens_at(0) <= now + 10 / LEAST
        now = max(now, window.opens_at(0))


@pytest.mark.parametrize("needed_s", [12, 51, 91])
def test_readers_that_outrun_their_store_are_as_late_as_the_store_is_slow(needed_s):
    storm = simulate_storm(needed_s=needed_s, readers=8, blobs=300)
    assert storm.last_vs_needed <= 1.25
    assert storm.attempts <= 1.5
    fixed = simulate_storm(needed_s=needed_s, readers=8, blobs=300, adaptive=False)
    assert fixed.attempts > 3


def test_requests_wait_for_room():
    limit = RequestLimit(RequestWindow(most=1))
    order, entered = [], threading.Event()

    def other():
        with limit.request(means_throttled):
            order.append("other")
        entered.set()

    with limit.request(means_throttled):
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

    policy = RetryPolicy(retries=1, sleep=sleep, rng=lambda: 0.5, clock=lambda: now[0])

    def refused():
        left[0] -= 1
        if left[0]:
            raise ThrottledError("slow down")
        return "done"

    assert policy.run(refused) == "done"
    assert len(slept) == 39
    assert max(slept) == 2.0
    left[0] = 10**9
    with pytest.raises(ThrottledError):
        policy.run(refused)
    assert now[0] > 3600

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
    inner = open_bucket("memory://")
    inner.put("one", b"1")
    bucket = Bucket(inner.store, "s3://a-bucket-of-its-own/run", local=False)
    window = bucket_module.limit_of(bucket.url).window
    assert bucket.get("one", limit=10) == b"1"
    assert [bytes(one) for one in bucket.read_ranges("one", [(0, 1)])] == [b"1"]
    assert window.size == 10  # Both were counted.

    def refused(*_given, **_options):
        raise bucket_module.exceptions.GenericError(
            "Server returned non-2xx status code: 503 Slow Down"
        )

    monkeypatch.setattr(bucket_module.obstore, "get", refused)
    monkeypatch.setattr(bucket_module, "READ_PAUSE_S", 0.0)
    with pytest.raises(ThrottledError):
        bucket.get("one", limit=10)
    assert window.refusals == 1 + bucket_module.READ_RETRIES
    assert window.size < 1


@pytest.mark.parametrize(("failures", "made"), [(4, 5), (5, 5)])
def test_a_read_without_an_answer_is_repeated_as_the_store_was_told_to(monkeypatch, failures, made):
    inner = open_bucket("memory://")
    inner.put("one", b"1")
    bucket = Bucket(inner.store, "s3://another-bucket-of-its-own/run", local=False)
    monkeypatch.setattr(bucket_module, "READ_PAUSE_S", 0.0)
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
