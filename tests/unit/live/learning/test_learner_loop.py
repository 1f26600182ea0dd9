"""A learner's loop: when it may store, when it begins again, and how it ends."""

import itertools
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from forgotten_users import BOB
from granted_groups import SECRET, start_with_groups
from heartbeats import put_heartbeat
from live_answers import LIVE, answer, config_of, put_rows, report

from deltawire.config import parse_config
from deltawire.errors import CorruptError, FencedError, InputError
from deltawire.events import Evaluated
from deltawire.live.compaction.maintenance import MaintenanceThread
from deltawire.live.erasure.forgetting import forget_user
from deltawire.live.erasure.rebuilding import rebuild_without
from deltawire.live.learning import learner
from deltawire.live.learning.grouping import GroupMaker
from deltawire.live.learning.learner import LearnerLoop, run_learner
from deltawire.live.learning.records import LiveRecords
from deltawire.rl.control.challenges import nonce_of
from deltawire.rl.control.lineages import read_lineages
from deltawire.runtime.decision_log import DecisionLog
from deltawire.runtime.event_tail import events_of
from deltawire.runtime.process import Process
from deltawire.store import open_bare_bucket
from deltawire.sync import read_manifest
from deltawire.testing.faulty import FaultyBucket
from deltawire.testing.tiny import start_publisher, start_run, weights
from deltawire.wire import keys
from deltawire.wire.decisions import Decision, RestoreRecord, ServedVersion
from deltawire.wire.ledger import CommitMetadata, ranges_of
from deltawire.wire.objects import encode_json
from deltawire.wire.rollouts import decode_group
from deltawire.wire.status import TrainerStatus

NOW = 1_000_000.0


def trainer(granted, phase="training", version=0):
    """A trainer's status that grants the learner so many groups."""
    return TrainerStatus(
        phase=phase, version=version, digest="0" * 32, epoch=1, credits={"live": granted}, at=NOW
    )


@pytest.fixture
def started(monkeypatch):
    """Starts learners' loops whose clock stands at `NOW` + 100, and that look at every turn."""
    monkeypatch.setattr(learner, "time", SimpleNamespace(
        time=lambda: NOW + 100, monotonic=itertools.count(1000.0, 1000.0).__next__
    ))  # fmt: skip
    with ExitStack() as stack:

        def start(bucket, config, **link):
            process = Process(bucket, "live", "worker", supervised=False)
            stack.enter_context(process.registered())
            lines = []
            loop = LearnerLoop(process, start_run(bucket), config, report=lines.append)
            loop.link.secret = SECRET
            loop.owners.observe([], -1e3)  # It started long ago, and all others know of it.
            for name, value in link.items():
                setattr(loop.link, name, value)
            return loop, lines

        yield start


def with_answers(numbers, owners=None):
    """A bucket with answers and reports of these numbers."""
    bucket, owners = open_bare_bucket("memory://"), owners or {}
    start_run(bucket)
    put_rows(
        bucket, 0, [answer(n, user=owners.get(n)) for n in numbers],
        [report(n, user=owners.get(n), value=float(n % 3 == 0)) for n in numbers],
    )  # fmt: skip
    return bucket


def stored(bucket):
    """The numbers of the answers of each group that is stored."""
    return [
        [int(one.answer, 16) for one in lineage.answers]
        for lineage in read_lineages(bucket)
        if bucket.head(keys.rollout(lineage.worker, lineage.sequence)) is not None
    ]


def test_groups_are_stored_for_credits_of_a_trainer_that_trains(started):
    bucket = with_answers(range(1, 13))
    loop, lines = started(bucket, config_of())
    for status in (None, trainer(2, "starting"), trainer(0), trainer(2, "finished")):
        loop.link.status = status
        assert not loop._turn()
    loop.link.status = trainer(2)
    loop.link.secret = None
    assert not loop._turn(), "the trainer's secret is not known yet"
    loop.link.secret = SECRET
    assert [loop._turn() for _ in range(4)] == [True, True, False, False]
    assert stored(bucket) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    lease = loop.process.lease.number
    for number in range(2):
        key = keys.rollout("live", number)
        group = decode_group(bucket.get(key, limit=1 << 28), run="", key=key)
        assert group.nonce == nonce_of(SECRET, lease, number)
    assert (loop._status().stored, loop._status().first) == (2, 0)
    assert lines[-1].startswith("2 groups stored; ")
    assert lines[-1].endswith("; 8 matured, 4 trained")


def test_nothing_is_learned_before_an_evaluated_version_passes_the_bar(started):
    bucket = with_answers(range(1, 13))
    loop, _ = started(bucket, config_of(start_bar=0.6), status=trainer(3))
    evaluator = Process(bucket, "evaluator", "evaluator", supervised=False)

    def evaluated(version, accuracy):
        one = Evaluated(
            process="evaluator", at=0.0, version=version, accuracy=accuracy, problems=1, seconds=1.0
        )
        evaluator.events.record(one)
        evaluator.events.flush()

    assert not loop._turn()
    evaluated(1, 0.9)
    evaluated(2, 0.5)
    assert not loop._turn(), "the newest version counts, not the best"
    evaluated(3, 0.6)
    assert loop._turn()
    evaluated(4, 0.0)
    assert loop._turn(), "learning has begun"


def serve(bucket, run, number, version, **facts):
    log = DecisionLog(bucket, run.id)
    log.poll()
    serving = ServedVersion(version, read_manifest(bucket, run, version).digest)
    assert log.append(
        Decision(
            number=number, run=run.id, verdict="serve", at=0.0, by="ann", serving=serving, **facts
        )
    )


@pytest.mark.parametrize("over", [False, True])
def test_learning_pauses_as_long_as_the_gate_says(started, over):
    bucket = with_answers(range(1, 9))
    run = start_run(bucket)
    log = DecisionLog(bucket, run.id)
    serving, failed = (ServedVersion(n, f"{n:032x}") for n in (0, 1))
    about = {"run": run.id, "at": 0.0, "by": "gate", "serving": serving}
    until = NOW + (50.0 if over else 1000.0)
    figures = {"gate_failures": 3.0, "paused_until": until}
    assert log.append(Decision(number=0, verdict="serve", **about))
    assert log.append(
        Decision(number=1, verdict="rollback", candidate=failed, evidence=figures, **about)
    )
    loop, _ = started(bucket, config_of(), status=trainer(2))
    assert loop._turn() == over
    assert ("learning pauses" in loop.waits) == (not over)


@pytest.mark.parametrize("baseline", ["batch", "value_tracker", "learned"])
def test_a_rebuild_offers_the_other_answers_again_once_it_is_restored(started, baseline):
    bucket = with_answers(range(1, 10), owners={6: BOB})
    run, config = start_run(bucket), config_of(baseline=baseline)
    loop, lines = started(bucket, config, status=trainer(2))
    assert [loop._turn() for _ in range(3)] == [True, True, False]
    publisher = start_publisher(bucket)
    try:
        publisher.publish(weights(0))
        for version in (1, 2):
            step = CommitMetadata(step=version, consumed=[("live", version - 1)])
            publisher.publish(weights(version), metadata=step.to_dict())
        publisher.flush()
        serve(bucket, run, 0, 2)
        loop.link.status = trainer(9)
        versions = forget_user(bucket, run, BOB, no_trainer=True).versions
        assert rebuild_without(bucket, run, versions, by="ann", now=0.0).restores == 1
        assert not loop._turn(), "the trainer has restored nothing yet"
        log = DecisionLog(bucket, run.id)
        log.poll()
        record = RestoreRecord(
            decision=1, restored=log.decisions[1].serving, first=2, last=2, state="weights",
            groups=ranges_of([("live", 1)]),
        )  # fmt: skip
        publisher.publish(weights(1), metadata=record.to_dict())
        publisher.flush()
    finally:
        publisher.close()
    assert loop._turn()
    assert any("rebuilt without a user" in line for line in lines)
    assert stored(bucket) == [[1, 2, 3, 4], [5, 7, 8, 9]]
    assert [lineage.sequence for lineage in read_lineages(bucket)] == [0, 1, 2]
    assert (loop._status().stored, loop._status().first) == (3, 0)
    assert not loop._turn(), "each answer is trained on once more, not again and again"
    records = LiveRecords(bucket)
    records.poll()
    fresh = GroupMaker(config, records)
    for lineage in read_lineages(bucket):
        if lineage.sequence != 1:
            fresh.claim(lineage)
    known = [maker._baseline and vars(maker._baseline) for maker in (loop.maker, fresh)]
    assert repr(known[0]) == repr(known[1]), "a baseline counts no answer twice"


def test_a_learner_says_why_it_stores_nothing(started):
    bucket = with_answers(range(1, 4))
    put_rows(bucket, 1, [answer(n, temperature=0.5) for n in range(4, 9)])
    loop, _ = started(bucket, config_of(start_bar=0.6), status=None)
    assert not loop._turn()
    assert loop._status().waits == "the trainer is not running"
    loop.link.status = trainer(1)
    assert not loop._turn()
    assert loop.waits == "live.start_bar is 0.6, and no version is evaluated yet"
    loop._open = True
    assert not loop._turn()
    assert loop.waits == (
        "3 answers of 3 users can be trained on, a group takes 4; 5 unusable (most often: "
        "sampled at temperature 0.5, not 1.0)"
    )
    put_rows(bucket, 2, [answer(9)], [report(9)])
    assert loop._turn()
    assert loop.waits == ""
    assert not loop._turn()
    assert loop.waits == "", "the trainer has granted no further group"


def test_an_outage_is_reported_and_waited_for(started):
    bucket = FaultyBucket(with_answers(range(1, 5)))
    loop, lines = started(bucket, config_of(), status=trainer(1))
    loop.records._bucket = bucket
    bucket.fail("list", "live/captures/*")
    assert not loop._turn()
    assert lines[-1].startswith("waits for the store: ")
    assert loop._turn()


def test_a_learner_that_lost_its_name_stores_nothing_more(started):
    bucket = with_answers(range(1, 13))
    loop, _ = started(bucket, config_of(), status=trainer(3))
    assert loop._turn()
    bucket.create(keys.lease("live", loop.process.lease.number + 1), b"another process")
    loop.process.lease.check()
    with pytest.raises(FencedError):
        loop._turn()
    assert stored(bucket) == [[1, 2, 3, 4]]


def test_a_learner_waits_until_the_others_know_of_it_and_leaves_their_answers(started):
    bucket = with_answers(range(1, 13))
    loop, _ = started(bucket, config_of(), status=trainer(3))
    loop.owners._changed_at = None
    put_heartbeat(bucket, "other", learns=True, at=time.time())
    put_heartbeat(bucket, "sampler", at=time.time())
    assert loop._status().learns
    assert not loop._turn(), "the other one does not know of it yet"
    assert loop.owners.learners == ["live", "other"]
    assert [loop._turn() for _ in range(2)] == [True, False]
    assert stored(bucket) == [[2, 4, 6, 8]]
    assert loop.maker.states["others"] == 6


def test_errors_of_the_link_end_the_loop(started):
    loop, _ = started(with_answers([]), config_of(), error=CorruptError("a damaged status"))
    with pytest.raises(CorruptError, match="a damaged status"):
        loop.run()
    assert loop.phase == "stopped"


@pytest.mark.parametrize("ends", ["finished", "signal"])
def test_a_learner_process_ends_with_the_run_or_at_a_signal(tmp_path, ends):
    sections = {"rollout": LIVE["rollout"], "live": LIVE["live"]}
    bucket = start_with_groups(
        tmp_path, groups=0, train={"loss": {"advantage": "given"}}, **sections
    )
    bucket.put(keys.TRAINER, encode_json(trainer(0, "finished")))
    process = Process(bucket, "live", "worker", supervised=False)
    if ends == "signal":
        process.stop()
    lines = []
    with process.registered():
        run_learner(process, report=lines.append)
        assert process.heartbeat.worker().phase == ("finished" if ends == "finished" else "stopped")
    assert lines[0] == "joined run granted as live"
    assert [one.what for one in events_of(bucket, "live")] == ["started", "stopped"]


def test_a_heartbeat_says_that_lineages_are_not_compacted(tmp_path, monkeypatch):
    """Its learner may lack a right for it, and nobody reads its log."""
    sections = {"rollout": LIVE["rollout"], "live": LIVE["live"]}
    bucket = start_with_groups(
        tmp_path, groups=0, train={"loss": {"advantage": "given"}}, **sections
    )
    process, said = Process(bucket, "live", "worker", supervised=False), []

    def run(loop):
        said.append(process.heartbeat.alarm())
        MaintenanceThread.started.alarm = "access denied"
        said.append(process.heartbeat.alarm())
        loop.records._unread["k"] = (0, 0.0)
        said.append(process.heartbeat.alarm())

    def start(thread):
        MaintenanceThread.started = thread

    monkeypatch.setattr(MaintenanceThread, "started", None, raising=False)
    monkeypatch.setattr(MaintenanceThread, "start", start)
    monkeypatch.setattr(LearnerLoop, "run", run)
    with process.registered():
        run_learner(process, report=lambda _: None)
    assert said[:2] == ["", "lineages are not compacted: access denied"]
    assert "cannot be read: k" in said[2]


def test_a_learner_process_of_a_run_that_misreads_groups_is_refused(tmp_path):
    bucket = start_with_groups(tmp_path, groups=0, train={})
    process = Process(bucket, "live", "worker", supervised=False)
    with pytest.raises(InputError, match="a learner's groups state advantages"):
        run_learner(process, report=lambda _: None)
    assert parse_config(LIVE, source="test").train.loss.advantage == "given"
