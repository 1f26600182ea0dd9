"""Two learners of one run take each answer once, also if they are killed and stand still."""

import pytest
from live_answers import answer

from benchmarks.live.two_learners import TwoLearners, twice
from deltawire.live.learning.grouping import group_of_answers
from deltawire.live.learning.owners import HANDOVER_S, AnswerOwners
from deltawire.rl.control.rollout_buffer import RolloutBuffer
from deltawire.rl.control.staleness import Strict
from deltawire.rl.control.trained_answers import TrainedAnswers
from deltawire.runtime.fleet import Fleet
from deltawire.store import open_bucket
from deltawire.testing.tiny import start_run
from deltawire.wire import keys
from deltawire.wire.ledger import Ledger
from deltawire.wire.lineage import LearnedAnswer, Lineage
from deltawire.wire.objects import encode_json
from deltawire.wire.rollouts import encode_group

NAMES = ("one", "two")


def test_no_answer_is_trained_on_twice_by_learners_that_are_killed_and_stand_still():
    world = TwoLearners(0, answers=240)
    world.pass_time(300)
    found = world.trained()
    assert twice(found.values()) == 0
    assert len(world.lineages()) >= 220
    assert world.kills > 3
    assert twice(world.trained(guarded=False).values()) > 0, (
        "a stop makes two owners: see the guard"
    )


@pytest.fixture
def bucket():
    return open_bucket("memory://")


@pytest.fixture
def store(bucket):
    """Stores a learner's group of these answers, and its lineage."""

    def put(worker, sequence, *numbers, lineage=None):
        captures = [answer(n) for n in numbers]
        learned = [LearnedAnswer(one.answer, one.user, 1.0, 1.0, 1.0, 1.0) for one in captures]
        group = group_of_answers(learned, captures, worker=worker, nonce="n", temperature=1.0)
        bucket.put(keys.rollout(worker, sequence), encode_group(group))
        if lineage is None:
            line = Lineage(worker=worker, sequence=sequence, at=0.0, answers=learned)
            lineage = encode_json(line)
        bucket.put(keys.live_lineage(worker, sequence), lineage)

    return put


def buffer_of(bucket, ledger):
    answers = TrainedAnswers(bucket, start_run(bucket), ledger)
    return RolloutBuffer(bucket, ledger, limit=100, answers=answers)


def taken(buffer, ledger):
    batch = buffer.next_batch(Strict(1, 100), version=0)
    if batch is None:
        return None
    for place in [(one.worker, one.sequence) for one in batch.taken] + batch.dropped:
        ledger.settle(*place)
    return batch


def test_the_trainer_refuses_a_group_that_shares_an_answer_also_after_a_restart(bucket, store):
    store("one", 0, 1, 2)
    store("two", 0, 2, 3)
    store("two", 1, 4, 5)
    ledger = Ledger()
    buffer = buffer_of(bucket, ledger)
    buffer.poll(NAMES)
    first, second = taken(buffer, ledger), taken(buffer, ledger)
    assert [(one.worker, one.sequence) for one in first.taken + second.taken] == [
        ("one", 0), ("two", 1)
    ]  # fmt: skip
    (drop,) = first.drops
    assert (drop.worker, drop.sequence, drop.cause) == ("two", 0, "repeated")
    assert drop.detail == "group 0 of one holds one of its answers"
    store("one", 1, 6, 5)
    store("one", 2, 7, 8)
    again = buffer_of(bucket, ledger)
    again.poll(NAMES)
    third = taken(again, ledger)
    assert [one.sequence for one in third.taken] == [2]
    assert [one.cause for one in third.drops] == ["repeated"]


@pytest.mark.parametrize("lineage", [b"", b"{}", b"not json"])
def test_a_group_whose_answers_are_not_known_is_not_trained_on(bucket, store, lineage):
    store("one", 0, 1, 2, lineage=lineage)
    store("one", 1, 3, 3)
    store("one", 2, 4, 5)
    ledger = Ledger()
    buffer = buffer_of(bucket, ledger)
    buffer.poll(["one"])
    batch = taken(buffer, ledger)
    assert [one.sequence for one in batch.taken] == [2]
    assert [one.detail.split(",")[0] for one in batch.drops] == [
        "its lineage cannot be read", "it holds an answer twice"
    ]  # fmt: skip
    assert not buffer.quarantined, "the worker is not blamed"


def test_an_answer_that_changes_its_owner_waits(bucket):
    one = AnswerOwners("one", Fleet(bucket, silence_s=10))
    even, odd = f"{2:032x}", f"{1:032x}"
    one.observe([], 0.0)
    assert not one.owns(even), "nobody knows of it yet"
    one.observe([], HANDOVER_S)
    assert [one.owns(even), one.owns(odd)] == [True, True]
    one.observe(["two"], HANDOVER_S + 1)
    assert one.learners == ["one", "two"]
    assert [one.owns(even), one.owns(odd)] == [True, False]
    one.observe([], HANDOVER_S + 2)
    assert [one.owns(even), one.owns(odd)] == [False, False], "nothing is certain yet"
    one.observe([], 2 * HANDOVER_S + 2)
    assert [one.owns(even), one.owns(odd)] == [True, True]
