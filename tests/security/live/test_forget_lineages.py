"""An erasure meets a compaction of lineages at any request of either, or one that was killed."""

import itertools
import threading

import pytest
from forgotten_users import BOB, CAROL
from interrupting_bucket import InterruptingBucket, KilledError
from live_answers import NOW, answer, put_rows
from signed_run import OTHER, WORKER, SignedRun
from stored_lineages import compact_lineages, lineage_of, merge_early, start_settled

from deltawire.errors import InputError
from deltawire.live.erasure.forgetting import (
    GroupsNeededError,
    forget_pseudonyms,
    forget_user,
)
from deltawire.rl.control.lineages import read_lineages, require_lineages
from deltawire.store import open_bucket
from deltawire.wire import keys
from deltawire.wire.compacted import CompactedIndex, CompactedName, encode_index
from deltawire.wire.lineage import Forgotten, without_users
from deltawire.wire.objects import decode_json

DRILLS = pytest.mark.drills
COUNT = 6
EACH = [11, pytest.param(1, marks=DRILLS)]
"""Every eleventh request, or each."""
OWNERS = {0: [BOB], 2: [CAROL, BOB], 4: [CAROL]}


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch):
    merge_early(monkeypatch)


def lineages():
    return [
        lineage_of(n, [*OWNERS.get(n, []), f"{n:032x}", f"{99 + n:032x}"], at=NOW + n)
        for n in range(COUNT)
    ]


def stored():
    bucket = open_bucket("memory://")
    return bucket, start_settled(bucket, lineages())


def compact(bucket, **options):
    return compact_lineages(bucket, **options)


def forgotten(bucket, run, user):
    """Erases a user; returns the versions that were trained on it."""
    return forget_user(bucket, run, user).versions


def holds_in(bucket, key, user):
    """Returns whether an object names a user."""
    return user.encode() in bucket.get(key, limit=1 << 28)


def assert_whole(bucket, gone):
    """Nothing of these users is stored, and all lineages can be read without them."""
    for key in bucket.list(""):
        data = bucket.get(key, limit=1 << 28)
        if not key.startswith(keys.LIVE_FORGOTTEN):
            assert not [user for user in gone if user.encode() in data], key
    assert read_lineages(bucket) == [without_users(one, gone) for one in lineages()]
    for user in gone:
        key = keys.live_forgotten(user)
        record = decode_json(bucket.get(key, limit=1 << 20), Forgotten, run="", key=key)
        wanted = [("live", n) for n, owners in OWNERS.items() if user in owners]
        assert (record.groups, record.versions) == (wanted, [1])
    with_them = {n for n, owners in OWNERS.items() if set(owners) & set(gone)}
    left = {keys.trailing_number(key) for key in bucket.list(keys.rollouts_of("live"))}
    assert left == set(range(COUNT)) - with_them


def test_a_user_is_taken_out_of_compacted_lineages():
    bucket, run = stored()
    compact(bucket)
    assert len(bucket.list(keys.LIVE_LINEAGE)) == 2
    assert forgotten(bucket, run, BOB) == [1]
    assert_whole(bucket, [BOB])
    assert len(bucket.list(keys.LIVE_LINEAGE)) == 2, "none is stored at its key again"
    assert require_lineages(bucket, users=[BOB]) == []
    compact(bucket, clock=lambda: 1e12)
    assert_whole(bucket, [BOB])
    assert forgotten(bucket, run, CAROL) == [1]
    assert_whole(bucket, [BOB, CAROL])


def killed_erasures(before, each):
    """Yields a bucket, and its run, for each of the requests at which an erasure was killed; of
    lineages that were compacted ``before``, or not."""
    for at in itertools.count(1, each):
        bucket, run = stored()
        if before:
            compact(bucket)
        try:
            forgotten(InterruptingBucket(bucket, at, ends=0), run, BOB)
        except KilledError:
            yield bucket, run
        else:
            assert at > 20, "an erasure has requests to be killed at"
            return


@pytest.mark.parametrize("each", EACH)
@pytest.mark.parametrize(
    ("after", "ends"),
    [(False, None), *(pytest.param(True, n, marks=DRILLS) for n in (None, 0, 1, 2, 5))],
)
def test_an_erasure_at_any_request_of_a_compaction_leaves_nothing(after, ends, each):
    for at in itertools.count(1, each):
        bucket, run = stored()
        meeting = InterruptingBucket(
            bucket, at, lambda b=bucket, r=run: forgotten(b, r, BOB), after=after, ends=ends
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
        forgotten(bucket, run, CAROL)
        assert_whole(bucket, [BOB, CAROL])
    assert at > 20, "reading, storing and deleting lineages are requests to meet at"


@pytest.mark.parametrize("each", EACH)
@pytest.mark.parametrize(
    ("after", "before"), [(False, True), pytest.param(True, False, marks=DRILLS)]
)
def test_a_compaction_at_any_request_of_an_erasure_leaves_nothing(after, before, each):
    """Of lineages, and of objects that were compacted ``before`` and are merged meanwhile."""
    for at in itertools.count(1, each):
        bucket, run = stored()
        if before:
            compact(bucket)
        meeting = InterruptingBucket(
            bucket, at, lambda b=bucket: compact(b, clock=lambda: 1e12), after=after
        )
        forgotten(meeting, run, BOB)
        if meeting.left > 0:
            break
        assert_whole(bucket, [BOB])
    assert at > 20, "an erasure has requests to meet at"


@pytest.mark.parametrize("each", EACH)
@pytest.mark.parametrize(
    "before", [True, pytest.param(False, marks=DRILLS)], ids=["compacted", "meanwhile"]
)
@pytest.mark.parametrize(
    "signed", [False, pytest.param(True, marks=DRILLS)], ids=["unsigned", "signed"]
)
def test_an_erasure_that_is_killed_anywhere_leaves_nothing_after_the_next(before, each, signed):
    """No compaction comes in between. In a signed run the next one asks for the learner's key,
    as long as a lineage names the user."""
    left = 0
    for bucket, run in killed_erasures(before, each):
        if signed and require_lineages(bucket, users=[BOB]):
            left += 1
            with pytest.raises(InputError, match="live"):
                forget_user(bucket, run, BOB, learners={})
        forget_user(bucket, run, BOB, learners={"live": bucket} if signed else None)
        assert_whole(bucket, [BOB])
    assert left or not signed


def test_an_index_that_lost_its_segment_does_not_keep_a_user():
    """An erasure or an expiry was killed between the two deletes. To delete it no key is needed:
    the learner may have ended, and its key be gone."""
    bucket, run = stored()
    compact(bucket)
    (index,) = [key for key in bucket.list(keys.LIVE_INDEX) if holds_in(bucket, key, BOB)][:1]
    forget_user(bucket, run, BOB)
    assert_whole(bucket, [BOB])
    place = CompactedName("lineage", "live", index.rsplit("/", 1)[-1])
    facts = {"stream": "lineage", "owner": "live", "name": place.name, "users": [BOB]}
    bucket.put(
        place.index_key, encode_index(CompactedIndex(rows=1, oldest=NOW, newest=NOW, **facts))
    )
    forget_user(bucket, run, BOB, learners={})
    assert_whole(bucket, [BOB])


def test_a_segment_that_is_announced_needs_the_key_of_the_learner_of_the_users_groups():
    """The void objects in its place are signed. A killed erasure, or compaction, announced it."""
    bucket, run = stored()
    forget_user(bucket, run, BOB)
    place = CompactedName("lineage", "live", keys.live_compacted_name(0, 1, "0" * 32))
    bucket.create(place.announcement_key, b"")
    with pytest.raises(InputError, match="live"):
        forget_user(bucket, run, BOB, learners={})
    forget_user(bucket, run, BOB, learners={"live": bucket})
    assert bucket.is_listed(place.key)


def test_a_signed_erasure_needs_no_key_of_a_learner_of_which_only_an_index_is_left():
    """Its segment was deleted by an expiry, which was killed then."""
    run = SignedRun()
    run.grant("gateway", OTHER)
    run.grant("worker-live", WORKER)
    gateway, learner = run.bucket("gateway", signer=OTHER), run.bucket("worker-live", signer=WORKER)
    put_rows(gateway, 0, [answer(1, user=BOB), answer(2, user=CAROL)])
    for number, user in enumerate((BOB, CAROL)):
        name = keys.live_compacted_name(number, number, "0" * 32)
        place = CompactedName("lineage", "live", name)
        facts = {"stream": "lineage", "owner": "live", "name": name, "users": [user]}
        index = CompactedIndex(rows=1, oldest=NOW, newest=NOW, **facts)
        learner.put(place.index_key, encode_index(index))
    assert forget_user(gateway, run.run, BOB, learners={}).answers == 1
    assert gateway.list(keys.LIVE_INDEX) == [place.index_key], "that of the other user"


@pytest.mark.parametrize("each", EACH)
@pytest.mark.parametrize(
    "before", [True, pytest.param(False, marks=DRILLS)], ids=["compacted", "meanwhile"]
)
def test_an_erasure_that_is_killed_anywhere_ends_when_it_runs_again(before, each):
    """Also if a compaction, and the erasure of another user of the same objects, come first."""
    for bucket, run in killed_erasures(before, each):
        compact(bucket, clock=lambda: 1e12)
        assert forgotten(bucket, run, CAROL) == [1]
        assert forgotten(bucket, run, BOB) == [1]
        assert_whole(bucket, [BOB, CAROL])


def interleave(bucket, run, i, j):
    """Stops a compaction before its ``i``-th request and an erasure before its ``j``-th, then
    finishes the compaction, and then the erasure; returns whether each came so far."""
    stopped, go = threading.Event(), threading.Event()
    failed = []

    def stop():
        stopped.set()
        assert go.wait(60)

    def work():
        try:
            compact(compaction)
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
    forgotten(erasure, run, BOB)
    finish()
    assert not failed
    return compaction.left <= 0, erasure.left <= 0


@pytest.mark.parametrize(
    ("stops", "resumes"),
    [
        (range(12, 60, 7), range(9, 200, 31)),
        pytest.param(range(1, 1000, 2), range(1, 1000, 3), marks=DRILLS),
    ],
)
def test_an_erasure_that_goes_on_while_a_compaction_stands_leaves_nothing(stops, resumes):
    pairs = 0
    for i in stops:
        for j in resumes:
            bucket, run = stored()
            came = interleave(bucket, run, i, j)
            assert_whole(bucket, [BOB])
            if not all(came):
                break
            pairs += 1
        if not came[0]:
            break
    assert pairs >= 8, "both have requests to stand at"


@DRILLS
def test_two_erasures_of_users_of_one_object_leave_nothing_of_either():
    for after in (False, True):
        for at in itertools.count(1):
            bucket, run = stored()
            compact(bucket)
            meeting = InterruptingBucket(
                bucket, at, lambda b=bucket, r=run: forgotten(b, r, CAROL), after=after
            )
            forgotten(meeting, run, BOB)
            if meeting.left > 0:
                break
            assert_whole(bucket, [BOB, CAROL])


@pytest.mark.parametrize("each", EACH)
def test_a_compaction_that_is_killed_anywhere_loses_nothing(each):
    for at in itertools.count(1, each):
        bucket, run = stored()
        killed = InterruptingBucket(bucket, at, ends=0)
        try:
            compact(killed)
        except KilledError:
            pass
        else:
            break
        assert_whole(bucket, [])
        compact(bucket, clock=lambda: 1e12)
        assert_whole(bucket, [])
        assert forgotten(bucket, run, BOB) == [1]
        assert_whole(bucket, [BOB])
    assert at > 20


def test_users_stay_in_lineages_of_groups_that_a_trainer_needs():
    """And are found there once it does not need them any more."""
    bucket, run = stored()
    compact(bucket)
    commit = bucket.get(keys.checkpoint_commit(1), limit=1 << 20)
    bucket.delete(keys.checkpoint_commit(1))  # As if the checkpoint were lost.
    with pytest.raises(GroupsNeededError):
        forget_user(bucket, run, BOB)
    assert bucket.list(keys.rollouts_of("live"))
    found = require_lineages(bucket, users=[BOB])
    assert [one.sequence for one in found] == [0, 2]
    bucket.put(keys.checkpoint_commit(1), commit)
    compact(bucket, clock=lambda: 1e12)
    assert forgotten(bucket, run, BOB) == [1]
    assert_whole(bucket, [BOB])


def test_lineages_that_a_worker_forged_are_deleted_unread():
    bucket, run = stored()
    compact(bucket)
    for place in keys.LINEAGE_PREFIXES:
        bucket.put(f"{place}evil/{keys.live_compacted_name(0, 1, '0' * 32)}", b"junk")
    bucket.put(keys.live_lineage("evil", 0), b"junk")
    forget_pseudonyms(bucket, run, [BOB], no_learners=["evil"])
    assert not [key for key in bucket.list("live/") if "evil" in key]
    assert_whole(bucket, [BOB])


def test_the_keys_of_learners_whose_lineages_are_compacted_are_asked_for():
    bucket, run = stored()
    compact(bucket)
    before = {key: bucket.get(key, limit=1 << 28) for key in bucket.list("")}
    with pytest.raises(InputError, match="live"):
        forget_user(bucket, run, BOB, learners={})
    assert {key: bucket.get(key, limit=1 << 28) for key in bucket.list("")} == before
    forget_user(bucket, run, BOB, learners={"live": bucket})
    assert_whole(bucket, [BOB])
