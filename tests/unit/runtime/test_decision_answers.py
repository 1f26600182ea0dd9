"""The series of decisions: a damaged answer makes no decision void, and none is made on it."""

import msgspec
import pytest

from deltawire.runtime.decision_log import DecisionLog
from deltawire.store import open_bare_bucket
from deltawire.testing.faulty import FaultyBucket, flip_bit, half
from deltawire.wire import keys
from deltawire.wire.decisions import Decision, ServedVersion
from deltawire.wire.objects import encode_json

RUN = "ab" * 16
FIRST = Decision(
    number=0, run=RUN, verdict="serve", serving=ServedVersion(1, "0" * 32), at=0.0, by="ann"
)
SECOND = msgspec.structs.replace(
    FIRST, number=1, verdict="promote", serving=ServedVersion(2, "1" * 32)
)
THIRD = msgspec.structs.replace(
    SECOND, number=2, verdict="rollback", serving=FIRST.serving, candidate=SECOND.serving
)


@pytest.fixture
def bucket(monkeypatch):
    monkeypatch.setattr(FaultyBucket, "poll_s", 0.0)
    found = FaultyBucket(open_bare_bucket("memory://"))
    for decision in (FIRST, SECOND):
        found.put(keys.live_decision(decision.number), encode_json(decision))
    return found


def change_version(data):
    """Another version than was decided, which is valid."""
    return data.replace(b'"version":2', b'"version":3')


DAMAGES = {
    "a flipped bit": lambda data: flip_bit(data, 4321),
    "a short body": half,
    "another decision": lambda _data: encode_json(FIRST),
    "another version": change_version,
    "absent": lambda _data: None,
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("at", [1, 2])
def test_one_bad_answer_is_asked_for_again(bucket, name, at):
    bucket.replace("get", keys.live_decision(1), at=at, answer=DAMAGES[name])
    log = DecisionLog(bucket, RUN)
    log.poll()
    log.poll()
    assert (log.decisions, log.void) == ([FIRST, SECOND], {})


def test_no_decision_is_appended_after_one_that_was_void_for_a_while(bucket):
    bucket.damage(keys.live_decision(1), half)
    log = DecisionLog(bucket, RUN)
    log.poll()
    assert list(log.void) == [1]
    bucket.heal()
    assert not log.append(THIRD), "it was decided without knowing the one before"
    assert (log.decisions, log.void) == ([FIRST, SECOND], {})
    assert log.append(THIRD)


def test_junk_stops_no_series(bucket):
    bucket.put(keys.live_decision(1), b"junk")
    log = DecisionLog(bucket, RUN)
    log.poll()
    promoted = msgspec.structs.replace(SECOND, number=2)
    assert log.append(promoted)
    unchained = [msgspec.structs.replace(one, previous="") for one in log.decisions]
    assert (unchained, list(log.void)) == ([FIRST, promoted], [1])


def test_a_poll_without_a_new_decision_is_one_request(bucket):
    log = DecisionLog(bucket, RUN)
    log.poll()
    bucket.operations.clear()
    log.poll()
    assert bucket.operations == [("get", keys.live_decision(2))]
