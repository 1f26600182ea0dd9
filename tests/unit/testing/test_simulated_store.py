"""The simulated store: requests overlap, pages and ranges count, and rates are kept."""

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from deltawire.errors import RetryError
from deltawire.store import in_parallel, open_bare_bucket
from deltawire.store.ranges import AT_ONCE, NEAR_BYTES
from deltawire.testing.simulated import PAGE_KEYS, SimulatedBucket


class Time:
    """A clock that moves only when somebody sleeps."""

    def __init__(self):
        self.now = 0.0
        self.slept = []

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def simulated(**options):
    time = Time()
    inner = open_bare_bucket("memory://")
    return SimulatedBucket(inner, clock=lambda: time.now, sleep=time.sleep, **options), time


def test_each_request_takes_the_latency_and_pages_take_more():
    bucket, time = simulated(latency_s=0.5)
    for number in range(PAGE_KEYS + 1):
        bucket.inner.put(f"a/{number:05d}", b"x" * 40)
    bucket.list("a/")
    assert time.now == 1.0
    assert bucket.requests["list"] == 2
    bucket.inner.put("large", bytes(2 * NEAR_BYTES * (AT_ONCE + 1)))
    bucket.read_ranges("large", [(2 * NEAR_BYTES * n, 1) for n in range(AT_ONCE + 1)])
    assert time.now == 2.0
    assert bucket.requests["range"] == AT_ONCE + 1
    bucket.read_ranges("large", [(0, 1), (5, 1)])
    assert (time.now, bucket.requests["range"]) == (2.5, AT_ONCE + 2)
    assert bucket.get("a/00001", limit=100) == b"x" * 40
    assert (time.now, bucket.total_requests) == (3.0, 2 + AT_ONCE + 3)


def test_requests_beyond_the_rate_are_refused_until_time_passes():
    bucket, time = simulated(latency_s=0.0, reads_per_s=2, writes_per_s=1)
    bucket.put("a", b"1")
    assert bucket.get("a", limit=1) == b"1"
    assert bucket.head("a") is not None
    with pytest.raises(RetryError, match="more requests than the store's limit"):
        bucket.get("a", limit=1)
    with pytest.raises(RetryError):
        bucket.put("a", b"2")
    assert bucket.refused == 2
    time.now += 1.0
    assert bucket.get("a", limit=1) == b"1"


def test_bytes_take_time_on_each_connection():
    bucket, time = simulated(latency_s=0.0, bytes_per_s=100)
    bucket.put("a", b"x" * 50)
    assert time.now == pytest.approx(0.5)


def test_requests_overlap_up_to_a_bound():
    bucket = SimulatedBucket(open_bare_bucket("memory://"), latency_s=0.01)
    for number in range(40):
        bucket.inner.put(str(number), b"%d" % number)
    keys = [str(number) for number in range(40)]
    found = in_parallel(bucket, lambda key: bucket.get(key, limit=9), keys, at_once=8)
    assert found == [key.encode() for key in keys]
    assert 1 < bucket.most_at_once <= 8


def test_a_store_on_this_machine_is_asked_one_thing_at_a_time():
    bucket = open_bare_bucket("memory://")
    order = []
    assert in_parallel(bucket, order.append, range(20)) == [None] * 20
    assert order == [*range(20)]


def test_the_first_error_is_raised_and_later_requests_are_left_out():
    bucket = SimulatedBucket(open_bare_bucket("memory://"), latency_s=0.0)
    made, failed = [], Event()

    def request(number):
        made.append(number)
        if number == 3:
            failed.set()
            raise ValueError("the third")
        if number > 3:  # no request is faster than the news of the error
            assert failed.wait(10)
            time.sleep(0.001)

    with pytest.raises(ValueError, match="the third"):
        in_parallel(bucket, request, range(10_000), at_once=2)
    assert len(made) < 10_000


def test_many_threads_may_use_it():
    bucket = SimulatedBucket(open_bare_bucket("memory://"), latency_s=0.0)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: bucket.put(str(n), b"1"), range(200)))
    assert bucket.requests["put"] == 200
