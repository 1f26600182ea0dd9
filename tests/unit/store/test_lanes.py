"""Requests that go first, and requests that are repeated here instead of by the store's library."""

import threading

import pytest

from deltawire.errors import RetryError, ThrottledError
from deltawire.store import RetryingBucket, RetryPolicy, WriterBucket, open_bare_bucket
from deltawire.store.bucket import Bucket
from deltawire.store.lanes import current_lane, in_lane
from deltawire.store.request_limit import limit_of
from deltawire.store.translation import outcome_of
from deltawire.testing.faulty import FaultyBucket
from deltawire.testing.proxy import FaultyProxy
from deltawire.testing.tiny import start_publisher, weights

QUICK = {"max_retries": 4}


def remote(name):
    """A bucket that counts as remote, and the limit of its reads with room for one."""
    bucket = Bucket(open_bare_bucket("memory://").store, f"s3://{name}/run", local=False)
    window = limit_of(bucket.url).window
    window.size = window.most = 1
    return bucket, limit_of(bucket.url)


def ends(call, timeout_s=60):
    done = threading.Thread(target=call, daemon=True)
    done.start()
    done.join(timeout_s)
    return not done.is_alive()


def test_a_commit_waits_for_no_reader():
    bucket, limit = remote("commits-wait-for-no-reader")
    publisher = start_publisher(bucket)
    publisher.publish(weights(0), wait=True)
    with limit.request(outcome_of):  # A reader that gets no answer, and there is room for one.
        assert ends(lambda: publisher.publish(weights(1), wait=True))
        assert not ends(lambda: bucket.exists("run.json"), 0.1)
    assert publisher.version == 1
    publisher.close()


def test_ranges_are_read_in_the_lane_of_their_caller():
    bucket, limit = remote("ranges-in-a-lane")
    bucket.put("k", b"0123456789" * 1000_000)
    first = WriterBucket.over(bucket)
    with limit.request(outcome_of):
        assert ends(lambda: first.read_ranges("k", [(0, 5), (9_000_000, 5)]))


def test_the_first_lane_is_kept_below():
    assert current_lane() == "normal"
    with in_lane("first"), in_lane("bulk"):
        assert current_lane() == "first"
    with in_lane("bulk"):
        assert current_lane() == "bulk"
    assert current_lane() == "normal"


@pytest.mark.parametrize("lane", ["first", "normal"])
def test_refused_writes_and_commits_wait_a_share_of_the_time_that_they_were_refused(lane):
    faulty, pauses, now = FaultyBucket(open_bare_bucket("memory://")), [], [0.0]

    def sleep(seconds):
        pauses.append(seconds)
        now[0] += seconds

    def slow_down(*_):
        return ThrottledError("slow down")

    policy = RetryPolicy(sleep=sleep, rng=lambda: 0.5, clock=lambda: now[0])
    bucket = RetryingBucket(faulty, policy)
    faulty.fail("get", times=30, error=slow_down)
    with in_lane(lane):
        bucket.get("k", limit=1)
    if lane == "normal":  # The window sets the pace, so the pauses need not grow.
        assert max(pauses) == 2.0
        return
    assert now[0] < 20
    for number, pause_s in enumerate(pauses):
        assert pause_s <= max(0.1, 0.1 * sum(pauses[:number]) + 1e-9)


@pytest.mark.parametrize("fault", ["lose", "refuse", "cut_request", "busy_after"])
def test_a_create_without_an_answer_is_repeated_here(s3_server, fault):
    url = f"s3://drills/lost/{fault}"
    with FaultyProxy(s3_server.endpoint) as proxy:
        proxy.choose = lambda method, path, number: fault if number == 0 else None
        bucket = s3_server.open_bare(url, endpoint=proxy.endpoint, retry_config=QUICK)
        made = bucket.create("k", b"mine")
        # After a lost answer the object may be there: the caller reads it back.
        assert made is (fault in ("refuse", "cut_request"))
        assert bucket.get("k", limit=4) == b"mine"
        assert len(proxy.struck) == 2  # The first create and the first read.


@pytest.mark.parametrize("verb", ["put", "head", "list"])
def test_other_requests_without_an_answer_are_repeated_here(s3_server, verb):
    calls = {
        "put": lambda bucket: bucket.put("k", b"1"),
        "head": lambda bucket: bucket.head("k"),
        "list": lambda bucket: bucket.list(""),
    }
    with FaultyProxy(s3_server.endpoint, rates={"lose": 1.0}, mercy=3) as proxy:
        patient = s3_server.open_bare(
            "s3://drills/lost", endpoint=proxy.endpoint, retry_config=QUICK
        )
        calls[verb](patient)
        assert proxy.requests == 4
    with FaultyProxy(s3_server.endpoint, rates={"lose": 1.0}) as proxy:
        hasty = s3_server.open_bare(
            "s3://drills/lost", endpoint=proxy.endpoint, retry_config={"max_retries": 0}
        )
        with pytest.raises(RetryError):
            calls[verb](hasty)
        assert proxy.requests == 1


def test_a_listing_goes_on_where_it_was_cut_off(s3_server, monkeypatch):
    monkeypatch.setattr("deltawire.store.bucket.PAGE", 3)
    direct = s3_server.open_bare("s3://drills/pages")
    names = [f"k{number}" for number in range(10)]
    for name in names:
        direct.put(name, b"")
    with FaultyProxy(s3_server.endpoint, rates={"cut_answer": 1.0}, mercy=1) as proxy:
        bucket = s3_server.open_bare(
            "s3://drills/pages", endpoint=proxy.endpoint, retry_config=QUICK
        )
        assert bucket.list("") == names
        assert proxy.struck
