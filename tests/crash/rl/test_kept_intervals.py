"""`retain.proofs` keeps what some intervals need to be computed again, whatever else is deleted."""

from contextlib import contextmanager, suppress

import pytest
from blake3 import blake3
from forgotten_users import train
from granted_groups import copied, start_with_groups
from training_lies import patch_optimizer

from deltawire.cli.main import main
from deltawire.errors import DeltawireError, UnreadableError
from deltawire.rl.control.rollout_retention import RolloutRetention
from deltawire.rl.trainer.proof_retention import ProofRetention
from deltawire.rl.trainer.verify_intervals import TrainingInterval, verify_intervals
from deltawire.rl.trainer.version_retention import VersionRetention
from deltawire.runtime.heartbeat import HeartbeatWriter
from deltawire.runtime.retained import read_retained
from deltawire.store import retrying
from deltawire.store.delegating import DelegatingBucket
from deltawire.sync import committed_versions, prune, read_manifest, read_run
from deltawire.testing.faulty import FaultyBucket
from deltawire.train.checkpoint import save_checkpoint
from deltawire.train.checkpoint_folders import checkpoint_versions, kept_intervals
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata, Ledger

VERSIONS, EVERY, PROOFS = 6, 2, 2
RUN_ID = "5e" * 16
TRAIN = {
    "groups_per_step": 1, "max_staleness": 99, "versions": VERSIONS, "checkpoint_every": EVERY,
    "anchor_every": 1, "optimizer": {"learning_rate": 1e-3}, "schedule": {"warmup_steps": 1},
}  # fmt: skip
ALL = [(at, at + EVERY) for at in range(0, VERSIONS, EVERY)]


def start(folder, **retain):
    return start_with_groups(folder, groups=VERSIONS, train=TRAIN, retain=retain, run_id=RUN_ID)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run that keeps one state, the groups of one version, and two intervals for proofs; and a
    copy of it from before it chose at its last version."""
    bucket = start(tmp_path_factory.mktemp("kept"), checkpoints=1, rollouts=1, proofs=PROOFS)
    choose, before = ProofRetention.choose, []

    def copying(self, version):
        if version == VERSIONS and not before:
            before.append(copied(bucket, "memory://"))
        choose(self, version)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProofRetention, "choose", copying)
        train(bucket, to=VERSIONS)
    return bucket, before[0]


@pytest.fixture(scope="module")
def trained(runs):
    return runs[0]


@pytest.fixture
def copy(trained, tmp_path):
    """A copy of the run."""
    return copied(trained, str(tmp_path / "run"))


def lowest(bucket, intervals=ALL, count=PROOFS):
    """The intervals that the rule chooses, computed from the manifests."""
    run = read_run(bucket)
    digests = {v: read_manifest(bucket, run, v).digest for v in range(VERSIONS + 1)}

    def rank(ends):
        return blake3(f"{run.id} {digests[ends[0]]} {digests[ends[1]]}".encode()).hexdigest()

    return set(sorted(intervals, key=rank)[:count])


def consumed(bucket, version):
    manifest = read_manifest(bucket, read_run(bucket), version)
    return CommitMetadata.of(manifest.metadata, run="", version=version).consumed


def versions_with_groups(bucket):
    return {
        version
        for version in committed_versions(bucket)
        if all(bucket.exists(keys.rollout(*one)) for one in consumed(bucket, version))
    }


def inside(intervals):
    return {version for first, last in intervals for version in range(first + 1, last + 1)}


def assert_promises_hold(bucket, *, storing=0):
    """All that a kept interval needs is there; the state of version ``storing`` is stored later."""
    for first, last in (kept := kept_intervals(bucket)):
        assert set(range(first + 1, last + 1)) <= versions_with_groups(bucket)
        assert {first, last} <= {0, storing, *checkpoint_versions(bucket)}
    return kept


def proofs_of(bucket, *, keep=PROOFS):
    run = read_run(bucket)
    rollouts = RolloutRetention(bucket, run, keep=1)
    return ProofRetention(bucket, run, keep=keep, rollouts=rollouts)


def test_the_intervals_with_the_lowest_ranks_are_kept_and_all_else_is_deleted(trained):
    assert assert_promises_hold(trained) == lowest(trained)
    floor = read_retained(trained).rollouts
    assert floor > EVERY
    above = set(range(floor, VERSIONS + 1))
    assert versions_with_groups(trained) == inside(kept_intervals(trained)) | above | {0}
    ends = {end for ends in kept_intervals(trained) for end in ends}
    assert set(checkpoint_versions(trained)) == (ends | {VERSIONS}) - {0}


def test_kept_intervals_are_verified_and_no_others_are_drawn(trained, capsys):
    kept = {TrainingInterval(*ends) for ends in kept_intervals(trained)}
    found = verify_intervals(trained)
    assert not found.faults
    assert kept <= set(found.checked)
    assert set(found.not_checkable.values()) == {"retention deleted its groups"}
    assert set(found.not_checkable) | inside((c.origin, c.last) for c in found.checked) == set(
        range(1, VERSIONS + 1)
    )
    drawn = verify_intervals(trained, spot=1)
    assert len(drawn.checked) == 1
    assert set(drawn.checked) <= set(found.checked)
    assert main(["verify-training", trained.url, "--spot", "2"]) == 0
    assert "at most (1 − f)^2" in capsys.readouterr().out


def test_version_retention_keeps_what_an_interval_needs(copy):
    run = read_run(copy)
    prune(copy, run, cutoff=VERSIONS, grace_s=0.0)
    prune(copy, run, cutoff=VERSIONS, grace_s=0.0)
    first = min(origin for origin, _ in kept_intervals(copy))
    assert min(committed_versions(copy)) <= first
    manifest = read_manifest(copy, run, first)
    assert manifest is not None
    assert not manifest.pruned
    assert not verify_intervals(copy).faults


def test_version_0_is_kept_although_it_has_no_state(copy):
    """Only the marks say that the first interval is needed."""
    for origin, last in kept_intervals(copy):
        copy.delete(keys.checkpoint_interval(origin, last))
        copy.delete(keys.checkpoint_interval(last, origin))
    copy.put(keys.checkpoint_interval(0, VERSIONS), b"")
    copy.put(keys.checkpoint_interval(VERSIONS, 0), b"")
    run = read_run(copy)
    assert prune(copy, run, cutoff=VERSIONS, grace_s=0.0).anchor == 0


def test_a_group_of_a_kept_interval_that_is_gone_is_a_fault(copy):
    version = min(inside(kept_intervals(copy)) - {VERSIONS})
    copy.delete(keys.rollout(*consumed(copy, version)[0]))
    assert version in {one.version for one in verify_intervals(copy).faults}
    assert main(["verify-training", copy.url]) == 5


def test_a_state_is_held_to_the_hash_that_its_version_states(copy):
    """No interval before it can be computed, so only the hash shows that the state is another."""
    origin = next(one for one, _ in sorted(kept_intervals(copy), reverse=True) if one)
    for first, last in kept_intervals(copy):
        if last == origin:
            copy.delete(keys.checkpoint_interval(first, last))
            copy.delete(keys.checkpoint_interval(last, first))
            copy.delete(keys.rollout(*consumed(copy, first + 1)[0]))
    patch_optimizer(copy, origin)
    found = verify_intervals(copy)
    assert [(one.version, one.reason) for one in found.faults][:1] == [
        (origin, "masters or optimizer differ from the hash that the version states")
    ]


@pytest.mark.parametrize(
    "done", [pytest.param(False, marks=pytest.mark.drills), True], ids=["before", "after"]
)
def test_a_choice_that_stops_at_any_request_breaks_no_promise(runs, done, monkeypatch):
    """At each request in turn the store fails for good; the next choice completes it."""
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)
    # One fewer than before is kept, so two intervals are given up.
    whole = runs[1]
    goal = lowest(whole, kept_intervals(whole) | {ALL[-1]}, PROOFS - 1)
    at = 0
    while True:
        at += 1
        bucket = FaultyBucket(copied(whole, "memory://"))
        bucket.fail(at=at, times=None, done=done)
        with suppress(DeltawireError):
            proofs_of(bucket, keep=PROOFS - 1).choose(VERSIONS)
        ended = len(bucket.operations) < at
        assert_promises_hold(bucket.inner, storing=VERSIONS)
        proofs_of(bucket.inner, keep=PROOFS - 1).choose(VERSIONS)
        assert assert_promises_hold(bucket.inner, storing=VERSIONS) == goal
        floor = read_retained(bucket.inner).rollouts
        above = set(range(floor, VERSIONS + 1))
        assert versions_with_groups(bucket.inner) == inside(goal) | above | {0}
        if ended:
            break
    assert at > 10


def test_a_damaged_mark_stops_everything(copy):
    copy.put(f"{keys.CHECKPOINTS}0000000002/{keys.INTERVAL_MARK}4", b"")
    before = set(copy.list(""))
    with pytest.raises(UnreadableError, match="no interval was given up"):
        proofs_of(copy, keep=1).choose(VERSIONS)
    with pytest.raises(UnreadableError, match="nothing was deleted"):
        kept_intervals(copy)
    with pytest.raises(UnreadableError, match="a mark that names no interval"):
        prune(copy, read_run(copy), cutoff=VERSIONS, grace_s=0.0)
    assert before <= set(copy.list(""))


def test_a_trainer_deletes_no_versions_while_a_mark_names_no_interval(tmp_path, monkeypatch):
    bucket = start(tmp_path, checkpoints=1, rollouts=1, versions=1)
    bucket.put(f"{keys.CHECKPOINTS}0000000002/{keys.INTERVAL_MARK}4", b"")
    started = []
    monkeypatch.setattr(VersionRetention, "start", lambda *args, **words: started.append(words))
    train(bucket, to=EVERY)
    assert not started


@pytest.mark.parametrize("proofs", [0, 1])
def test_a_choice_is_allowed_the_time_of_a_long_task(tmp_path, monkeypatch, proofs):
    """It waits for uploads. Without intervals there is none."""
    long_task, choose, tasks, chosen = HeartbeatWriter.long_task, ProofRetention.choose, [], []

    @contextmanager
    def noting(self, doing):
        with long_task(self, doing):
            tasks.append(doing)
            yield
            tasks.pop()

    def noted(self, version):
        chosen.append([*tasks])
        choose(self, version)

    monkeypatch.setattr(HeartbeatWriter, "long_task", noting)
    monkeypatch.setattr(ProofRetention, "choose", noted)
    train(start(tmp_path, proofs=proofs), to=EVERY)
    assert chosen == 2 * proofs * [["choose intervals"]]


def test_a_choice_at_a_stored_version_marks_nothing(tmp_path, monkeypatch):
    """The trainer chooses again at its end. Then the state before may be gone, as its interval was
    given up, and no interval may begin with an older one, which has the lowest rank here."""
    monkeypatch.setattr(
        ProofRetention, "_rank", lambda self, ends: f"{99 - (ends[1] - ends[0]):03d}{ends[0]:03d}"
    )
    bucket = start(tmp_path, checkpoints=1, rollouts=1, proofs=1)
    train(bucket, to=VERSIONS)
    assert assert_promises_hold(bucket) == {(0, 2)}
    assert not verify_intervals(bucket).faults


@pytest.mark.parametrize("damage", [b"{}", None], ids=["damaged", "not found"])
def test_a_wrong_answer_about_version_0_skips_no_interval(runs, damage, monkeypatch):
    monkeypatch.setattr("deltawire.sync.chain.evidence.time.sleep", lambda _: None)
    bucket = FaultyBucket(copied(runs[1], "memory://"))
    for key in bucket.list(keys.CHECKPOINTS):
        bucket.delete(key)
    bucket.damage(keys.manifest(0), lambda _: damage, times=1)
    proofs_of(bucket).choose(VERSIONS)
    assert kept_intervals(bucket) == {(0, VERSIONS)}


def test_manifests_of_kept_intervals_are_read_once(runs):
    bucket = FaultyBucket(copied(runs[1], "memory://"))
    proofs = proofs_of(bucket)
    proofs.choose(VERSIONS)
    reads = [key for verb, key in bucket.operations if verb == "get" and keys.MANIFESTS in key]
    assert reads
    bucket.operations.clear()
    bucket.put(keys.checkpoint_commit(VERSIONS), b"{}")
    proofs.choose(VERSIONS)
    assert not [key for verb, key in bucket.operations if verb == "get" and keys.MANIFESTS in key]


def test_a_manifest_that_cannot_be_read_stops_the_choice(copy):
    end = max(last for _, last in kept_intervals(copy))
    copy.put(keys.manifest(end), b"{}")
    before = set(copy.list(""))
    with pytest.raises(UnreadableError):
        proofs_of(copy, keep=1).choose(VERSIONS)
    assert before <= set(copy.list(""))


def test_a_listing_that_came_back_short_gives_up_nothing(copy):
    class Short(DelegatingBucket):
        lists = 0

        def list(self, prefix, *, after=None):
            self.lists += 1
            return [] if self.lists % 2 else self.inner.list(prefix, after=after)

    kept = kept_intervals(copy)
    proofs_of(Short(copy)).choose(VERSIONS)
    assert kept_intervals(copy) == kept


def test_a_trainer_that_stopped_between_marks_and_state_ends_the_interval_elsewhere(copy):
    """The state of version 5 was never stored."""
    copy.put(keys.checkpoint_interval(4, 5), b"")
    copy.put(keys.checkpoint_interval(5, 4), b"")
    proofs_of(copy, keep=99).choose(VERSIONS)
    assert (4, 5) not in kept_intervals(copy)
    assert_promises_hold(copy)


def test_the_state_before_stays_until_the_choice(tmp_path):
    """With one state kept, that of version 2 would be removed when version 4's is stored."""
    bucket = start(tmp_path, checkpoints=1, rollouts=1, proofs=99)
    train(bucket, to=5)
    assert assert_promises_hold(bucket) == {(0, 2), (2, 4), (4, 5)}
    save_checkpoint(bucket, {}, Ledger(), version=9, digest="ab" * 16, keep=1)
    assert_promises_hold(bucket)


def test_nothing_is_kept_once_the_setting_is_0(copy):
    proofs_of(copy, keep=0).choose(VERSIONS)
    assert kept_intervals(copy) == set()
    assert not [key for key in copy.list(keys.CHECKPOINTS) if keys.INTERVAL_MARK in key]
