"""A trainer that comes back continues to the very bits of one that was never gone, or says what
is in the way."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from granted_groups import UNCHECKED, made_up_group, put_group, start_with_groups
from heartbeats import put_heartbeat

from deltawire.cli.main import main
from deltawire.config import RunConfig, parse_config
from deltawire.errors import (
    CorruptError,
    FencedError,
    InputError,
    ResyncError,
    RetryError,
    UnreadableError,
)
from deltawire.events import Parity, Published, Served, SettingsChanged, Step
from deltawire.export.models import empty_model, fetch_model_files
from deltawire.parity import Divergence
from deltawire.rl.control.rollout_retention import RolloutRetention
from deltawire.rl.evaluate import audit as auditing
from deltawire.rl.evaluate.audit import all_metadata, audit_consumption, audit_fates
from deltawire.rl.rollout.group_numbers import next_sequence
from deltawire.rl.trainer import group_steps
from deltawire.rl.trainer import resume as redoing
from deltawire.rl.trainer.bootstrap import start_run
from deltawire.rl.trainer.fencing import unfenced
from deltawire.rl.trainer.trainer import Trainer
from deltawire.rl.trainer.verify_training import Dump, verify_training
from deltawire.rl.trainer.version_retention import VersionRetention
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.fleet import read_trainer
from deltawire.runtime.process import Process, open_run
from deltawire.runtime.retained import read_retained
from deltawire.store import Bucket, open_bucket
from deltawire.sync import read_history, read_manifest, read_run
from deltawire.train.checkpoint import load_checkpoint, save_checkpoint
from deltawire.train.checkpoint_folders import checkpoint_versions
from deltawire.train.masters import MasterWeights
from deltawire.train.step import train_step
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.objects import encode_json
from deltawire.wire.rollouts import encode_group

VERSIONS = 6
CONFIG = {
    "name": "exact",
    "trust": UNCHECKED,
    "model": {"path": "model"},
    "train": {
        "versions": VERSIONS,
        "groups_per_step": 2,
        "max_staleness": 100,
        "checkpoint_every": 2,
        "optimizer": {"learning_rate": 1e-3},
        "schedule": {"warmup_steps": 1},
        "max_tokens_per_batch": 16,
        "dropout": True,
    },
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """A bucket with a run at version 0 and enough groups; its model drops attention at random."""
    folder = tmp_path_factory.mktemp("exact")
    start_with_groups(
        folder, groups=2 * VERSIONS, train=CONFIG["train"], name="exact", attention_dropout=0.3
    )
    return folder / "bucket"


@pytest.fixture
def bucket(begun, tmp_path) -> Bucket:
    shutil.copytree(begun, tmp_path / "bucket")
    return open_bucket(str(tmp_path / "bucket"))


def trainer_of(bucket: Bucket, *, threads: int = 1, **settings: Any) -> Trainer:
    torch.set_num_threads(threads)
    run, config = open_run(bucket)
    train = msgspec.structs.replace(config.train, **settings)
    config: RunConfig = msgspec.structs.replace(config, train=train)
    process = Process(bucket, "trainer", "trainer", supervised=False)
    with fetch_model_files(bucket, run) as folder:
        model = empty_model(Path(folder))
    return Trainer(process, run, config, model)


def train(bucket: Bucket, *, to: int = VERSIONS, die: bool = False, threads: int = 1) -> list[str]:
    """Train up to a version; what dies leaves no checkpoint of its end."""
    torch.manual_seed(time.monotonic_ns())  # Nothing may hang on what was drawn before.
    trainer = trainer_of(bucket, versions=to, threads=threads)
    if die:
        trainer._finish = trainer.publisher.close  # type: ignore[method-assign]
    trainer.loop()
    return digests(bucket)


def digests(bucket: Bucket) -> list[str]:
    run = read_run(bucket)
    found = [read_manifest(bucket, run, 0), *read_history(bucket, run)]
    return [manifest.digest for manifest in found]


@pytest.fixture(scope="module")
def uninterrupted(begun, tmp_path_factory) -> list[str]:
    place = tmp_path_factory.mktemp("whole") / "bucket"
    shutil.copytree(begun, place)
    found = train(open_bucket(str(place)))
    assert len(set(found)) == VERSIONS + 1, "each step moves some weights"
    return found


@pytest.mark.parametrize("crashes", [(1,), (3,), (5,), (1, 2, 3, 4, 5)])
def test_after_a_crash_the_same_bits(bucket, uninterrupted, crashes) -> None:
    for version in crashes:
        train(bucket, to=version, die=True)
    assert train(bucket) == uninterrupted
    assert verify_training(bucket).exact


def test_other_bits_than_before_end_no_run_that_has_nothing_left_to_train(
    bucket, monkeypatch
) -> None:
    """As on another machine than the one that died: what is published stands, and goes on."""
    before = train(bucket, to=3, die=True)
    honest = redoing.seed_step
    monkeypatch.setattr(
        redoing,
        "seed_step",
        lambda config, version, rank: honest(config, version + (version == 3), rank=rank),
    )
    assert train(bucket, to=3) == before
    assert read_trainer(bucket).phase == "finished"
    assert loaded(bucket, 3)[0].version == 2, "no state of other weights"
    assert train(bucket, to=5)[:4] == before
    assert loaded(bucket, 5)[0].version == 5


def test_a_step_that_moved_nothing_is_on_record(bucket, monkeypatch) -> None:
    """JSON has no NaN: a line with one where a number must stand would not be read again."""
    honest = group_steps.train_step

    def broken(*args, **named):
        return replace(honest(*args, **named), loss=math.nan, grad_norm=math.inf, kl=math.nan)

    monkeypatch.setattr(group_steps, "train_step", broken)
    trainer = trainer_of(bucket, versions=1)
    trainer.loop()
    trainer.process.events.flush()
    (step,) = [event for event in EventTail(bucket).read() if isinstance(event, Step)]
    assert (step.version, step.loss, step.grad_norm, step.kl) == (1, None, None, None)


def test_parity_with_an_older_version_is_on_record(bucket) -> None:
    """No batch of this run holds a token of the version that it is trained from."""
    trainer = trainer_of(bucket, versions=2)
    older = Divergence(0.1, 0.2, 0.3, 1.5, tokens=9)
    trainer.recheck.observe = lambda parity, _groups, *, version: parity.with_numeric(
        older, version - 2, trainer.config.parity
    )
    trainer.loop()
    trainer.process.events.flush()
    found = [event for event in EventTail(bucket).read() if isinstance(event, Parity)]
    assert [(one.version, one.numeric_version) for one in found] == [(1, -1), (2, 0)]
    assert all((one.numeric.tokens, one.numeric.k3) == (9, 0.2) for one in found)


def flip(bucket: Bucket, key: str) -> None:
    data = bytearray(bucket.get(key, limit=1 << 26))
    data[len(data) // 2] ^= 4
    bucket.put(key, bytes(data))


def loaded(bucket, newest):
    """The newest checkpoint's commit, and its state."""
    run, config = open_run(bucket)
    with fetch_model_files(bucket, run) as folder:
        state = MasterWeights(empty_model(Path(folder)), config.train).state()
    return load_checkpoint(bucket, state, newest=newest, run=run.id), state


@pytest.mark.parametrize("key", [keys.checkpoint_part(4, 0), keys.checkpoint_commit(4)])
def test_a_damaged_checkpoint_is_passed_over(bucket, uninterrupted, key) -> None:
    train(bucket, to=5, die=True)
    flip(bucket, key)
    assert loaded(bucket, 5)[0].version == 2
    assert train(bucket) == uninterrupted


def test_a_checkpoint_of_other_weights_is_passed_over(bucket, uninterrupted) -> None:
    """Whole in itself, and of a trainer whose version 4 is not the one that was committed."""
    train(bucket, to=5, die=True)
    commit, state = loaded(bucket, 4)
    other = {name: tensor * 2 if "master" in name else tensor for name, tensor in state.items()}
    save_checkpoint(bucket, other, commit.ledger, version=4, digest=commit.digest, run=commit.run)
    assert train(bucket) == uninterrupted


def test_a_group_damaged_at_rest_is_named_and_never_trained_on(bucket) -> None:
    """A flipped bit in a log-probability leaves a group that can be read."""
    train(bucket, to=3, die=True)
    key = keys.rollout("w0", 4)
    changed = made_up_group(4)
    changed.trajectories[0].logprobs_T[2] = -5.5
    bucket.put(key, encode_group(changed))
    with pytest.raises(CorruptError, match=f"not the one that was trained on.*{key}"):
        trainer_of(bucket)
    with pytest.raises(CorruptError, match=key):
        verify_training(bucket)
    assert verify_training(bucket, last=2).exact


@pytest.mark.parametrize("threads", [2, 4])
def test_replay_is_exact_with_several_threads(bucket, threads) -> None:
    """A commit records its number of threads; with as many again, the bits are the same."""
    train(bucket, threads=threads)
    torch.set_num_threads(1)
    assert verify_training(bucket).exact


def test_dropout_is_off_unless_configured(bucket) -> None:
    """The run's model drops attention at random. A penalty against the model itself is zero only
    if neither the trainer nor the reference does."""
    run, config = open_run(bucket)
    loss = msgspec.structs.replace(config.train.loss, kl="k3")
    groups = [made_up_group(0), made_up_group(1)]
    found = []
    for dropout in (False, True):
        train = msgspec.structs.replace(config.train, loss=loss, dropout=dropout)
        changed = msgspec.structs.replace(config, train=train)
        with fetch_model_files(bucket, run) as folder:
            model = empty_model(Path(folder)).train()
        state = redoing.resume(bucket, run, changed, model, newest=0)
        found.append(train_step(state.masters, groups, changed, reference=state.reference).kl)
    assert found[0] == pytest.approx(0, abs=1e-9)
    assert found[1] > 1e-5


def test_replay_from_a_checkpoint_recomputes_only_later_steps(bucket, uninterrupted) -> None:
    train(bucket)
    seen = []
    found = verify_training(bucket, first=5, progress=lambda *report: seen.append(report))
    assert (found.origin, found.first, found.last, found.exact) == (4, 5, 6, True)
    assert seen == [(0, 2), (1, 2), (2, 2)]


def test_replay_names_the_first_version_that_differs(bucket, monkeypatch) -> None:
    train(bucket)
    honest = redoing.seed_step
    monkeypatch.setattr(
        redoing,
        "seed_step",
        lambda config, version, rank: honest(config, version + (version == 3), rank=rank),
    )
    found = verify_training(bucket)
    assert (found.exact, found.differs) == (False, 3)
    assert "the arithmetic differs" in found.reason
    assert sum(found.tensors.values()) > 0


def test_a_dump_holds_all_that_a_step_was_made_of(bucket, tmp_path) -> None:
    import safetensors.torch

    train(bucket)
    assert verify_training(bucket, dump=Dump(6, tmp_path / "step")).exact
    record = msgspec.json.decode((tmp_path / "step" / "step.json").read_bytes())
    assert record["equal"]
    assert [found["sequence"] for found in record["groups"]] == [10, 11]
    assert len(list((tmp_path / "step").glob("group-*.msgpack"))) == 2
    state = safetensors.torch.load_file(tmp_path / "step" / "state.safetensors")
    assert int(state["steps"]) == 5
    with pytest.raises(InputError, match="exists already"):
        verify_training(bucket, dump=Dump(6, tmp_path / "step"))


@pytest.mark.parametrize(("first", "last"), [(0, 3), (4, 3), (1, 9)])
def test_versions_that_are_not_there_are_refused(bucket, first, last) -> None:
    train(bucket, to=3)
    with pytest.raises(InputError, match="the run has 1 to 3"):
        verify_training(bucket, first=first, last=last)


def test_what_a_dead_worker_stored_is_trained_on(bucket) -> None:
    """It died before any trainer saw it: nothing of it is settled, and it is not alive."""
    put_heartbeat(bucket, "w0", stored=2 * VERSIONS, phase="stopped", ended=True)
    train(bucket)
    fates = audit_fates(bucket, max_staleness=100)
    assert (fates.consumed, fates.stored) == (2 * VERSIONS, 2 * VERSIONS)


def test_an_outage_is_waited_for(bucket, uninterrupted, monkeypatch) -> None:
    trainer = trainer_of(bucket)
    outages = iter([True, False, True, True])
    poll = trainer.fleet.poll

    def unsteady(**options: float) -> None:
        if next(outages, False):
            raise RetryError("the store does not answer")
        poll(**options)

    trainer.fleet.poll = unsteady
    trainer.process.wait = lambda seconds: None
    trainer.loop()
    assert digests(bucket) == uninterrupted


def test_an_answer_that_was_cut_short_is_asked_for_again(bucket, monkeypatch) -> None:
    train(bucket, to=1)
    get, cuts = bucket.get, iter([True, True, False, True, True, True])

    def cut(key: str, *, limit: int) -> bytes | None:
        data = get(key, limit=limit)
        return data[: len(data) // 2] if next(cuts, False) else data

    monkeypatch.setattr(bucket, "get", cut)
    assert read_trainer(bucket).version == 1
    with pytest.raises(CorruptError, match=r"trainer\.json"):
        read_trainer(bucket)


def test_failing_to_remove_an_old_checkpoint_does_not_stop_the_run(
    bucket, uninterrupted, monkeypatch
) -> None:
    delete, faults = bucket.inner.delete, iter([True, False, True])

    def unsteady(key: str) -> None:
        if next(faults, False):
            raise RetryError("the store does not answer")
        delete(key)

    monkeypatch.setattr(bucket.inner, "delete", unsteady)
    assert train(bucket) == uninterrupted
    assert len(bucket.list(keys.CHECKPOINTS)) == 4, "two are kept, of two objects each"


def test_a_store_that_never_answers_ends_it(bucket, monkeypatch) -> None:
    trainer = trainer_of(bucket)
    monkeypatch.setattr("deltawire.rl.trainer.trainer.STORE_PATIENCE_S", -1.0)

    def never(**_: float) -> None:
        raise RetryError("the store does not answer")

    trainer.fleet.poll = never
    with pytest.raises(RetryError):
        trainer.loop()
    trainer.publisher.close()


def test_fates_tell_what_was_forgotten_and_what_was_settled_twice(bucket, monkeypatch) -> None:
    train(bucket, to=3)
    found = audit_fates(bucket, max_staleness=100)
    assert (found.consumed, found.dropped, found.waiting) == (6, 0, 2 * VERSIONS - 6)
    bucket.delete(keys.rollout("w0", 11))
    all_metadata = [
        CommitMetadata(consumed=[("w0", 0), ("w0", 11)]),
        CommitMetadata(dropped=[("w0", 2, 1), ("w0", 0, 1)]),
    ]
    monkeypatch.setattr(auditing, "all_metadata", lambda _: enumerate(all_metadata, start=1))
    found = audit_fates(bucket, max_staleness=1)
    assert found.twice == [("w0", 0)]
    assert found.forgotten == [], "version 0 is recent enough for version 2"
    monkeypatch.setattr(auditing, "all_metadata", lambda _: enumerate(all_metadata, start=5))
    found = audit_fates(bucket, max_staleness=0)
    assert found.forgotten == [("w0", n) for n in (1, *range(3, 11))]


def test_a_predecessors_late_commit_is_no_rival(bucket) -> None:
    """The new trainer starts again after it; a rival with a higher epoch stops it for good."""
    old, new = trainer_of(bucket, versions=1), trainer_of(bucket, versions=1)
    new.epoch = new.publisher._writer.epoch = old.epoch + 1
    old.loop()
    with pytest.raises(FencedError) as fenced:
        new.loop()
    translated = unfenced(bucket, new.run, new.epoch, fenced.value)
    assert isinstance(translated, ResyncError)
    assert unfenced(bucket, new.run, old.epoch, fenced.value) is fenced.value


def test_the_command(bucket, tmp_path, capsys) -> None:
    train(bucket, to=2)
    assert main(["replay", bucket.url, "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["exact"]
    (tmp_path / "empty").mkdir()
    for arguments, says in [
        ([str(tmp_path / "empty")], "there is no run here"),
        ([str(tmp_path / "nowhere")], "there is no bucket"),
        ([bucket.url, "--from", "3"], "the run has 1 to 2"),
        ([bucket.url, "--dump", "1"], "--dump and --out go together"),
    ]:
        assert main(["replay", *arguments]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert says in lines[0]


def stored_groups(bucket: Bucket) -> set[tuple[str, int]]:
    found = {keys.group_of(key) for key in bucket.list(keys.ROLLOUTS)}
    return {group for group in found if group is not None}


def test_old_groups_are_deleted_and_the_audit_does_not_miss_them(bucket) -> None:
    """Groups of versions after the oldest checkpoint stay: its steps may be recomputed."""
    before = stored_groups(bucket)
    trainer = trainer_of(bucket, checkpoint_every=2)
    trainer.retention = RolloutRetention(bucket, trainer.run, keep=1)
    trainer.loop()
    kept = checkpoint_versions(bucket)
    named = {v: set(metadata.settled_groups()) for v, metadata in all_metadata(bucket)}
    assert read_retained(bucket).rollouts == kept[0] + 1 > 1
    needed = set().union(*(groups for v, groups in named.items() if v > kept[0]))
    deleted = before - stored_groups(bucket)
    assert deleted == set().union(*(groups for v, groups in named.items() if v <= kept[0]))
    assert needed.isdisjoint(deleted)
    found = audit_consumption(bucket)
    assert (found.lost, found.trimmed) == (0, len(deleted))
    assert found.groups + found.trimmed == found.consumed == 2 * VERSIONS
    assert next_sequence_of(bucket) == 2 * VERSIONS, "numbers are never used twice"


def next_sequence_of(bucket: Bucket) -> int:
    process = Process(bucket, "w0", "worker", supervised=True)
    process.heartbeat.start()
    process.heartbeat.close()
    return next_sequence(process)


def test_an_audit_reads_a_sample_and_finds_groups_that_were_exchanged(bucket) -> None:
    train(bucket)
    assert audit_consumption(bucket).groups == 2 * VERSIONS
    found = audit_consumption(bucket, sampled=5)
    assert (found.groups, found.consumed, found.lost) == (5, 2 * VERSIONS, 0)
    for number in range(2 * VERSIONS):
        put_group(bucket, number, made_up_group(number + 100))
    assert audit_consumption(bucket, sampled=5).lost == 5


@pytest.fixture
def skipped(bucket) -> Bucket:
    """Version 4 builds on version 2, because an unreadable object occupies number 3."""
    train(bucket, to=2, die=True)
    bucket.put(keys.manifest(3), b"junk")
    train(bucket, to=5)
    run = read_run(bucket)
    assert [read_manifest(bucket, run, version).base for version in (4, 5)] == [2, 4]
    return bucket


def test_the_audit_follows_the_chain_across_skipped_numbers(skipped) -> None:
    assert [(v, found.step) for v, found in all_metadata(skipped)] == [
        (version, version) for version in (1, 2, 4, 5)
    ]
    found = audit_consumption(skipped)
    assert (found.versions, found.consumed, found.lost, found.repeated) == (5, 8, 0, 0)
    assert found.staleness == {1: [0, 0], 2: [1, 1], 4: [2, 2], 5: [4, 4]}, "from the base"
    fates = audit_fates(skipped, max_staleness=100)
    assert (fates.consumed, fates.waiting) == (8, 2 * VERSIONS - 8)
    assert read_trainer(skipped).version == 5


def test_the_audit_finds_a_version_that_is_missing(skipped) -> None:
    skipped.delete(keys.manifest(3))
    assert audit_consumption(skipped).versions == 5, "nothing builds on it"
    skipped.put(keys.manifest(2), b"junk")
    with pytest.raises(UnreadableError, match=keys.manifest(2)):
        audit_consumption(skipped)
    skipped.delete(keys.manifest(2))
    with pytest.raises(CorruptError, match="a manifest is missing: version 4 builds on it"):
        audit_consumption(skipped)


def test_replay_follows_the_chain_across_skipped_numbers(skipped) -> None:
    found = verify_training(skipped)
    assert (found.exact, found.last, found.groups) == (True, 5, 8)
    skipped.put(keys.manifest(9), b"junk")
    assert verify_training(skipped, first=3).exact
    assert verify_training(skipped, last=3).groups == 4


def test_a_resumed_trainer_recomputes_across_skipped_numbers(skipped) -> None:
    for version in checkpoint_versions(skipped):
        if version > 2:
            skipped.delete(keys.checkpoint_commit(version))
    trainer = trainer_of(skipped, versions=6)
    assert (trainer.version, trainer.rank.diverged) == (5, False)
    trainer.loop()
    assert verify_training(skipped).exact


def test_retention_deletes_groups_across_skipped_numbers(skipped) -> None:
    retention = RolloutRetention(skipped, read_run(skipped), keep=1)
    assert retention.trim(newest=5, oldest_checkpoint=5) == 6


def test_old_versions_are_deleted_and_the_trainer_resumes(bucket) -> None:
    trainer = trainer_of(bucket, versions=4, anchor_every=1)
    reports: list[str] = []
    trainer.version_retention = VersionRetention(
        bucket, trainer.run, keep=1, report=reports.append, grace_s=0.0
    )
    trainer.loop()
    assert reports == []
    pruned = [manifest.version for manifest in read_history(bucket, trainer.run) if manifest.pruned]
    assert pruned == [1], "the oldest checkpoint is at version 2"
    trim = RolloutRetention(bucket, trainer.run, keep=1).trim
    assert trim(newest=4, oldest_checkpoint=2) == 4, "a pruned version still names its groups"
    assert audit_consumption(bucket).lost == 0
    train(bucket)
    assert verify_training(bucket, first=5).exact


def test_version_retention_reports_what_went_wrong(bucket) -> None:
    run = read_run(bucket)
    train(bucket, to=2)
    reports: list[str] = []
    for keep, started in ((0, False), (9, False), (1, True)):
        retention = VersionRetention(bucket, run, keep=keep, report=reports.append, grace_s=-1.0)
        assert retention.start(newest=2) == started
        retention.close()
    assert len(reports) == 1
    assert "old versions could not be deleted: the grace period is -1.0 s" in reports[0]


@pytest.mark.parametrize(("keep", "versions"), [(1, [6]), (3, [2, 4, 6]), (0, [2, 4, 6])])
def test_as_many_checkpoints_are_kept_as_configured(bucket, keep, versions) -> None:
    trainer = trainer_of(bucket)
    retain = msgspec.structs.replace(trainer.config.retain, checkpoints=keep)
    trainer.rank.config = msgspec.structs.replace(trainer.config, retain=retain)
    trainer.loop()
    assert checkpoint_versions(bucket) == versions


def test_versions_are_not_deleted_from_a_run_that_refers_to_version_0() -> None:
    train = {**CONFIG["train"], "loss": {"kl": "k3"}}
    with pytest.raises(InputError, match=r"version 0, the reference of train\.loss"):
        parse_config({**CONFIG, "train": train, "retain": {"versions": 5}}, source="test")


def test_a_step_is_recomputed_with_the_settings_that_it_was_made_with(bucket) -> None:
    """Versions 1 to 3 with one learning rate, 4 and 5 with another, 6 with the first again; the
    checkpoints are those of 2 and 4, and each trainer dies in between."""
    rates = {3: 1e-3, 5: 3e-3, 6: 1e-3}
    for version, rate in rates.items():
        optimizer = msgspec.structs.replace(open_run(bucket)[1].train.optimizer, learning_rate=rate)
        trainer = trainer_of(bucket, versions=version, optimizer=optimizer)
        if version < VERSIONS:
            trainer._finish = trainer.publisher.close  # type: ignore[method-assign]
        trainer.loop()
        trainer.process.events.flush()
        assert not trainer.rank.diverged, "the steps before it gave the same bits again"
        assert open_run(bucket)[1].train.optimizer.learning_rate == rate
    assert verify_training(bucket).exact
    events = [e for e in EventTail(bucket).read() if isinstance(e, SettingsChanged)]
    changes = [event.changes for event in sorted(events, key=lambda event: event.at)]
    assert [one.get("train.optimizer.learning_rate") for one in changes] == [
        None,
        (1e-3, 3e-3),
        (3e-3, 1e-3),
    ]
    assert changes[0] == {"train.versions": (VERSIONS, 3)}


def test_a_setting_that_may_not_change_is_refused_by_name(bucket) -> None:
    """Also one that somebody put into the trainer's status."""
    _, config = open_run(bucket)
    rollout = msgspec.structs.replace(config.rollout, temperature=0.5)
    other = msgspec.structs.replace(config, rollout=rollout)
    with pytest.raises(InputError, match=r"rollout\.temperature was 1\.0 and is now 0\.5"):
        start_run(bucket, other, Path(config.model.path))
    train(bucket, to=1)
    status = read_trainer(bucket)
    hostile = msgspec.structs.replace(status, settings={"task.environment": "os:system"})
    bucket.put(keys.TRAINER, encode_json(hostile))
    with pytest.raises(InputError, match=r"'task\.environment' cannot change"):
        open_run(bucket)


def served_of(bucket: Bucket) -> dict[int, Served | None]:
    found = [event for event in EventTail(bucket).read() if isinstance(event, Published)]
    return {event.version: event.served for event in found if event.version}


def test_the_served_share_is_that_since_version_0(bucket, begun, tmp_path) -> None:
    """Also of a trainer that continues from a checkpoint."""
    shutil.copytree(begun, tmp_path / "whole")
    whole = open_bucket(str(tmp_path / "whole"))
    for place, stops in ((whole, [5]), (bucket, [2, 3, 5])):
        for version in stops:
            trainer = trainer_of(place, versions=version)
            trainer.loop()
            trainer.process.events.flush()
    shares = served_of(whole)
    assert shares == served_of(bucket)
    assert sorted(shares) == [1, 2, 3, 4, 5]
    assert all(one.since == 0 and 0.7 < one.share < 1.3 for one in shares.values())
    layers = {"layers.0", "model.embed_tokens", "model.norm"}
    assert layers <= shares[5].layers.keys()


def test_without_version_0_the_share_is_that_since_the_checkpoint(bucket, monkeypatch) -> None:
    train(bucket, to=4)

    def gone(*args, at, **named):
        raise CorruptError("a version has been pruned")

    monkeypatch.setattr(redoing, "load_mirror", gone)
    trainer = trainer_of(bucket, versions=5)
    trainer.loop()
    trainer.process.events.flush()
    assert served_of(bucket)[5].since == 4
