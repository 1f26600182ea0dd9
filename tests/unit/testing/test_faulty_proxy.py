"""The proxy's faults: their effects on the server and the client, and their seed."""

import threading
import time

import pytest

from deltawire.errors import RetryError
from deltawire.testing.proxy import FaultyProxy

BODY = bytes(range(256)) * 20
ASKED_FOR = ["create", "put", "get", "list", "exists", "delete"]

BEFORE, AFTER = ["old"], ["created", "put"]

# Of each fault: what does not raise, and what is stored then. A delete has no body that could be
# cut off, nor has its answer.
FAULTS = {
    "refuse": ([], BEFORE),
    "busy": ([], BEFORE),
    "cut_request": ([], []),
    "lose": ([], AFTER),
    "busy_after": ([], AFTER),
    "cut_answer": (["create", "put", "exists", "delete"], AFTER),
    "shorten": (["create", "put", "exists", "get", "delete"], AFTER),
    "delay": (ASKED_FOR, AFTER),
}


@pytest.fixture
def through(s3_server, request):
    """``through(proxy)``: the bucket through the proxy and the same one directly."""

    def open_both(proxy, retries=0, **client):
        url = f"s3://drills/proxy/{request.node.name}"
        far = s3_server.open_bare(
            url,
            endpoint=proxy.endpoint,
            retry_config={"max_retries": retries},
            client_options=client,
        )
        return far, s3_server.open_bare(url)

    return open_both


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("server", ["s3_server", "moto_server"])
def test_each_fault(request, server, fault):
    server = request.getfixturevalue(server)
    survived, kept = FAULTS[fault]
    with FaultyProxy(server.endpoint) as proxy:
        url = f"s3://drills/proxy/each/{fault}"
        near = server.open_bare(url)
        far = server.open_bare(url, endpoint=proxy.endpoint, retry_config={"max_retries": 0})
        near.put("old", BODY)
        proxy.choose = lambda method, path, number: fault
        calls = {
            "create": lambda: far.create("created", BODY),
            "put": lambda: far.put("put", BODY),
            "get": lambda: far.get("old", limit=len(BODY)),
            "list": lambda: far.list(""),
            "exists": lambda: far.exists("old"),
            "delete": lambda: far.delete("old"),
        }
        found = {}
        for verb, call in calls.items():
            try:
                found[verb] = call()
            except RetryError as error:
                found[verb] = error
    assert [verb for verb in calls if not isinstance(found[verb], RetryError)] == [
        verb for verb in calls if verb in survived
    ]
    assert {struck for struck, _, _ in proxy.struck} == {fault}
    # All of an object or none of it, whatever was cut off.
    stored = {key: near.get(key, limit=len(BODY)) for key in near.list("")}
    assert stored == dict.fromkeys(kept, BODY)
    if fault == "shorten":
        assert found["get"] == BODY[: len(BODY) // 2]


def test_without_rates_nothing_fails(s3_server, through):
    with FaultyProxy(s3_server.endpoint) as proxy:
        far, near = through(proxy)
        assert far.create("k", BODY)
        assert near.get("k", limit=len(BODY)) == far.get("k", limit=len(BODY)) == BODY
    assert proxy.struck == []
    assert proxy.requests == 2


def test_a_seed_gives_the_same_faults_in_any_thread_order(s3_server, through):
    rates = {"refuse": 0.2, "lose": 0.2, "busy": 0.1}

    def struck(seed, threads):
        with FaultyProxy(s3_server.endpoint, seed=seed, rates=rates) as proxy:
            far, _ = through(proxy)

            def work(part):
                for number in range(part, 40, threads):
                    for _ in range(3):
                        try:
                            far.put(f"k{number}", b"1")
                        except RetryError:
                            continue

            workers = [threading.Thread(target=work, args=(part,)) for part in range(threads)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            return sorted(proxy.struck)

    first = struck(1, 1)
    assert first == struck(1, 4)
    assert first != struck(2, 1)
    assert 30 < len(first) < 90  # Of 120 requests, about half.


def test_mercy_lets_a_request_through_in_the_end(s3_server, through):
    with FaultyProxy(s3_server.endpoint, rates={"busy": 1.0}, mercy=2) as proxy:
        far, _ = through(proxy)
        for _ in range(3):
            for _ in range(2):
                with pytest.raises(RetryError):
                    far.put("k", b"1")
            far.put("k", b"1")
        far, _ = through(proxy, retries=2)
        far.put("k", b"2")
    assert proxy.requests == 12


def test_a_silent_server_times_out(s3_server, through):
    """The client's own timeout ends it; closing the proxy does not wait for it."""
    with FaultyProxy(s3_server.endpoint, rates={"stall": 1.0}) as proxy:
        far, near = through(proxy, timeout="200ms")
        started = time.monotonic()
        with pytest.raises(RetryError):
            far.get("k", limit=1)
        with pytest.raises(RetryError):
            far.create("k", b"1")
    assert time.monotonic() - started < 100
    assert not near.exists("k")
