"""An erasure meets a gateway, a learner or another erasure at any of their requests."""

import itertools
from contextlib import nullcontext, suppress

import pytest
from forgotten_users import BOB, CAROL, everything_in, learned, tokens_of
from interrupting_bucket import InterruptingBucket
from live_answers import NOW, answer, config_of, put_rows, report

from deltawire.errors import RetryError
from deltawire.live.capture.spool import Spool
from deltawire.live.capture.uploader import SpooledStream, SpoolUploader
from deltawire.live.erasure.forgetting import GroupsNeededError, forget_user
from deltawire.live.forgotten import forgotten_users
from deltawire.live.learning.grouping import GroupMaker
from deltawire.live.learning.learner import LiveGroups
from deltawire.live.learning.records import LiveRecords
from deltawire.rl.control.lineages import read_lineages
from deltawire.store import open_bare_bucket
from deltawire.testing.tiny import start_run
from deltawire.wire import keys
from deltawire.wire.captures import Capture, Feedback, encode_row
from deltawire.wire.rollouts import decode_group

OWNERS = {2: BOB, 3: CAROL}


class Faulty(InterruptingBucket):
    """If the interrupted request is a write, its answer may be ``lost``; with ``short``, the next
    listing of the users who were forgotten shows none."""

    def __init__(self, inner, at, interrupt, *, after=False, fault=""):
        super().__init__(inner, at, interrupt, after=after)
        self.fault = fault

    def _call(self, verb, key, operation):
        if self.left <= 0 and (self.fault, verb, key) == ("short", "list", keys.LIVE_FORGOTTEN):
            self.fault = ""
            return []
        found = super()._call(verb, key, operation)
        if self.left == 0 and self.fault == "lost" and verb in ("create", "put"):
            raise RetryError("no answer")
        return found


def assert_forgotten(bucket, users, numbers):
    """Only the records of the erasures hold the users, and nothing holds their answers."""
    stored = {key: bucket.get(key, limit=1 << 28) for key in bucket.list("")}
    for key, data in stored.items():
        assert not [n for n in numbers if tokens_of(n) in data], key
        if not key.startswith(keys.LIVE_FORGOTTEN):
            assert not [user for user in users if user.encode() in data], key


@pytest.mark.parametrize("after", [False, True])
def test_an_erasure_at_any_request_of_an_upload_leaves_nothing(tmp_path, after):
    for at in itertools.count(1):
        bucket = open_bare_bucket("memory://")
        run = start_run(bucket)
        meeting = Faulty(bucket, at, lambda b=bucket, r=run: forget_user(b, r, BOB), after=after)
        spools = [
            Spool(tmp_path / f"{at}-{name}", limit_bytes=1 << 20) for name in ("answers", "reports")
        ]
        try:
            for number in (1, 2, 3):
                user = BOB if number == 2 else None
                spools[0].append(encode_row(answer(number, user=user)))
                spools[1].append(encode_row(report(number, user=user)))
            streams = [
                SpooledStream(spools[0], keys.live_captures, Capture),
                SpooledStream(spools[1], keys.live_feedback, Feedback),
            ]
            uploader = SpoolUploader(
                meeting, "g0", streams, forgotten=lambda m=meeting: forgotten_users(m)
            )
            assert uploader.upload()
            assert not [spool.sealed() for spool in spools if spool.sealed()]
        finally:
            for spool in spools:
                spool.close()
        if meeting.left > 0:
            break
        assert_forgotten(bucket, [BOB], [2])
        records = LiveRecords(bucket)
        records.poll()
        assert sorted(records.answers) == [f"{n:032x}" for n in (1, 3)]
    assert at > 4, "reading the records and storing two segments are requests to meet at"


@pytest.mark.parametrize(
    ("after", "fault"), [(False, ""), (True, ""), (False, "lost"), (False, "short")]
)
def test_an_erasure_at_any_request_of_a_learner_leaves_nothing(after, fault):
    for at in itertools.count(1):
        bucket = open_bare_bucket("memory://")
        run = start_run(bucket)
        numbers = range(1, 5)
        put_rows(
            bucket, 0, [answer(n, user=OWNERS.get(n)) for n in numbers],
            [report(n, user=OWNERS.get(n), value=float(n % 3 == 0)) for n in numbers],
        )  # fmt: skip
        found = []
        meeting = Faulty(
            bucket, at, lambda b=bucket, r=run, f=found: f.append(forget_user(b, r, BOB)),
            after=after, fault=fault,
        )  # fmt: skip
        records = LiveRecords(meeting)
        records.poll()
        groups = LiveGroups(meeting, "live", GroupMaker(config_of(), records), first=0)
        stored = False
        with suppress(RetryError):
            stored = groups.store("n0", NOW + 100)
        if fault:  # The learner asks again, and finds what it has stored.
            stored = groups.store("n0", NOW + 100) or stored
        if meeting.left > 0:
            break
        assert_forgotten(bucket, [BOB], [2])
        if not stored:  # The user was forgotten before the answers were read: too few are left.
            continue
        group = decode_group(bucket.get(keys.rollout("live", 0), limit=1 << 28), run="", key="k")
        causes = [one.cause for one in group.trajectories]
        assert causes in (["", "forgotten", "", ""], [""] * 4)
        assert [one.user for one in read_lineages(bucket)[0].answers].count("") == 1
        assert forget_user(bucket, run, CAROL).groups == [("live", 0)]
        assert_forgotten(bucket, [BOB, CAROL], [2, 3])
    assert at > 8, "records, lineage and group are requests to meet at"


@pytest.mark.parametrize(
    ("after", "ended"),
    [(False, True), (True, True), pytest.param(False, False, id="a checkpoint follows")],
)
def test_two_erasures_at_once_leave_nothing_of_either(after, ended):
    def forget(bucket, run, user):
        with nullcontext() if ended else pytest.raises(GroupsNeededError):
            return forget_user(bucket, run, user, no_trainer=ended)

    for at in itertools.count(1):
        bucket = open_bare_bucket("memory://")
        run = start_run(bucket)
        learned(bucket, {2: BOB, 3: CAROL, 6: CAROL, 7: BOB})
        meeting = Faulty(bucket, at, lambda b=bucket, r=run: forget(b, r, CAROL), after=after)
        mine = forget(meeting, run, BOB)
        if meeting.left > 0:
            break
        if not ended:
            assert bucket.exists(keys.rollout("live", 0))
            bucket.put(keys.checkpoint_commit(1), b"{}")
            mine = forget_user(bucket, run, BOB)
        theirs = forget_user(bucket, run, CAROL, no_trainer=ended)
        assert_forgotten(bucket, [BOB, CAROL], [2, 3, 6, 7])
        assert mine.versions == theirs.versions == [1]
        assert mine.groups == theirs.groups == [("live", 0), ("live", 1)]
        assert tokens_of(1) in everything_in(bucket)
    assert at > 20, "records, lineages, segments and groups are requests to meet at"
