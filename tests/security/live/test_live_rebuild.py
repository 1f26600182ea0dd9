"""A run is rebuilt without a user: by a decision, once, also in signed runs and after any death."""

import base64
import contextlib
import itertools
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from forgotten_users import everything_in, train
from granted_groups import SECRET as TRAINER_SECRET
from granted_groups import start_with_groups
from heartbeats import put_heartbeat
from live_answers import LIVE, NOW, answer, config_of, put_rows, report
from live_gateway import SECRET, write_secret
from signed_run import OTHER, STRANGER, WORKER, SignedRun

from deltawire.cli.main import main
from deltawire.config import parse_config
from deltawire.errors import InputError, RetryError
from deltawire.launch.live import Releaser
from deltawire.live.capture.pseudonyms import Pseudonyms
from deltawire.live.erasure.forgetting import forget_user
from deltawire.live.erasure.rebuilding import check_rebuildable, rebuild_without
from deltawire.live.learning.grouping import GroupMaker
from deltawire.live.learning.learner import LiveGroups
from deltawire.live.learning.records import LiveRecords
from deltawire.rl.control.challenges import nonce_of
from deltawire.rl.control.lineages import read_lineages
from deltawire.rl.control.released_groups import ReleasedGroups
from deltawire.rl.trainer import rollbacks
from deltawire.runtime.decision_log import DecisionLog
from deltawire.runtime.process import open_run
from deltawire.store import DelegatingBucket, open_bare_bucket
from deltawire.sync import Publisher, load_mirror, read_history, read_manifest
from deltawire.testing.tiny import start_publisher, start_run, weights
from deltawire.wire import keys
from deltawire.wire.decisions import Decision, RestoreRecord, ServedVersion
from deltawire.wire.ledger import CommitMetadata, ranges_of
from deltawire.wire.objects import encode_json
from deltawire.wire.rollouts import decode_group
from deltawire.wire.status import Challenge

ALICE = "a" * 32


def served(bucket, run, version):
    return ServedVersion(version, read_manifest(bucket, run, version).digest)


def serve(bucket, run, version):
    log = DecisionLog(bucket, run.id)
    log.poll()
    verdict = "promote" if log.decisions else "serve"
    made = Decision(
        number=log.next_number, run=run.id, verdict=verdict, at=0.0, by="ann",
        serving=served(bucket, run, version),
    )  # fmt: skip
    assert log.append(made)


def decisions(bucket, run):
    log = DecisionLog(bucket, run.id)
    log.poll()
    return [(one.verdict, one.serving.version) for one in log.decisions]


@pytest.fixture
def published():
    """Versions 0 to 4 without groups, and a function that publishes more of them."""
    bucket = open_bare_bucket("memory://")
    run = start_run(bucket)
    publisher = start_publisher(bucket)
    for version in range(5):
        publisher.publish(weights(version))
    publisher.flush()
    yield bucket, run, publisher
    publisher.close()


def restore(bucket, run, publisher, decision, groups=()):
    """Publish what a trainer publishes that follows a decision."""
    log = DecisionLog(bucket, run.id)
    log.poll()
    serving = log.decisions[decision].serving
    record = RestoreRecord(
        decision=decision, restored=serving, first=serving.version + 1,
        last=publisher.version, state="weights", groups=ranges_of(groups),
    )  # fmt: skip
    publisher.publish(weights(serving.version), metadata=record.to_dict())
    publisher.flush()


def rebuild(bucket, run, trained):
    return rebuild_without(bucket, run, trained, by="ann", now=1.0)


def test_the_last_version_before_the_user_is_restored_once(published):
    bucket, run, publisher = published
    serve(bucket, run, 4)
    assert rebuild(bucket, run, []) == ("not_needed", None, None)
    assert rebuild(bucket, run, [3]) == ("waits_for_trainer", 1, 2)
    assert rebuild(bucket, run, [3]) == ("waits_for_trainer", 1, 2), "it is decided once"
    restore(bucket, run, publisher, 1, [("live", 2), ("live", 3)])
    assert rebuild(bucket, run, [3]) == ("not_needed", None, None)
    publisher.publish(weights(6))
    publisher.flush()
    assert rebuild(bucket, run, [3, 6]) == ("waits_for_trainer", 2, 2), "it still serves"
    assert decisions(bucket, run) == [("serve", 4), ("rollback", 2), ("rollback", 2)]


def test_a_serving_version_without_the_user_is_restored_because_it_passed_the_gate(published):
    bucket, run, _ = published
    serve(bucket, run, 1)
    assert rebuild(bucket, run, [4]) == ("waits_for_trainer", 1, 1)


def test_a_run_without_decisions_is_refused_with_the_way_to_begin(published):
    bucket, run, _ = published
    with pytest.raises(InputError, match="no version serves by decision") as refused:
        check_rebuildable(bucket, run)
    assert "deltawire live promote" in refused.value.hint


@pytest.mark.parametrize("settings", [None, {"live": {"release": {"restore": False}}}])
def test_a_run_whose_trainer_restores_nothing_is_refused_before_anything_is_deleted(
    published, settings
):
    bucket, run, _ = published
    serve(bucket, run, 4)
    config = {} if settings is None else {"name": "live", **settings}
    with pytest.raises(InputError, match="restores no earlier version"):
        check_rebuildable(bucket, msgspec.structs.replace(run, config=config))
    check_rebuildable(bucket, msgspec.structs.replace(run, config={"name": "live"}))


def test_versions_of_a_forgotten_user_are_no_candidates_though_no_trainer_runs(published):
    """One that was under way when the rebuild was decided, and then the run ended."""
    bucket, run, publisher = published
    serve(bucket, run, 1)
    assert rebuild(bucket, run, [3]) == ("waits_for_trainer", 1, 1)
    publisher.publish(weights(5))
    publisher.flush()
    config = parse_config({"name": "live", "live": {"release": {"gate": {}}}}, source="s")
    releaser = Releaser(bucket, run, config, by="g0")
    assert releaser.step(1e9) is None
    restore(bucket, run, publisher, 1)
    assert [releaser.step(1e9).verdict, releaser.log.newest.serving.version] == ["promote", 6]
    publisher.publish(weights(7))
    publisher.flush()
    found = releaser.step(2e9)
    assert (found.verdict, found.candidate.version) == ("gate", 7)


def test_only_a_rebuild_releases_groups_and_only_once_it_is_restored(published):
    bucket, run, publisher = published
    serve(bucket, run, 4)
    released = ReleasedGroups(bucket, run)
    assert not released.poll()
    log = DecisionLog(bucket, run.id)
    log.poll()
    assert log.append(
        Decision(
            number=1,
            run=run.id,
            verdict="rollback",
            at=0.0,
            by="ann",
            serving=served(bucket, run, 2),
            candidate=served(bucket, run, 4),
        )
    )
    restore(bucket, run, publisher, 1, [("live", 0)])
    assert not released.poll(), "an ordinary rollback releases nothing"
    publisher.publish(weights(6))
    publisher.flush()
    rebuild(bucket, run, [6])
    assert not released.poll(), "the trainer has restored nothing yet"
    restore(bucket, run, publisher, 2, [("live", 4), ("live", 5), ("w0", 9)])
    assert released.poll()
    assert not released.poll()
    assert released.groups == {("live", 4), ("live", 5), ("w0", 9)}


def signed_run_with_groups(location="memory://", folder=None):
    """Version 1 of a signed run consumed group 0 of the learner, and group 1 waits; the user is in
    both."""
    run = SignedRun(location)
    run.grant("gateway", OTHER)
    run.grant("worker-live", WORKER)
    gateway, learner = run.bucket("gateway", signer=OTHER), run.bucket("worker-live", signer=WORKER)
    user = Pseudonyms(SECRET).user("alice")
    who = {n: user if n in (2, 6) else None for n in range(1, 9)}
    rows = (
        [answer(n, user=who[n]) for n in who],
        [report(n, user=who[n], value=float(n % 3 == 0)) for n in who],
    )
    put_rows(gateway, 0, *rows)
    if folder is not None:
        write_secret(gateway, run.run, folder / "secret")
    records = LiveRecords(learner)
    records.poll()
    groups = LiveGroups(learner, "live", GroupMaker(config_of(), records), first=0)
    assert all(groups.store(f"n{n}", NOW + 100) for n in range(2))
    publisher = Publisher(
        run.plain, run.run, load_mirror(run.plain, run.run), epoch=1, compaction_strides=(),
        signer=run.owner,
    )  # fmt: skip
    step = CommitMetadata(step=1, consumed=[("live", 0)])
    publisher.publish({"w": np.full(64, 1, np.uint16)}, metadata=step.to_dict())
    publisher.close()
    return run, user


def test_in_a_signed_run_what_is_replaced_is_valid_again(tmp_path, capsys):
    run, user = signed_run_with_groups(str(tmp_path / "run"), tmp_path)
    files = {name: str(tmp_path / name) for name in ("gateway", "live")}
    OTHER.write(Path(files["gateway"]))
    WORKER.write(Path(files["live"]))
    command = [
        "forget",
        str(tmp_path / "run"),
        "alice",
        "--public-key",
        str(run.pin),
        "--no-trainer",
    ]
    command += ["--key", files["gateway"], "--secret", str(tmp_path / "secret"), "--json"]
    stored = {key: run.plain.get(key, limit=1 << 28) for key in run.plain.list("")}
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "the learners that made them: live" in said
    assert "NAME=FILE for each with --learner-key" in said
    assert {key: run.plain.get(key, limit=1 << 28) for key in run.plain.list("")} == stored
    for wrong in ("live", "../x=file", f"live={files['gateway']}"):
        assert main([*command, "--learner-key", wrong]) == 2
        capsys.readouterr()
    assert main([*command, "--learner-key", f"live={files['live']}"]) == 0
    assert '"versions": [1]' in capsys.readouterr().out
    reader = run.bucket()
    records = LiveRecords(reader)
    records.poll()
    assert (records.counts["answers"], records.counts["damaged_segments"]) == (6, 0)
    key = keys.rollout("live", 1)
    group = decode_group(reader.get(key, limit=1 << 28), run="", key=key)
    assert [one.cause for one in group.trajectories] == ["", "forgotten", "", ""]
    lineages = read_lineages(reader)
    assert [one.sequence for one in lineages] == [0, 1], "both are valid to a pinned reader"
    assert not any(one.user == user for line in lineages for one in line.answers)
    assert reader.get(keys.rollout("live", 0), limit=1 << 28) is None


@pytest.mark.parametrize("content", ["a lineage", "no lineage"])
def test_a_forged_lineage_of_a_worker_blocks_no_erasure(tmp_path, capsys, content):
    run, user = signed_run_with_groups(str(tmp_path / "run"), tmp_path)
    run.grant("worker-w0", STRANGER)
    forger = run.bucket("worker-w0", signer=STRANGER)
    (genuine, _) = read_lineages(run.bucket())
    forged = msgspec.structs.replace(genuine, worker="w0", sequence=7)
    data = encode_json(forged) if content == "a lineage" else b"{}"
    forger.put(keys.live_lineage("w0", 7), data)
    for name, signer in (("gateway", OTHER), ("live", WORKER)):
        signer.write(tmp_path / name)
    command = [
        "forget",
        str(tmp_path / "run"),
        "alice",
        "--public-key",
        str(run.pin),
        "--no-trainer",
    ]
    command += ["--key", str(tmp_path / "gateway"), "--secret", str(tmp_path / "secret")]
    command += ["--learner-key", f"live={tmp_path / 'live'}", "--json"]
    assert main(command) != 0
    said = capsys.readouterr().err
    assert "w0" in said
    assert main([*command, "--no-learner", "../w0"]) == 2
    assert main([*command, "--no-learner", "w0"]) == 0
    assert run.plain.list(f"{keys.LIVE_LINEAGE}w0/") == []
    lineages = read_lineages(run.bucket())
    assert [one.sequence for one in lineages] == [0, 1], "those of the learner stay"
    assert not any(one.user == user for line in lineages for one in line.answers)


class KilledAtWrite(DelegatingBucket):
    """The store of a process that dies before, or after, its ``at``-th write."""

    def __init__(self, inner, at, done):
        super().__init__(inner)
        self.left, self.done = at, done

    def _call(self, verb, key, operation):
        if verb not in ("put", "create", "delete"):
            return operation()
        self.left -= 1
        if self.left == 0 and self.done:
            operation()
        if self.left <= 0:
            raise RetryError("killed", run=self.url, key=key)
        return operation()


@pytest.mark.parametrize("done", [False, True])
def test_a_command_that_is_killed_at_any_write_is_finished_by_the_next(done):
    for at in itertools.count(1):
        bucket = open_bare_bucket("memory://")
        run = start_run(bucket)
        put_rows(
            bucket, 0, [answer(n, user=ALICE if n == 2 else None) for n in range(1, 5)],
            [
                report(n, user=ALICE if n == 2 else None, value=float(n % 3 == 0))
                for n in range(1, 5)
            ],
        )  # fmt: skip
        records = LiveRecords(bucket)
        records.poll()
        assert LiveGroups(bucket, "live", GroupMaker(config_of(), records), first=0).store(
            "n", NOW + 100
        )
        publisher = start_publisher(bucket)
        publisher.publish(weights(0))
        step = CommitMetadata(step=1, consumed=[("live", 0)])
        publisher.publish(weights(1), metadata=step.to_dict())
        publisher.close()
        serve(bucket, run, 1)
        store = KilledAtWrite(bucket, at, done)
        with contextlib.suppress(RetryError):
            rebuild(store, run, forget_user(store, run, ALICE, no_trainer=True).versions)
        record = forget_user(bucket, run, ALICE, no_trainer=True)
        assert rebuild(bucket, run, record.versions) == ("waits_for_trainer", 1, 0)
        assert record.versions == [1]
        assert decisions(bucket, run) == [("serve", 1), ("rollback", 0)]
        assert answer(2).tokens not in everything_in(bucket)
        if store.left > 0:
            break
    assert at > 5, "record, segments, group, lineage and decision are writes to die at"


def forms_of(data):
    """The bytes as they are, in hexadecimal, and in base64 at each of its three offsets."""
    yield data
    yield data.hex().encode()
    for place in range(3):
        yield base64.b64encode(b"\0" * place + data)[4 if place else 0 : -4]


def test_a_trainer_restores_and_trains_again_on_the_answers_of_others(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(rollbacks, "POLL_EVERY_S", 0.0)
    settings = {
        "versions": 100, "groups_per_step": 1, "max_staleness": 100, "checkpoint_every": 1,
        "optimizer": {"learning_rate": 1e-2}, "loss": {"advantage": "given"},
    }  # fmt: skip
    sections = {"rollout": LIVE["rollout"], "live": LIVE["live"]}
    bucket = start_with_groups(tmp_path, groups=0, train=settings, **sections)
    bucket.put(keys.challenge("live"), encode_json(Challenge(worker="live", secret=TRAINER_SECRET)))
    user = Pseudonyms(SECRET).user("alice")
    planted = b"planted text of alice"
    texts = {n: planted if n == 6 else b"" for n in range(1, 12)}
    who = {n: user if n == 6 else None for n in texts}
    put_rows(
        bucket, 0, [answer(n, user=who[n], tokens=12, text=texts[n]) for n in texts],
        [report(n, value=float(n % 2), user=who[n]) for n in texts],
    )  # fmt: skip
    run, config = open_run(bucket)
    secret = write_secret(bucket, run, tmp_path / "secret")

    def learner(first, released=()):
        records = LiveRecords(bucket)
        records.poll()
        maker = GroupMaker(config, records)
        return LiveGroups(bucket, "live", maker, first=first, released=released)

    groups = learner(0)
    assert all(groups.store(nonce_of(TRAINER_SECRET, 0, n), NOW + 100) for n in range(2))
    bucket.delete(keys.heartbeat("w0"))
    put_heartbeat(bucket, "live", stored=2, at=time.time())
    train(bucket, to=2)
    serve(bucket, run, 2)
    needles = [form for data in (planted, answer(6, tokens=12).tokens) for form in forms_of(data)]
    assert planted in everything_in(bucket)
    command = ["forget", bucket.url, "alice", "--secret", secret, "--rebuild", "--no-trainer"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "versions trained on them: 2" in said
    assert "restore version 1" in said
    released = ReleasedGroups(bucket, run)
    train(bucket, to=3)
    assert served(bucket, run, 3).digest == served(bucket, run, 1).digest
    assert released.poll()
    assert released.groups == {("live", 1)}
    assert main(command) == 0
    assert "the newest version does not come from" in capsys.readouterr().out
    again = learner(2, released.groups)
    assert again.store(nonce_of(TRAINER_SECRET, 0, 2), NOW + 100)
    lineage = next(one for one in read_lineages(bucket) if one.sequence == 2)
    assert {int(one.answer, 16) for one in lineage.answers} == {5, 7, 8, 9}
    put_heartbeat(bucket, "live", stored=3, at=time.time())
    train(bucket, to=4)
    newest = list(read_history(bucket, run))[-1]
    step = CommitMetadata.of(newest.metadata, run="", version=4)
    assert (newest.version, step.consumed, step.dropped) == (4, [("live", 2)], [])
    found = everything_in(bucket, tmp_path)
    assert not [needle for needle in needles if needle in found]
    assert not learner(3, released.groups).store("n", NOW + 100), "each answer is trained on once"
