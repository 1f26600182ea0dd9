"""A user who is forgotten: nothing of theirs is found, and what learned from it is named."""

import asyncio
import contextlib

import numpy as np
import pytest
from forgotten_users import everything_in, learned
from live_answers import answer
from live_gateway import SECRET, live_serving, published

from deltawire.errors import RetryError
from deltawire.live.capture.consent import ConsentRule
from deltawire.live.capture.pseudonyms import Pseudonyms
from deltawire.live.erasure.forgetting import forget_user
from deltawire.rl.control.lineages import read_lineages
from deltawire.store import DelegatingBucket
from deltawire.testing.tiny import start_run
from deltawire.wire import keys
from deltawire.wire.rollouts import decode_group

PLANTED = "planted-text-4711"
ALICE = Pseudonyms(SECRET).user("alice")


def test_a_planted_text_is_gone_from_bucket_spool_and_memory(tmp_path, monkeypatch):
    bucket = published(1)
    planted = PLANTED.encode()

    async def scenario():
        options = {"consent": ConsentRule(share=1.0), "keep_text": True}
        async with live_serving(bucket, tmp_path / "state", monkeypatch, **options) as at:
            for user in ("alice", "bob"):
                text = await at.receipt(f"{PLANTED} {user}", user=user)
                await at.report(text, kind="score", value=1)
            await at.uploaded()
            assert everything_in(bucket).count(planted) == 2
            await at.receipt(f"{PLANTED} waits in the spool", user="alice")
            assert planted in everything_in(bucket, tmp_path)
            record = forget_user(bucket, start_run(bucket), ALICE)
            assert (record.answers, record.feedback) == (1, 1)
            at.recorder._state_at = float("-inf")
            captures, feedback = await at.uploaded()
            assert {row.user for row in (*captures, *feedback)} == {Pseudonyms(SECRET).user("bob")}
            remembered = [one.asked for one in at.recorder.conversations._last.values()]
            assert remembered == [f"{PLANTED} bob"]
            await at.receipt(f"{PLANTED} again", user="alice")
            await at.uploaded()

    asyncio.run(scenario())
    found = everything_in(bucket, tmp_path)
    assert found.count(planted) == 1
    assert b"alice" not in found
    assert found.count(ALICE.encode()) == 2  # The record of the erasure, and its key.


def test_versions_are_named_and_groups_hold_nothing_of_the_user():
    from deltawire.store import open_bare_bucket

    bucket = open_bare_bucket("memory://")
    start_run(bucket)
    learned(bucket, {2: ALICE, 6: ALICE})
    record = forget_user(bucket, start_run(bucket), ALICE, no_trainer=True)
    assert record.versions == [1]
    assert record.groups == [("live", 0), ("live", 1)]
    assert bucket.get(keys.rollout("live", 0), limit=1 << 28) is None
    key = keys.rollout("live", 1)
    group = decode_group(bucket.get(key, limit=1 << 28), run="", key=key)
    causes = [trajectory.cause for trajectory in group.trajectories]
    assert causes == ["", "forgotten", "", ""]
    assert len(list(group.trained())) == 3
    stored = everything_in(bucket)
    for number in (2, 6):
        for data in (answer(number).tokens, answer(number).prompt):
            assert data not in stored
    assert np.array_equal(group.trajectories[0].tokens_T, answer(5).token_ids)
    assert not any(one.user == ALICE for line in read_lineages(bucket) for one in line.answers)
    again = forget_user(bucket, start_run(bucket), ALICE, no_trainer=True)
    assert (again.versions, again.groups, again.answers) == ([1], record.groups, record.answers)


class Failing(DelegatingBucket):
    def __init__(self, inner, at):
        super().__init__(inner)
        self.left = at

    def _count(self, key):
        self.left -= 1
        if self.left == 0:
            raise RetryError("planted", run=self.url, key=key)

    def put(self, key, data):
        self._count(key)
        super().put(key, data)

    def delete(self, key):
        self._count(key)
        super().delete(key)


@pytest.mark.parametrize("ended", [True, False], ids=["no trainer", "a checkpoint follows"])
@pytest.mark.parametrize("at", range(1, 12))
def test_an_erasure_that_was_interrupted_forgets_no_version(at, ended):
    from deltawire.store import open_bare_bucket

    bucket = open_bare_bucket("memory://")
    start_run(bucket)
    learned(bucket, {2: ALICE, 6: ALICE})
    run = start_run(bucket)
    with contextlib.suppress(RetryError):
        forget_user(Failing(bucket, at), run, ALICE, no_trainer=ended)
    if not ended:
        assert bucket.exists(keys.rollout("live", 0)), "a trainer may need it"
        bucket.put(keys.checkpoint_commit(1), b"{}")
    record = forget_user(bucket, run, ALICE, no_trainer=ended)
    assert record.versions == [1]
    stored = everything_in(bucket)
    assert not any(answer(n).tokens in stored for n in (2, 6))
