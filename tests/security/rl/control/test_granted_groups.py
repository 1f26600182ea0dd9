"""A group counts only if its nonce says that this worker was granted it; others are not blamed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deltawire.config import RunConfig, WorkersConfig
from deltawire.config.machine import POLICY
from deltawire.rl.control.admission import Admission, WorkerLoad
from deltawire.rl.control.challenges import nonce_of, numbers_in, read_challenge
from deltawire.rl.control.incidents import Incidents
from deltawire.rl.control.quota import DELIVERS_S, Quota
from deltawire.rl.control.rollout_buffer import QUARANTINE_AFTER, RolloutBuffer
from deltawire.rl.control.rollout_reader import Bounds
from deltawire.rl.control.staleness import Requeue, Strict
from deltawire.rl.control.worker_guard import DOUBTS, Verdict, WorkerGuard
from deltawire.store import open_bucket
from deltawire.wire import keys
from deltawire.wire.ledger import Ledger
from deltawire.wire.rollouts import encode_group
from deltawire.wire.status import MAX_INCIDENTS

CONFIG = RunConfig(name="test")
GRANTED = {"a": 100, "b": 100, "c": 100}


@pytest.fixture
def bucket():
    return open_bucket("memory://")


class Fleet:
    """A guard, its buffer, and workers that store groups."""

    def __init__(self, bucket, make_group, config=CONFIG, **options):
        self.events = []
        self.bucket, self.make_group = bucket, make_group
        self.guard = WorkerGuard(bucket, config, record=self.events.append, **options)
        self.buffer = RolloutBuffer(
            bucket, Ledger(), limit=100, bounds=Bounds(300, 1.0, 64), guard=self.guard
        )
        self.names = ("a", "b", "c")
        self.poll()

    def poll(self, granted=None):
        granted = granted or GRANTED
        return self.buffer.poll(self.guard.poll(self.names, granted), granted)

    def store(self, worker, sequence, number=None, *, by=None, **changes):
        secret = read_challenge(self.bucket, by or worker) or "00" * 16
        nonce = nonce_of(secret, 0, sequence if number is None else number)
        group = replace(self.make_group(worker, [0]), nonce=nonce, **changes)
        assert self.bucket.create(keys.rollout(worker, sequence), encode_group(group))

    @property
    def waiting(self):
        return [(one.worker, one.sequence) for one in self.buffer._waiting]

    def kinds(self, worker):
        listed = self.guard.incidents.listed()
        return {one.kind: one.count for one in listed if one.worker == worker}


@pytest.fixture
def fleet(bucket, make_group):
    return Fleet(bucket, make_group)


def test_nobody_delivers_for_another_worker(fleet):
    """Writing under another name without its secret gains nothing, and the name gets no blame."""
    for sequence in range(2 * QUARANTINE_AFTER):
        fleet.store("a", sequence, by="b")
    fleet.store("a", 2 * QUARANTINE_AFTER)
    fleet.poll()
    assert fleet.waiting == [("a", 2 * QUARANTINE_AFTER)]
    assert fleet.kinds("a") == {"not granted": 2 * QUARANTINE_AFTER}
    assert not fleet.buffer.quarantined


def test_a_replayed_group_counts_once(fleet):
    fleet.store("a", 0, number=4)
    fleet.store("a", 1, number=4)
    fleet.store("a", 2, number=5)
    fleet.poll()
    assert fleet.waiting == [("a", 0), ("a", 2)]
    assert fleet.kinds("a") == {"not granted": 1}


def test_a_number_beyond_the_grants_is_refused(fleet):
    fleet.store("a", 0, number=100)
    fleet.poll()
    assert fleet.waiting == []


@pytest.mark.parametrize("nonce", ["", "n", "0-0-", "0-0-" + "0" * 24, "-1-0-" + "0" * 24])
def test_made_up_nonces_are_refused(fleet, nonce):
    group = replace(fleet.make_group("a", [0]), nonce=nonce)
    fleet.bucket.create(keys.rollout("a", 0), encode_group(group))
    fleet.poll()
    assert fleet.waiting == []


def test_secrets_differ_and_outlive_the_trainer(fleet, bucket, make_group):
    found = {worker: read_challenge(bucket, worker) for worker in "abc"}
    assert len(set(found.values())) == 3
    successor = Fleet(bucket, make_group)
    assert {worker: successor.guard.challenges.secret_of(worker) for worker in "abc"} == found
    assert numbers_in(nonce_of(found["a"], 3, 70)) == (3, 70)


def test_garbage_in_a_workers_name_does_not_quarantine_it(fleet):
    """A writer to the bucket damages every other group; the worker delivers the rest."""
    for sequence in range(0, 6 * QUARANTINE_AFTER, 2):
        fleet.bucket.put(keys.rollout("a", sequence), b"junk")
        fleet.store("a", sequence + 1)
    fleet.poll()
    assert len(fleet.waiting) == 3 * QUARANTINE_AFTER
    assert fleet.kinds("a") == {"damaged": 3 * QUARANTINE_AFTER}
    assert not fleet.buffer.quarantined


def test_a_worker_of_nothing_but_garbage_is_quarantined(fleet):
    for sequence in range(20):
        fleet.bucket.put(keys.rollout("a", sequence), b"junk")
    fleet.poll()
    assert "a" in fleet.buffer.quarantined


def test_groups_beyond_the_bounds_with_a_right_nonce_quarantine(fleet):
    for sequence in range(20):
        fleet.store("a", sequence, temperature=2.0)
    fleet.poll()
    assert "a" in fleet.buffer.quarantined


def test_groups_that_were_not_granted_are_named(fleet):
    for sequence in range(100, 130):
        fleet.store("a", sequence)
    fleet.guard._polled.clear()
    fleet.poll()
    assert fleet.kinds("a") == {"not granted": 30}
    assert fleet.waiting == []


@pytest.mark.parametrize("where", ["run", "machine"])
def test_a_name_that_is_not_allowed_is_not_read(bucket, make_group, monkeypatch, tmp_path, where):
    config = CONFIG
    if where == "run":
        config = RunConfig(name="test", workers=WorkersConfig(allow=["a", "b*"]))
    else:
        (tmp_path / "policy.toml").write_text('workers = ["a", "b*"]\n')
        monkeypatch.setenv(POLICY, str(tmp_path / "policy.toml"))
    fleet = Fleet(bucket, make_group, config)
    fleet.store("a", 0)
    fleet.store("b", 0)
    fleet.store("c", 0, by="a")
    fleet.poll()
    assert fleet.waiting == [("a", 0), ("b", 0)]
    assert fleet.kinds("c") == {"not allowed": 1}


class FixedVerdicts:
    """Stands for the thread that computes groups again."""

    unjudged = ()

    def __init__(self):
        self.found, self.asked = [], []

    def submit(self, buffered, lease, number, secret):
        self.asked.append((buffered.worker, buffered.sequence, lease, number, secret))
        return len(self.asked) < 30

    def verdicts(self):
        found, self.found = self.found, []
        return found


def test_a_lie_quarantines_and_the_waiting_groups_are_dropped(bucket, make_group):
    rescorer = FixedVerdicts()
    fleet = Fleet(bucket, make_group, rescorer=rescorer, draw=lambda: 0.05)
    for worker in ("a", "b"):
        for sequence in range(3):
            fleet.store(worker, sequence)
    fleet.poll()
    secret = fleet.guard.challenges.secret_of("a")
    assert ("a", 2, 0, 2, secret) in rescorer.asked
    rescorer.found = [Verdict("a", 2, "reward", "it reports 1, computed again it is 0")]
    fleet.store("a", 3)
    fleet.poll()
    batch = fleet.buffer.next_batch(Strict(3, 2), version=0)
    assert {one.worker for one in batch.taken} == {"b"}
    assert {(d.worker, d.cause) for d in batch.drops} == {("a", "quarantined")}
    assert [e for e in fleet.events if e.worker == "a" and e.quarantined and e.kind == "reward"]
    assert "computed again" in fleet.guard.incidents.quarantined["a"]


def test_doubts_quarantine_only_together(bucket, make_group):
    rescorer = FixedVerdicts()
    fleet = Fleet(bucket, make_group, rescorer=rescorer)
    for number in range(DOUBTS):
        assert "a" not in fleet.guard.incidents.quarantined
        rescorer.found = [Verdict("a", number, "reward", "it may have run out of time", False)]
        fleet.poll()
    assert "a" in fleet.guard.incidents.quarantined


def test_a_tenth_of_the_groups_is_drawn(bucket, make_group):
    """The share of the configuration, by a source that no worker can predict."""
    rescorer = FixedVerdicts()
    draws = iter([0.5, 0.0999, 0.1, 0.0])
    fleet = Fleet(bucket, make_group, rescorer=rescorer, draw=lambda: next(draws))
    for sequence in range(4):
        fleet.store("a", sequence)
    fleet.poll()
    assert [sequence for _, sequence, *_ in rescorer.asked] == [1, 3]


def test_quarantine_outlives_the_trainer(bucket, make_group):
    first = Fleet(bucket, make_group)
    first.guard.incidents.quarantine("a", "reward", "a lie")
    successor = Fleet(bucket, make_group, known=first.guard.incidents.listed())
    successor.store("a", 0)
    successor.store("b", 0)
    successor.poll()
    assert successor.waiting == [("b", 0)]


def test_events_of_a_flood_are_few_and_the_list_is_bounded():
    events = []
    incidents = Incidents(events.append)
    for _ in range(1000):
        incidents.report("a", "damaged", "junk")
    assert len(events) == 10
    for number in range(3 * MAX_INCIDENTS):
        incidents.report(f"n{number}", "not allowed")
    incidents.quarantine("zz", "reward", "a lie")
    assert len(incidents.listed()) == MAX_INCIDENTS
    assert incidents.listed()[0].worker == "zz"


def test_one_failing_worker_does_not_stop_the_run(fleet):
    assert not fleet.guard.blames_all({"a"})
    assert fleet.guard.blames_all({"a", "b"})
    assert fleet.kinds("a") == {"failing": 1}


def store_many(bucket, make_group, worker, count, version=0):
    for sequence in range(count):
        data = encode_group(make_group(worker, [version]))
        assert bucket.create(keys.rollout(worker, sequence), data)


class Only:
    """A guard that knows only a quota."""

    def __init__(self, share, clock=lambda: 0.0):
        self.incidents, self.quota = Incidents(), Quota(share, clock)

    def check_nonce(self, worker, nonce):
        del worker, nonce
        return ""

    def arrived(self, buffered):
        del buffered

    def self_attested(self):
        return []


def test_no_worker_makes_more_than_its_quota_of_a_step(bucket, make_group):
    store_many(bucket, make_group, "flood", 40)
    for worker in ("a", "b"):
        store_many(bucket, make_group, worker, 3)
    buffer = RolloutBuffer(bucket, Ledger(), limit=40, guard=Only(0.5))
    buffer.poll(["flood", "a", "b"])
    taken = []
    while (batch := buffer.next_batch(Strict(8, 2), version=0)) is not None:
        taken.append([one.worker for one in batch.taken].count("flood"))
    # Six groups of others allow one step; the flood waits for more.
    assert taken == [2]
    for sequence in range(3, 12):
        bucket.create(keys.rollout("a", sequence), encode_group(make_group("a", [0])))
    buffer.poll(["flood", "a", "b"])
    batch = buffer.next_batch(Strict(8, 2), version=0)
    assert [one.worker for one in batch.taken].count("flood") == 4


@pytest.mark.parametrize("policy", [Strict(4, 2), Requeue(4, 2, share=0.25, largest_age=3)])
def test_groups_that_are_too_old_are_dropped_at_once_under_a_quota(bucket, make_group, policy):
    """However many of them one worker has: they hold its credits, and are lost if the run ends."""
    for sequence in range(8):
        bucket.create(
            keys.rollout("w0", sequence), encode_group(make_group("w0", [sequence // 7 * 9]))
        )
    buffer = RolloutBuffer(bucket, Ledger(), limit=40, guard=Only(0.5))
    buffer.poll(["w0"])
    assert buffer.next_batch(policy, version=9) is None
    assert buffer.waiting == 1
    assert buffer.dropping()["w0"] == 7
    assert buffer.next_batch(policy, version=9) is None
    assert buffer.dropping()["w0"] == 7


def test_a_worker_that_is_left_over_may_go_on_without_the_others(bucket, make_group):
    """The quota gives way once nobody else delivers: a run must not stand still for it."""
    now = [0.0]
    store_many(bucket, make_group, "a", 20)
    store_many(bucket, make_group, "b", 1)
    buffer = RolloutBuffer(bucket, Ledger(), limit=20, guard=Only(0.5, lambda: now[0]))
    buffer.poll(["a", "b"])
    assert buffer.next_batch(Strict(8, 2), version=0) is None
    now[0] = 2 * DELIVERS_S
    buffer._waiting = [one for one in buffer._waiting if one.worker == "a"]
    assert len(buffer.next_batch(Strict(8, 2), version=0).taken) == 8


def test_the_first_worker_that_delivers_does_not_make_the_first_step(bucket, make_group):
    """The others are alive and sample; it is only quicker, for example because it makes it up."""
    now = [0.0]
    store_many(bucket, make_group, "quick", 20)
    guard = Only(0.5, lambda: now[0])
    guard.quota.expect({"quick", "slow"})
    buffer = RolloutBuffer(bucket, Ledger(), limit=20, guard=guard)
    buffer.poll(["quick"])
    assert buffer.next_batch(Strict(8, 2), version=0) is None
    now[0] = 2 * DELIVERS_S  # The other one never delivered.
    guard.quota.expect({"quick", "slow"})
    assert len(buffer.next_batch(Strict(8, 2), version=0).taken) == 8


def test_requeued_groups_count_towards_the_quota(bucket, make_group):
    store_many(bucket, make_group, "flood", 12)
    store_many(bucket, make_group, "a", 12)
    buffer = RolloutBuffer(bucket, Ledger(), limit=24, guard=Only(0.5))
    buffer.poll(["flood", "a"])
    policy = Requeue(8, 1, share=0.25, largest_age=40)
    for version in range(2, 4):
        batch = buffer.next_batch(policy, version=version)
        for worker in ("flood", "a"):
            if batch is not None:
                assert [one.worker for one in batch.taken].count(worker) <= 4


def test_silent_names_hold_at_most_half_once_a_worker_delivers():
    admission = Admission(groups_per_step=6, max_staleness=1)
    loads = {f"fake{n}": WorkerLoad(0, 0, 0, alive=True, proven=False) for n in range(20)}
    loads["honest"] = WorkerLoad(3, 3, 3, alive=True)
    granted = admission.grant(loads)
    assert sum(granted[name] for name in loads if name != "honest") == 6
    assert granted["honest"] - 3 == 6


def test_no_worker_holds_the_credits_that_others_need_for_a_step():
    """Its groups waited for others, held every credit, and the run stood still."""
    admission = Admission(groups_per_step=4, max_staleness=2)
    admission.share = 0.5
    loads = {
        "quick": WorkerLoad(12, 12, 0, alive=True),
        "slow": WorkerLoad(6, 6, 6, alive=True),
    }
    assert admission.outstanding(loads) == admission.limit
    loads["quick"] = WorkerLoad(12, 12, 8, alive=True)
    granted = admission.grant(loads)
    assert granted["quick"] - 8 == 6
    assert granted["slow"] - 6 == 6
    alone = {"quick": WorkerLoad(12, 12, 12, alive=True)}
    assert admission.grant(alone)["quick"] == 24


def test_a_starved_newcomer_gets_one_credit_beyond_the_limit():
    admission = Admission(groups_per_step=2, max_staleness=0)
    full = {"a": WorkerLoad(2, 0, 0, alive=True, proven=False)}
    new = WorkerLoad(0, 0, 0, alive=True, proven=False)
    assert admission.grant({**full, "new": new})["new"] == 0
    starved = WorkerLoad(0, 0, 0, alive=True, proven=False, trial=True)
    assert admission.grant({**full, "new": starved})["new"] == 1
