"""Publisher and subscriber over a network that drops, delays, cuts and refuses requests.

The store is a real S3 server, reached through the proxy. Every operation succeeds or raises;
nothing wrong is committed, and nothing wrong is held.
"""

import random
from contextlib import suppress

import pytest
from history import History, check_bucket, weights

from conftest import QUICK_RETRIES
from deltawire.errors import CorruptError, DeltawireError, RetryError
from deltawire.store import RetryingBucket, retrying
from deltawire.sync import Subscriber, load_mirror, read_run
from deltawire.testing.proxy import FaultyProxy
from deltawire.testing.tiny import same_bits, start_publisher

pytestmark = pytest.mark.drills

LAST = 9
FAULTS = ["refuse", "busy", "cut_request", "lose", "busy_after", "cut_answer", "delay"]
MOST_ERRORS = 10_000
"""A reader without retries restarts each step; over forty seeds it met 170 errors on average and
765 at most."""
FEW_ERRORS = 5
"""A reader that retries, as all do whose bucket was opened as usual, should meet none."""


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)


@pytest.fixture(params=["ministack", "moto"])
def server(request):
    return request.getfixturevalue({"ministack": "s3_server", "moto": "moto_server"}[request.param])


@pytest.fixture
def place(request):
    return "s3://drills/network/" + request.node.name.replace("[", "-").replace("]", "")


@pytest.mark.parametrize("fault", FAULTS)
def test_occasional_faults_are_retried(s3_server, place, fault, drill_seed):
    """Every third request, but never one more often than the client is patient.

    The store's library asks again for everything but a listing that is cut off in the middle. That
    one is an error, and the next life or look finds the listing whole.
    """
    near = s3_server.open_bare(place)
    with FaultyProxy(
        s3_server.endpoint, seed=drill_seed, rates={fault: 0.33}, mercy=2, delay_s=0.005
    ) as proxy:
        far = s3_server.open_bare(place, endpoint=proxy.endpoint, retry_config=QUICK_RETRIES)
        history = History(far, last=LAST)
        for _ in range(3 if fault == "cut_answer" else 1):
            with suppress(RetryError):
                history.live()
        assert history.acknowledged == LAST
        reader, rng = RetryingBucket(far), random.Random(drill_seed)
        held = follow_through(reader, near, history, rng, most_errors=FEW_ERRORS)
        assert held == LAST
    assert len(proxy.struck) > 5
    history.bucket.inner = near
    assert history.audit() == LAST


def test_faults_without_retries(server, place, drill_seed):
    """Without the store library's retries each life may end in an error; the chain continues."""
    rates = dict.fromkeys(FAULTS, 0.05)
    near = server.open_bare(place)
    history = History(near, last=LAST)
    with FaultyProxy(server.endpoint, seed=drill_seed, rates=rates, delay_s=0.002) as proxy:
        far = server.open_bare(place, endpoint=proxy.endpoint, retry_config={"max_retries": 0})
        history.bucket.inner = far
        for _ in range(60):
            # Never fenced: an answer that was lost is no rival.
            with suppress(RetryError):
                history.live()
                break
        history.bucket.inner = near
        assert history.audit() == LAST
        assert len({fault for fault, _, _ in proxy.struck}) >= 3
        held = follow_through(far, near, history, random.Random(drill_seed))
    assert held == LAST


def follow_through(far, near, history, rng, *, most_errors=MOST_ERRORS):
    """Follow through the proxy: occasional errors, and otherwise the right bits."""
    run = read_run(near)
    mirror, errors = None, 0
    while True:
        try:
            if mirror is None:
                mirror = load_mirror(far, run, at=rng.randrange(3))
            subscriber = Subscriber(far, run, mirror)
            update = subscriber.prepare()
        except DeltawireError:
            errors += 1
            assert errors < most_errors
            continue
        assert same_bits(mirror.tensors, history.published(mirror.version))
        if update is None:
            return mirror.version
        subscriber.commit(update)


def test_short_answers_under_a_matching_length(server, place, drill_seed):
    """Lower layers cannot notice; lengths and digests do."""
    near = server.open_bare(place)
    history = History(near, last=LAST)
    history.live()
    run = read_run(near)
    with FaultyProxy(server.endpoint, seed=drill_seed, rates={"shorten": 0.3}) as proxy:
        far = server.open_bare(place, endpoint=proxy.endpoint, retry_config={"max_retries": 0})
        assert follow_through(far, near, history, random.Random(drill_seed)) == LAST
        noticed = 0
        for version in range(LAST + 1):
            for _ in range(3):
                try:
                    mirror = load_mirror(far, run, at=version)
                except (CorruptError, RetryError):
                    noticed += 1
                else:
                    assert same_bits(mirror.tensors, history.published(version))
    assert noticed > 3


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_each_request_in_turn_is_dropped(s3_server, place, done):
    """One request after another is dropped, before or after it was done."""
    place += "-{}"
    with FaultyProxy(s3_server.endpoint) as proxy:
        History(s3_server.open_bare(place.format("clean"), endpoint=proxy.endpoint), last=4).live()
        total = proxy.requests
    assert total > 12
    for at in range(total):
        near = s3_server.open_bare(place.format(at))
        history = History(near, last=4)
        with FaultyProxy(s3_server.endpoint) as proxy:

            def strike(method, path, number, proxy=proxy, at=at):
                if proxy.requests == at:
                    return "lose" if done else "refuse"
                return None

            proxy.choose = strike
            far = s3_server.open_bare(
                place.format(at), endpoint=proxy.endpoint, retry_config={"max_retries": 0}
            )
            history.bucket.inner = far
            with suppress(RetryError):
                history.live()
            assert len(proxy.struck) == 1
            history.bucket.inner = near
            history.audit()
            if history.acknowledged < 4:
                history.bucket.inner = far
                history.live()
                history.bucket.inner = near
        assert history.audit() == 4


def test_a_lost_network_ends_a_publisher_with_an_error(s3_server, place):
    near = s3_server.open_bare(place)
    with FaultyProxy(s3_server.endpoint) as proxy:
        far = s3_server.open_bare(place, endpoint=proxy.endpoint, retry_config={"max_retries": 0})
        publisher = start_publisher(far)
        publisher.publish(weights(0))
        publisher.flush()
        proxy.choose = lambda method, path, number: "refuse"
        publisher.publish(weights(1))
        with pytest.raises(RetryError):
            publisher.close()
    assert check_bucket(near, weights) == 0
