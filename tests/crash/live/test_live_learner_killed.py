"""A learner that dies at any write, and starts again, puts no answer into two groups."""

from contextlib import suppress

import pytest
from live_answers import LIVE, NOW, answer, config_of, put_rows, report

from deltawire.chat.text import Text
from deltawire.config import parse_config
from deltawire.errors import FencedError
from deltawire.live.learning.edits import EditEncoder, edit_name
from deltawire.live.learning.grouping import GroupMaker
from deltawire.live.learning.learner import LiveGroups
from deltawire.live.learning.records import LiveRecords
from deltawire.rl.control.lineages import read_lineages
from deltawire.store import DelegatingBucket, open_bare_bucket
from deltawire.wire import keys
from deltawire.wire.rollouts import decode_group

ANSWERS, SIZE = 12, 4


class Killed(BaseException):
    """The end of the process."""


class Dying(DelegatingBucket):
    """Ends the process before or after its ``at``-th write."""

    def __init__(self, inner, at, *, after):
        super().__init__(inner)
        self.left, self.after = at, after

    def create(self, key, data):
        self.left -= 1
        if self.left == 0 and not self.after:
            raise Killed
        made = super().create(key, data)
        if self.left == 0:
            raise Killed
        return made


def learner_of(bucket, lives):
    records = LiveRecords(bucket)
    records.poll()
    numbers = [keys.group_of(key)[1] + 1 for key in bucket.list(keys.rollouts_of("live"))]
    maker = GroupMaker(config_of(), records)
    return LiveGroups(bucket, "live", maker, first=max(numbers, default=0)), lives


def learn(bucket, life):
    groups, _ = learner_of(bucket, life)
    number = 0
    while groups.store(f"nonce-{life}-{number}", NOW + 100):
        number += 1


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", range(1, 7))
def test_a_pair_has_the_edit_of_its_lineage_after_a_death(at, after, byte_tokenizer):
    """A newer edit of every answer comes while the learner is gone."""
    loss = {"advantage": "given", "preference": {"kind": "simpo"}}
    config = parse_config({**LIVE, "train": {"loss": loss}}, source="test")
    bucket = open_bare_bucket("memory://")
    numbers = range(1, ANSWERS + 1)
    edits = {n: report(n, "edit", text=f"first {n}") for n in numbers if n % 2}
    votes = [report(n, value=float(n % 3 == 0)) for n in numbers]
    put_rows(bucket, 0, [answer(n) for n in numbers], [*votes, *edits.values()])

    def learn(bucket):
        records = LiveRecords(bucket)
        records.poll()
        stored = [keys.group_of(key)[1] + 1 for key in bucket.list(keys.rollouts_of("live"))]
        maker = GroupMaker(config, records, edits=EditEncoder(Text(byte_tokenizer), config))
        groups = LiveGroups(bucket, "live", maker, first=max(stored, default=0))
        while groups.store(f"nonce-{groups.sequence}", NOW + 100):
            pass

    with suppress(Killed):
        learn(Dying(bucket, at, after=after))
    put_rows(bucket, 1, [], [report(n, "edit", text=f"later {n}", after_s=9.0) for n in edits])
    learn(bucket)
    lineages = read_lineages(bucket)
    claimed = [one.answer for lineage in lineages for one in lineage.answers]
    assert len(claimed) == len(set(claimed)) == ANSWERS
    for lineage in lineages:
        key = keys.rollout("live", lineage.sequence)
        group = decode_group(bucket.get(key, limit=1 << 28), run="", key=key)
        for one, t in zip(lineage.answers, group.trajectories, strict=True):
            number = int(one.answer, 16)
            assert (t.better is not None) == (number in edits) == bool(one.edit)
            if t.better is not None:
                first = one.edit == edit_name(edits[number])
                text = f"{'first' if first else 'later'} {number}".encode()
                assert bytes(t.better.tokens_T.tolist()[: len(text)]) == text


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("first", range(1, 8))
@pytest.mark.parametrize("second", [1, 2, 3])
def test_every_answer_is_in_one_group_after_two_deaths(first, second, after):
    bucket = open_bare_bucket("memory://")
    numbers = range(1, ANSWERS + 1)
    put_rows(
        bucket,
        0,
        [answer(n) for n in numbers],
        [report(n, value=float(n % 3 == 0)) for n in numbers],
    )
    for life, at in enumerate((first, second)):
        try:
            learn(Dying(bucket, at, after=after), life)
        except Killed:
            continue
    learn(bucket, 2)
    lineages = read_lineages(bucket)
    claimed = [one.answer for lineage in lineages for one in lineage.answers]
    assert len(claimed) == len(set(claimed)) == ANSWERS
    assert [lineage.sequence for lineage in lineages] == [0, 1, 2]
    for lineage in lineages:
        key = keys.rollout("live", lineage.sequence)
        group = decode_group(bucket.get(key, limit=1 << 28), run="", key=key)
        tokens = [trajectory.tokens_T.tolist() for trajectory in group.trajectories]
        wanted = [answer(int(one.answer, 16)).token_ids.tolist() for one in lineage.answers]
        assert tokens == wanted


def test_two_learners_of_one_name_do_not_share_a_number():
    bucket = open_bare_bucket("memory://")
    numbers = range(1, ANSWERS + 1)
    put_rows(
        bucket,
        0,
        [answer(n) for n in numbers],
        [report(n, value=float(n % 3 == 0)) for n in numbers],
    )
    one, _ = learner_of(bucket, 0)
    other, _ = learner_of(bucket, 0)
    assert one.store("nonce-one", NOW + 100)
    stored = bucket.get(keys.live_lineage("live", 0), limit=1 << 20)
    with pytest.raises(FencedError, match="--id"):
        other.store("nonce-other", NOW + 200)
    assert bucket.get(keys.live_lineage("live", 0), limit=1 << 20) == stored
