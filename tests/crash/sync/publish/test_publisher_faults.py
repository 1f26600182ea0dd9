"""Fail the store at each operation in turn, then audit the bucket.

In every case each committed version holds what was published for it, no committed manifest
changes, and a new publisher continues from the head.
"""

from contextlib import suppress

import pytest
from history import History, weights

from deltawire.errors import CorruptError, DeltawireError, FencedError, InputError, RetryError
from deltawire.store import open_bucket, retrying
from deltawire.sync import Subscriber, load_mirror, newest_version
from deltawire.testing.faulty import disk_full, half, no_answer
from deltawire.testing.tiny import audit, same_bits, start_publisher
from deltawire.wire import keys

LAST = 6
OPERATIONS_OF_AN_ANCHOR = 6
"""Its blob, the floors, the object, the intents twice, the check of its blob."""


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)


def operations_of_a_clean_life():
    history = History(open_bucket("memory://"), last=LAST)
    history.live()
    assert history.audit() == LAST
    operations = history.bucket.operations
    stored = [key for verb, key in operations if verb == "put" and key.startswith(keys.BLOBS)]
    assert len(stored) == 1 + 6 + 2
    assert sum(verb == "create" for verb, _ in operations) == 1 + 7 + 2
    return len(operations)


ONLY_LONG = [pytest.mark.drills, pytest.mark.long]
FAILURES = [
    pytest.param(1, no_answer, id="once-no_answer"),
    pytest.param(None, no_answer, id="until-restart-no_answer"),
    pytest.param(None, disk_full, id="until-restart-disk_full"),
    # A full disk is not asked again, so it ends a life however long it lasts; and three lost
    # answers are asked for as one is.
    pytest.param(3, no_answer, id="thrice-no_answer", marks=ONLY_LONG),
    pytest.param(1, disk_full, id="once-disk_full", marks=ONLY_LONG),
    pytest.param(3, disk_full, id="thrice-disk_full", marks=ONLY_LONG),
]


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("times", "error"), FAILURES)
def test_each_operation_in_turn(done, error, times):
    count = operations_of_a_clean_life()
    lives = []
    for at in range(1, count + 1):
        history = History(open_bucket("memory://"), last=LAST)
        history.bucket.fail(at=at, times=times, done=done, error=error)
        with suppress(DeltawireError):
            history.live()
        assert len(history.bucket.operations) >= at
        before = history.audit()
        if before < LAST:
            history.bucket.heal()
            history.live()
        assert history.audit() == LAST
        lives.append(history.lives)
    retried = error is no_answer and times is not None
    # Every request is repeated, those of the start too, so one lost answer restarts no life. The
    # operations of the two anchors end no life, but the next version's meet the same store, nor do
    # those after the last commit.
    restarted = 0 if retried else count - 6 - 2 * OPERATIONS_OF_AN_ANCHOR
    assert lives.count(2) >= restarted
    assert lives.count(1) >= (count if retried else 0)


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("key", ["weights/manifests/*", "weights/blobs/*"])
def test_lost_answers_cost_nothing_but_time(key, done):
    history = History(open_bucket("memory://"), last=LAST)
    for at in range(1, 60, 2):
        history.bucket.fail("create", key, at=at, done=done)
    history.live()
    assert history.lives == 1
    assert history.audit() == LAST


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_the_read_back_may_fail_too(done):
    history = History(open_bucket("memory://"), last=LAST)
    history.lives = 1
    publisher = start_publisher(history.bucket, anchor_every=3)
    for _ in range(LAST + 1):
        for verb in ("create", "get"):
            history.bucket.fail(verb, "weights/manifests/*", times=2, done=done)
        history.publish(publisher)
        publisher.flush()
        history.bucket.heal()
    publisher.close()
    tried = [key for verb, key in history.bucket.operations if verb == "create"]
    assert tried.count(keys.manifest(LAST)) == 3
    assert history.audit() == LAST


@pytest.mark.parametrize("error", [no_answer, disk_full])
@pytest.mark.parametrize("verb_and_key", [("put", "weights/blobs/*"), ("create", "*/manifests/*")])
@pytest.mark.parametrize("at", [2, 3])
def test_the_baseline_does_not_advance_before_the_commit(verb_and_key, at, error):
    """The trainer continues with other weights under the same number: readers get those."""
    history = History(open_bucket("memory://"), last=LAST)
    publisher = start_publisher(history.bucket, anchor_every=3)
    published = []
    for version in range(at):
        published.append(weights(version))
        publisher.publish(published[-1])
    publisher.flush()
    reader = Subscriber(
        history.bucket.inner,
        publisher.run,
        load_mirror(history.bucket.inner, publisher.run),
        stepwise=True,
    )
    history.bucket.fail(*verb_and_key, times=None, error=error)
    for lost in range(3):
        assert publisher.publish(weights(at, seed=90 + lost)) == at
        with pytest.raises((RetryError, InputError)):
            publisher.flush()
        assert publisher.version == at - 1
        assert newest_version(history.bucket.inner) == at - 1
        assert reader.prepare() is None
    history.bucket.heal()
    for version in (at, at + 1, at + 2):
        published.append(weights(version, seed=50))
        assert publisher.publish(published[-1]) == version
    publisher.close()
    assert audit(history.bucket.inner, lambda version: published[version]) == at + 2
    for version in (at, at + 1, at + 2):
        reader.commit(reader.prepare())
        assert same_bits(reader.mirror.tensors, published[version])


@pytest.mark.parametrize("error", [no_answer, disk_full])
def test_an_unacknowledged_commit_never_forks(error):
    """The manifest was created, but no answer came: the publisher must not overwrite it."""
    history = History(open_bucket("memory://"), last=LAST)
    publisher = start_publisher(history.bucket, anchor_every=3)
    publisher.publish(weights(0))
    publisher.flush()
    history.bucket.fail("create", "*/manifests/*", times=None, done=True, error=error)
    history.bucket.fail("get", times=None)
    publisher.publish(weights(1))
    with pytest.raises((RetryError, InputError)):
        publisher.flush()
    history.bucket.heal()
    assert newest_version(history.bucket) == 1
    # It remembers its nonce, finds that it was the one, and builds on it.
    assert publisher.publish(weights(2)) == 2
    publisher.close()
    assert audit(history.bucket, weights) == 2


@pytest.mark.parametrize("kind", ["folder", "s3"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_each_operation_in_turn_on_a_real_store(new_bucket, kind, done):
    """The failure persists, so that the trainer has to be restarted; then everything works.

    Every other operation in a folder, and every fourth on the slower store: others before it is
    done than after. Each operation in turn fails in memory above.
    """
    stride = 2 if kind == "folder" else 4
    first = 1 + done * stride // 2
    for at in range(first, operations_of_a_clean_life() + 1, stride):
        history = History(new_bucket(kind), last=LAST)
        history.bucket.fail(at=at, times=None, done=done)
        with suppress(DeltawireError):  # A failure of the last anchor ends no life.
            history.live()
        assert len(history.bucket.operations) >= at
        history.audit()
        history.bucket.heal()
        history.live()
        assert history.audit() == LAST


def test_each_answer_in_turn_is_short():
    """A short answer is an error or has no effect; it never becomes a version."""
    troubled = 0
    for at in range(1, operations_of_a_clean_life() + 1):
        history = History(open_bucket("memory://"), last=LAST)
        history.live()
        history.last += 3  # A second life reads at least one object at its start.
        history.bucket.damage("*", half, at=at, times=1)
        # A manifest's read-back is asked for by a create whose answer was lost.
        history.bucket.fail("create", "*/manifests/*", at=2, done=True)
        try:
            history.live()
        except CorruptError:
            troubled += 1
        history.audit()
        history.bucket.heal()
        history.live()
        assert history.audit() == LAST + 3
    # Not at run.json, which is read again before a publisher believes a damaged answer.
    assert troubled >= 2


def test_listings_in_any_order():
    for seed in range(5):
        history = History(open_bucket("memory://"), last=3)
        history.bucket.shuffle(seed=seed)
        for _ in range(4):
            history.live()
            history.last += 3
        history.audit()


def test_a_rival_at_each_operation_in_turn():
    """Between any two operations of a trainer, another starts and commits a version.

    Each number has one author, and the publisher that was overtaken raises.
    """
    fenced = 0
    count = operations_of_a_clean_life()
    for at in range(1, count + 2):
        history = History(open_bucket("memory://"), last=LAST)
        rival = History(history.bucket.inner, last=LAST)
        rival.lives = 100  # Different weights.
        rival.attempts = history.attempts

        def overtake(rival=rival):
            rival.lives += 1
            publisher = start_publisher(rival.bucket, anchor_every=3)
            rival.publish(publisher)
            publisher.close()

        # The last turn is after the last operation.
        history.bucket.pause(wait=overtake, at=min(at, count), done=at > count)
        try:
            history.live()
        except FencedError:
            fenced += 1
            history.live()
        assert rival.lives == 101
        # A trainer that is overtaken after its last operation has nothing left to raise.
        assert history.audit() in (LAST, LAST + 1)
    assert fenced > 10
