"""A trainer follows a rollback once, whatever it dies of, and nothing is consumed twice."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import torch
from granted_groups import start_with_groups
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltawire.errors import InputError
from deltawire.events import Restored
from deltawire.export.models import empty_model, fetch_model_files
from deltawire.launch.live import Releaser
from deltawire.rl.evaluate.audit import audit_consumption, audit_fates
from deltawire.rl.trainer import rollbacks
from deltawire.rl.trainer.trainer import Trainer
from deltawire.rl.trainer.verify_training import verify_training
from deltawire.runtime.decision_log import DecisionLog
from deltawire.runtime.event_tail import events_of
from deltawire.runtime.process import Process, open_run
from deltawire.store import Bucket, DelegatingBucket, open_bare_bucket
from deltawire.store.delegating import Verb
from deltawire.sync import read_history, read_manifest, read_run
from deltawire.train.checkpoint_folders import checkpoint_versions, kept_checkpoints
from deltawire.wire import keys
from deltawire.wire.decisions import Decision, RestoreRecord, ServedVersion
from deltawire.wire.ledger import CommitMetadata

T = TypeVar("T")
GROUPS = 12
TRAIN = {
    "versions": 100,
    "groups_per_step": 1,
    "max_staleness": 100,
    "checkpoint_every": 2,
    "optimizer": {"learning_rate": 1e-3},
    "schedule": {"warmup_steps": 2},
}


@pytest.fixture(autouse=True)
def every_turn(monkeypatch):
    monkeypatch.setattr(rollbacks, "POLL_EVERY_S", 0.0)


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rollback")
    start_with_groups(folder, groups=GROUPS, train=TRAIN, name="rolled")
    return folder / "bucket"


@pytest.fixture
def bucket(begun, tmp_path) -> Bucket:
    shutil.copytree(begun, tmp_path / "bucket")
    return open_bare_bucket(str(tmp_path / "bucket"))


def trainer_of(bucket: Bucket, *, to: int) -> Trainer:
    torch.set_num_threads(1)
    run, config = open_run(bucket)
    train = msgspec.structs.replace(config.train, versions=to)
    config = msgspec.structs.replace(config, train=train)
    process = Process(bucket, "trainer", "trainer", supervised=False)
    with fetch_model_files(bucket, run) as folder:
        return Trainer(process, run, config, empty_model(Path(folder)))


def train(bucket: Bucket, *, to: int, die: bool = False) -> None:
    """Train up to a version; what dies stores no checkpoint of its end."""
    trainer = trainer_of(bucket, to=to)
    if die:
        trainer._finish = trainer.publisher.close  # type: ignore[method-assign]
    trainer.loop()


def served(bucket: Bucket, version: int) -> ServedVersion:
    return ServedVersion(version, read_manifest(bucket, read_run(bucket), version).digest)


def decide(bucket: Bucket, verdict: str, serving: int, candidate: int | None = None) -> Decision:
    log = DecisionLog(bucket, read_run(bucket).id)
    log.poll()
    chosen = None if candidate is None else served(bucket, candidate)
    made = Decision(
        number=log.next_number, run=log.run, verdict=verdict, at=0.0, by="ann",
        serving=served(bucket, serving), candidate=chosen,
    )  # fmt: skip
    assert log.append(made)
    return made


def records(bucket: Bucket) -> dict[int, RestoreRecord]:
    found = {
        one.version: RestoreRecord.of(one.metadata, run="", version=one.version)
        for one in read_history(bucket, read_run(bucket))
    }
    return {version: record for version, record in found.items() if record is not None}


def consumed(bucket: Bucket) -> list[tuple[str, int]]:
    history = read_history(bucket, read_run(bucket))
    read = (CommitMetadata.of(one.metadata, run="", version=one.version) for one in history)
    return [group for metadata in read for group in metadata.consumed]


def check(bucket: Bucket) -> None:
    """Version numbers have no gap, and each group is consumed once."""
    history = list(read_history(bucket, read_run(bucket)))
    assert [one.version for one in history] == list(range(1, len(history) + 1))
    groups = consumed(bucket)
    assert len(groups) == len(set(groups))
    assert not audit_fates(bucket, max_staleness=100).twice
    assert not audit_consumption(bucket).repeated


class KilledAtWrite(DelegatingBucket):
    """The store of a process that its ``at``-th write after `arm` kills, before or after the store
    has ``done`` it: nothing reaches the store from then on."""

    def __init__(self, inner: Bucket, *, at: int, done: bool) -> None:
        super().__init__(inner)
        self.at, self.done = at, done
        self.writes = 0
        self.armed = self.dead = False

    def _call(self, verb: Verb, key: str, operation: Callable[[], T]) -> T:
        if self.dead:
            raise InputError(f"killed before {verb} {key}")
        if self.armed and verb in ("put", "create", "delete"):
            self.writes += 1
            if self.writes == self.at:
                self.dead = True
                if self.done:
                    operation()
                raise InputError(f"killed at {verb} {key}")
        return operation()


def die_while_following(bucket: Bucket, *, at: int, done: bool) -> bool:
    """Follow the rollback in a trainer that its ``at``-th write kills; returns whether it did."""
    store = KilledAtWrite(bucket, at=at, done=done)
    trainer = trainer_of(store, to=8)
    trainer.begin()
    store.armed = True
    try:
        trainer.turn()
        trainer.rank.checkpoints.flush()
    except InputError:
        assert store.dead
    finally:
        store.dead = True
        with contextlib.suppress(InputError):
            trainer.close()
    return store.writes >= at


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.masters.state().items()}


@pytest.mark.parametrize(
    "target",
    [pytest.param(2, marks=pytest.mark.drills), 3, pytest.param(0, marks=pytest.mark.drills)],
)
def test_training_goes_on_from_the_state_of_the_restored_version(bucket, target) -> None:
    """From a checkpoint, from one and a step that is computed again, and from version 0."""
    if target:
        train(bucket, to=target)
    before = trainer_of(bucket, to=5)
    wanted = state_of(before)
    before.loop()
    decide(bucket, "serve", target)
    decide(bucket, "rollback", target, 5)
    after = trainer_of(bucket, to=8)
    after.begin()
    assert after.turn()
    assert after.version == 6
    found = state_of(after)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert served(bucket, 6).digest == served(bucket, target).digest
    record = records(bucket)[6]
    assert (record.first, record.last, record.state) == (target + 1, 5, "exact")
    assert record.groups == [("w0", target, 5 - target)]
    until(lambda: 6 in checkpoint_versions(bucket))  # It is stored by a thread.
    while after.is_training:
        after.turn()
    after.finish()
    after.close()
    check(bucket)
    assert consumed(bucket)[-2:] == [("w0", 5), ("w0", 6)], "withdrawn groups stay consumed"
    after.process.events.flush()
    event = next(one for one in events_of(bucket, "trainer") if isinstance(one, Restored))
    assert (event.version, event.restored, event.groups) == (6, target, 5 - target)
    assert verify_training(bucket).exact


def test_without_its_state_the_weights_are_restored_and_said_to_be(bucket) -> None:
    train(bucket, to=5)
    trainer = trainer_of(bucket, to=7)
    decide(bucket, "serve", 3)
    decide(bucket, "rollback", 3, 5)
    for key in bucket.list(keys.CHECKPOINTS):
        bucket.delete(key)
    bucket.delete(keys.rollout("w0", 1))  # Version 2 cannot be computed again.
    trainer.loop()
    assert records(bucket)[6].state == "weights"
    assert served(bucket, 6).digest == served(bucket, 3).digest
    trainer.process.events.flush()
    event = next(one for one in events_of(bucket, "trainer") if isinstance(one, Restored))
    assert "with a new optimizer" in event.line
    train(bucket, to=8)
    after = trainer_of(bucket, to=8)
    assert after.masters.steps == 2, "it began again at version 6"
    after.close()


def test_another_trainer_follows_no_rollback_twice(bucket) -> None:
    train(bucket, to=4)
    decide(bucket, "serve", 2)
    decide(bucket, "rollback", 2, 4)
    train(bucket, to=6)
    train(bucket, to=8)
    assert list(records(bucket)) == [5]
    run, config = open_run(bucket)
    forward = Releaser(bucket, run, config, by="g0").step(1e9)
    assert (forward.verdict, forward.serving) == ("promote", served(bucket, 5))
    assert forward.evidence == {"restores_version": 2.0}
    decide(bucket, "promote", 8)
    decide(bucket, "rollback", 5, 8)
    train(bucket, to=10)
    assert {version: one.restored.version for version, one in records(bucket).items()} == {
        5: 2,
        9: 5,
    }
    assert served(bucket, 9).digest == served(bucket, 2).digest
    check(bucket)
    assert verify_training(bucket).exact


@pytest.mark.drills
def test_a_person_may_train_on_from_rejected_weights(bucket) -> None:
    train(bucket, to=3)
    decide(bucket, "serve", 1)
    decide(bucket, "rollback", 1, 3)
    trainer = trainer_of(bucket, to=5)
    live = msgspec.structs.replace(
        trainer.config.live,
        release=msgspec.structs.replace(trainer.config.live.release, restore=False),
    )
    trainer.config = msgspec.structs.replace(trainer.config, live=live)
    trainer.loop()
    assert not records(bucket)
    assert len(consumed(bucket)) == 5


@pytest.mark.drills
def test_a_promotion_after_a_rollback_ends_it(bucket) -> None:
    train(bucket, to=3)
    decide(bucket, "serve", 1)
    decide(bucket, "rollback", 1, 3)
    decide(bucket, "promote", 3)
    train(bucket, to=5)
    assert not records(bucket)


def test_states_of_what_may_be_restored_are_kept(bucket) -> None:
    train(bucket, to=2)
    decide(bucket, "serve", 2)
    train(bucket, to=10)
    assert 2 in kept_checkpoints(bucket)
    assert checkpoint_versions(bucket) == [2, 8, 10]
    decide(bucket, "promote", 10)
    train(bucket, to=12)
    assert kept_checkpoints(bucket) == {10}
    assert checkpoint_versions(bucket) == [10, 12]


@pytest.mark.drills
@pytest.mark.parametrize("done", [False, True])
def test_a_trainer_that_dies_at_any_write_of_a_restore_makes_one(bucket, tmp_path, done) -> None:
    train(bucket, to=5)
    wanted = None
    decide(bucket, "serve", 3)
    decide(bucket, "rollback", 3, 5)
    for at in itertools.count(1):
        place = tmp_path / f"{at}"
        shutil.copytree(tmp_path / "bucket", place)
        again = open_bare_bucket(str(place))
        if not die_while_following(again, at=at, done=done):
            break
        train(again, to=8)
        assert list(records(again)) == [6]
        assert served(again, 6).digest == served(again, 3).digest
        check(again)
        found = [served(again, version).digest for version in (6, 7, 8)]
        wanted = wanted or found
        assert found == wanted, f"training went on from another state after write {at}"
        shutil.rmtree(place)
    assert at > 5, "there are blobs, a manifest, a status and a checkpoint to die at"


@pytest.mark.drills
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_versions_rise_and_no_group_counts_twice(begun, tmp_path_factory, data) -> None:
    """Trainers that die or not, rollbacks to any version, and promotions, in any order."""
    place = tmp_path_factory.mktemp("any") / "bucket"
    shutil.copytree(begun, place)
    bucket = open_bare_bucket(str(place))
    train(bucket, to=2)
    decide(bucket, "serve", data.draw(st.integers(0, 2), label="serves first"))
    followed = 0
    for _ in range(data.draw(st.integers(1, 3), label="rollbacks")):
        newest = 1 + followed + len(consumed(bucket)) - 1
        target = data.draw(st.integers(0, newest - 1), label="restored")
        decide(bucket, "rollback", target, newest)
        train(bucket, to=newest + 2, die=data.draw(st.booleans(), label="dies"))
        followed += 1
        assert served(bucket, newest + 1).digest == served(bucket, target).digest
        check(bucket)
    assert len(records(bucket)) == followed
    shutil.rmtree(place)
