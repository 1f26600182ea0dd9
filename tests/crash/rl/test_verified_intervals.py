"""A full check finds each of twenty lies about a run's training; an honest run passes."""

import random
from collections import Counter

import msgspec
import pytest
from forgotten_users import train
from granted_groups import start_with_groups
from training_lies import EDITS, LIE_AT, TOLD, lying_trainer

from deltawire.cli.main import main
from deltawire.dashboard.verification import lines_of_check
from deltawire.errors import CorruptError, InputError
from deltawire.rl.trainer import verify_intervals as verifying
from deltawire.rl.trainer import verify_training
from deltawire.rl.trainer.verify_intervals import (
    TrainingCheck,
    TrainingInterval,
    draw,
    escape_probability,
    forked_from,
    intervals_of,
    verify_intervals,
)
from deltawire.store import open_bucket
from deltawire.sync import read_manifest, read_run
from deltawire.train.checkpoint_folders import release_checkpoint
from deltawire.wire import keys
from deltawire.wire.ledger import FORK_RECORD, STEP_RECORD
from deltawire.wire.lineage import Forgotten
from deltawire.wire.manifest import encode_manifest
from deltawire.wire.objects import encode_json

VERSIONS = 5
TRAIN = {
    "groups_per_step": 2, "max_staleness": 99, "versions": VERSIONS, "checkpoint_every": 2,
    "anchor_every": 100, "dropout": True, "max_tokens_per_batch": 16,
    "optimizer": {"learning_rate": 1e-3}, "schedule": {"warmup_steps": 1},
}  # fmt: skip


def start(folder):
    """A run at version 0, with enough groups, whose model drops attention at random."""
    return start_with_groups(
        folder,
        groups=2 * VERSIONS,
        train=TRAIN,
        attention_dropout=0.3,
        retain={"checkpoints": 0},
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of five versions, with states at 2, 4 and 5."""
    bucket = start(tmp_path_factory.mktemp("trained"))
    train(bucket, to=VERSIONS)
    return bucket


@pytest.fixture
def copy(trained, tmp_path):
    """A copy of the run."""
    bucket = open_bucket(str(tmp_path / "run"), create=True)
    for key in trained.list(""):
        bucket.put(key, trained.get(key, limit=1 << 30))
    return bucket


def test_an_honest_run_passes_whole(trained, capsys):
    assert main(["verify-training", trained.url]) == 0
    said = capsys.readouterr().out
    assert "3 of 3 intervals computed again: 5 versions from 10 groups" in said
    assert "follows from the one before" in said
    assert "not shown: that answers were sampled" in said


@pytest.mark.parametrize(
    "lie", ["an exchanged group and its hash", "a patched optimizer in a stored state"]
)
def test_a_lie_told_after_the_run_is_found(copy, lie):
    assert_found(copy, lie)


@pytest.mark.drills
@pytest.mark.long
@pytest.mark.parametrize("lie", EDITS)
def test_each_lie_told_after_the_run_is_found(copy, lie):
    assert_found(copy, lie)


def assert_found(bucket, lie):
    EDITS[lie](bucket)
    found = verify_intervals(bucket)
    assert found.faults, lie
    assert found.faults[0].version <= LIE_AT + 1


def test_a_trainer_that_calls_a_version_a_forks_first_one_hides_none(copy):
    """The record of another run's fork, and one that claims this bucket."""
    run = read_run(copy)
    for parent in (run.id, "0" * 32):
        state_a_fork(copy, parent, 1)
        state_a_fork(copy, parent, 2)
        assert forked_from(copy, run) == 0
        EDITS["an exchanged group and its hash"](copy)
        assert verify_intervals(copy).faults[0].version == 1


def state_a_fork(bucket, parent, version):
    run = read_run(bucket)
    manifest = read_manifest(bucket, run, version)
    record = {FORK_RECORD: {"parent": parent, "version": version}}
    bucket.put(
        keys.manifest(version), encode_manifest(msgspec.structs.replace(manifest, metadata=record))
    )


def test_a_lie_told_by_the_trainer_is_found(tmp_path):
    assert_told(tmp_path, TOLD[0])


@pytest.mark.drills
@pytest.mark.long
@pytest.mark.parametrize("lie", TOLD)
def test_each_lie_told_by_the_trainer_is_found(tmp_path, lie):
    assert_told(tmp_path, lie)


def assert_told(folder, lie):
    bucket = start(folder)
    with lying_trainer(lie):
        train(bucket, to=VERSIONS)
    faults = verify_intervals(bucket).faults
    assert [one.version for one in faults][:1] == [LIE_AT], lie


def test_twenty_lies_are_told():
    assert len(EDITS) + len(TOLD) == 20


def test_published_bits_are_compared_although_the_digests_agree(trained, monkeypatch):
    """Whoever chooses weights can choose some with a digest that is given."""
    honest = verifying.load_mirror

    def forged(bucket, run, *, at, into=None):
        mirror = honest(bucket, run, at=at)
        name = min(mirror.tensors)
        if at == LIE_AT:
            mirror.tensors[name][0] ^= 1
        return mirror

    monkeypatch.setattr(verifying, "load_mirror", forged)
    found = verify_intervals(trained)
    assert [one.version for one in found.faults] == [LIE_AT]
    assert "other ones" in found.faults[0].reason


def test_intervals_are_drawn_by_the_verifier(trained, capsys):
    run = read_run(trained)
    every = intervals_of(trained, run)
    assert every == [TrainingInterval(0, 2), TrainingInterval(2, 4), TrainingInterval(4, 5)]
    drawn = Counter(one for _ in range(300) for one in draw(every, 1))
    assert set(drawn) == set(every)
    assert draw(every, 9) == every
    assert main(["verify-training", trained.url, "--spot", "1"]) == 0
    said = capsys.readouterr().out
    assert "1 of 3 intervals computed again, drawn at random" in said
    assert "at most (1 − f)^1: 95.0% with f = 5%" in said


def test_a_forger_escapes_as_often_as_stated():
    """Of 100 intervals 10 are forged, and 12 are drawn."""
    numbers = random.Random(1)
    trials = 4000
    escaped = sum(min(numbers.sample(range(100), 12)) >= 10 for _ in range(trials))
    assert escaped / trials < escape_probability(0.1, 12) + 0.01
    assert escape_probability(0.1, 12) == pytest.approx(0.9**12)


def test_erased_groups_are_counted_as_not_checkable(copy, capsys):
    """The steps after the next stored state are checked all the same."""
    copy.delete(keys.rollout("w0", 4))
    assert main(["verify-training", copy.url]) == 5, "nothing explains that it is gone"
    assert "version 3 does not follow: " in capsys.readouterr().out
    record = Forgotten(run=read_run(copy).id, user="b0" * 16, at=0.0, groups=[("w0", 4)])
    copy.put(keys.live_forgotten("b0" * 16), encode_json(record))
    found = verify_intervals(copy)
    assert found.not_checkable == {3: "its groups were erased", 4: "its groups were erased"}
    assert (found.exact, found.versions) == (True, 3)
    assert found.checked == [TrainingInterval(0, 2), TrainingInterval(4, 5)]
    assert main(["verify-training", copy.url]) == 0
    assert "not checkable: 2 versions (3 to 4), because its groups were" in capsys.readouterr().out


def test_nothing_is_claimed_if_no_interval_was_computed():
    for drawn in (1, 2):
        found = TrainingCheck(2, [TrainingInterval(0, 2), TrainingInterval(2, 4)][:drawn])
        assert not [line for line in lines_of_check(found) if line.startswith("shown")]


def test_a_damaged_step_record_is_a_fault(copy, monkeypatch):
    honest = verifying.read_manifest

    def damaged(bucket, run, version):
        manifest = honest(bucket, run, version)
        odd = {STEP_RECORD: "junk"} if version == 3 else manifest.metadata
        return msgspec.structs.replace(manifest, metadata=odd)

    monkeypatch.setattr(verifying, "read_manifest", damaged)

    def doubts(*_):
        raise CorruptError("damaged")

    monkeypatch.setattr(verifying, "reasons_to_doubt", doubts)
    assert [one.version for one in verify_intervals(copy).faults] == [3]


def test_a_doubt_is_said_once(copy, monkeypatch):
    """Also about several intervals."""
    monkeypatch.setattr(verify_training, "arithmetic_of", lambda _: "torch 9, ABACUS")
    found = verify_intervals(copy)
    assert len(found.checked) > 1
    (doubt,) = found.doubts
    assert doubt.startswith("versions 1 to ")
    assert "torch 9, ABACUS" in doubt
    assert verify_training.doubts_of([("why", 2), ("why", 5), ("other", 3)]) == [
        "versions 2 to 5, 2 of them: why", "version 3: other",
    ]  # fmt: skip


def test_without_version_0_the_first_state_is_the_beginning(copy):
    copy.delete(keys.manifest(0))
    assert intervals_of(copy, read_run(copy))[0] == TrainingInterval(2, 4)
    for version in (2, 4, 5):
        copy.delete(keys.checkpoint_commit(version))
    release_checkpoint(copy, 2, keep=1)
    with pytest.raises(InputError, match=r"retain\.checkpoints"):
        verify_intervals(copy)
