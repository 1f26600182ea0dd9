"""Objects that are written to a signed run's bucket without a key are ignored."""

import os
import threading
import time
from time import monotonic

import msgspec
import pytest
from numbered_events import numbered_event
from signed_run import OTHER, OWNER, STRANGER, WORKER, SignedRun

from deltawire.dashboard.status import Watch
from deltawire.errors import CorruptError, FencedError, InputError, SignatureError
from deltawire.events import Evaluated, Life, Step, encode_lines
from deltawire.rl.evaluate.evaluator import evaluated_versions
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.event_window import RecentEvents
from deltawire.runtime.fleet import Fleet, known_trainer, read_trainer
from deltawire.runtime.heartbeat import HeartbeatWriter, impatient, read_heartbeat
from deltawire.runtime.highest_version import HighestVersion
from deltawire.runtime.lease import Lease
from deltawire.runtime.process import Process
from deltawire.runtime.signed_bucket import GRANT_S, REREAD_S, SignedBucket
from deltawire.runtime.trusted import ReaderTrust, open_trusted, trusted
from deltawire.store import open_bucket
from deltawire.sync import newest_version, read_run
from deltawire.wire import keys
from deltawire.wire.event_archive import ArchivedSegment, EventArchive
from deltawire.wire.objects import encode_json, encode_packed
from deltawire.wire.roles import Pin, sign_bytes
from deltawire.wire.status import Heartbeat, TrainerStatus, WorkerStatus


def status(**changes):
    members = {"phase": "training", "version": 0, "digest": "", "epoch": 1, "credits": {}, "at": 0}
    return TrainerStatus(**{**members, **changes})


def heartbeat(process, **changes):
    members = {
        "process": process, "role": "worker", "nonce": "n", "lease": 0, "supervised": False,
        "host": "h", "pid": 1, "started_at": 0.0, "at": time.time(), "number": 1, "doing": "wait",
        "quiet_s": 0.0, "allowed_s": 60.0,
        "worker": WorkerStatus(phase="sampling", version=0, digest=""),
    }  # fmt: skip
    return Heartbeat(**{**members, **changes})


@pytest.fixture
def run():
    return SignedRun()


def test_what_each_role_writes_is_read_by_all(run):
    run.bucket("trainer").put(keys.TRAINER, encode_json(status(version=3)))
    run.bucket("worker-w0").put(keys.heartbeat("w0"), encode_json(heartbeat("w0")))
    for reader in (run.bucket(), run.bucket(pinned=False), impatient(run.bucket())):
        assert read_trainer(reader).version == 3
        fleet = Fleet(reader, silence_s=60.0)
        fleet.poll()
        assert fleet.workers == {"w0"}
        assert fleet.errors == []


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize(
    "forged",
    [
        pytest.param(lambda run, key, data: data, id="unsigned"),
        pytest.param(
            lambda run, key, data: sign_bytes(
                data, run_id=run.run.id, key=key, signer=STRANGER, role="trainer"
            ),
            id="signed by a stranger",
        ),
        pytest.param(
            lambda run, key, data: sign_bytes(
                data, run_id=run.run.id, key=key, signer=WORKER, role="worker-w0"
            ),
            id="signed by a worker",
        ),
        pytest.param(
            lambda run, key, data: sign_bytes(
                data, run_id="cd" * 16, key=key, signer=OWNER, role="trainer"
            ),
            id="of another run of the owner",
        ),
    ],
)
def test_objects_without_the_roles_key_are_refused(run, pinned, forged):
    data = encode_json(status(phase="finished", version=9))
    run.plain.put(keys.TRAINER, forged(run, keys.TRAINER, data))
    reader = run.bucket(pinned=pinned)
    with pytest.raises(SignatureError):
        read_trainer(reader)
    assert known_trainer(reader) is None
    beat = encode_json(heartbeat("w1"))
    run.plain.put(keys.heartbeat("w1"), forged(run, keys.heartbeat("w1"), beat))
    fleet = Fleet(reader, silence_s=60.0)
    fleet.poll()
    assert fleet.heartbeats == {}
    assert [error.key for error in fleet.errors] == [keys.heartbeat("w1")]
    assert read_heartbeat(reader, "w1") is None


def test_a_worker_without_a_grant_is_not_seen(run):
    signed = sign_bytes(
        encode_json(heartbeat("w9")),
        run_id=run.run.id, key=keys.heartbeat("w9"), signer=OTHER, role="worker-w9",
    )  # fmt: skip
    run.plain.put(keys.heartbeat("w9"), signed)
    fleet = Fleet(run.bucket(), silence_s=60.0)
    fleet.poll()
    assert fleet.known_workers == set()
    assert "no key is granted to the role 'worker-w9'" in str(fleet.errors[0])


def test_a_process_without_its_key_does_not_start(run):
    run.bucket("worker-w0").check_writer()
    with pytest.raises(InputError, match="the run is signed, and the worker-w0 has no key"):
        SignedBucket(run.plain, role="worker-w0").check_writer()
    with pytest.raises(InputError, match="no key is granted to the role 'worker-w9'"):
        run.bucket("worker-w9", signer=OTHER).check_writer()
    with pytest.raises(InputError, match="not the key that is granted"):
        run.bucket("worker-w0", signer=OTHER).check_writer()
    with pytest.raises(InputError, match="only the trainer may write"):
        run.bucket("worker-w0").put(keys.TRAINER, b"{}")
    unsigned = open_bucket("memory://")
    SignedBucket(unsigned, role="worker-w0").check_writer()
    with pytest.raises(InputError, match="no signed run exists here"):
        SignedBucket(unsigned, signer=WORKER, role="worker-w0").check_writer()


def test_a_forged_grant_grants_nothing(run):
    run.bucket("worker-w0").check_writer()
    stranger = SignedRun(owner=STRANGER)
    forged = stranger.plain.get(keys.role("worker-w0"), limit=1 << 12)
    run.plain.put(keys.role("worker-w0"), forged)
    with pytest.raises(InputError, match="no valid key is granted"):
        run.bucket("worker-w0", signer=WORKER).check_writer()


def test_a_replaced_key_signs_no_longer_and_cannot_be_put_back(run, monkeypatch):
    reader, key = run.bucket(), keys.heartbeat("w0")
    old = run.plain.get(keys.role("worker-w0"), limit=1 << 12)
    run.bucket("worker-w0").put(key, encode_json(heartbeat("w0")))
    assert read_heartbeat(reader, "w0") is not None
    run.grant("worker-w0", STRANGER)
    clock = [monotonic()]
    monkeypatch.setattr("deltawire.runtime.signed_bucket.monotonic", lambda: clock[0])
    clock[0] += 2 * REREAD_S
    run.bucket("worker-w0", signer=STRANGER).put(key, encode_json(heartbeat("w0", number=7)))
    assert read_heartbeat(reader, "w0").number == 7
    run.plain.put(keys.role("worker-w0"), old)
    clock[0] += 2 * REREAD_S
    run.bucket("worker-w0").put(key, encode_json(heartbeat("w0", number=8)))
    assert read_heartbeat(reader, "w0") is None
    run.plain.delete(keys.role("worker-w0"))
    clock[0] += 2 * REREAD_S
    run.bucket("worker-w0", signer=STRANGER).put(key, encode_json(heartbeat("w0", number=9)))
    assert read_heartbeat(reader, "w0").number == 9


def test_a_key_that_was_replaced_is_shut_out_also_if_the_new_one_is_never_used(run, monkeypatch):
    clock = [monotonic()]
    monkeypatch.setattr("deltawire.runtime.signed_bucket.monotonic", lambda: clock[0])
    reader, key = run.bucket(), keys.heartbeat("w0")
    thief = run.bucket("worker-w0")
    thief.put(key, encode_json(heartbeat("w0")))
    assert read_heartbeat(reader, "w0") is not None
    run.grant("worker-w0", STRANGER)
    clock[0] += 1.1 * GRANT_S
    thief.put(key, encode_json(heartbeat("w0", number=2)))
    assert read_heartbeat(reader, "w0") is None


def test_an_old_object_put_back_is_refused(run):
    trainer, reader = run.bucket("trainer"), run.bucket()
    trainer.put(keys.TRAINER, encode_json(status(phase="finished", version=1)))
    old = run.plain.get(keys.TRAINER, limit=1 << 20)
    trainer.put(keys.TRAINER, encode_json(status(version=2)))
    assert read_trainer(reader).version == 2
    run.plain.put(keys.TRAINER, old)
    with pytest.raises(SignatureError, match="older than the one read here before"):
        read_trainer(reader)
    trainer.put(keys.TRAINER, encode_json(status(version=3)))
    assert read_trainer(reader).version == 3


def test_a_writers_clock_may_be_set_back(run):
    """Its next object is still the newest one, and no replay."""
    clock, reader = [time.time()], run.bucket()
    trainer = run.bucket("trainer", clock=lambda: clock[0])
    for version in (1, 2):
        trainer.put(keys.TRAINER, encode_json(status(version=version)))
        assert read_trainer(reader).version == version
        clock[0] -= 100.0


def test_a_state_that_is_too_old_is_refused(run):
    run.bucket("trainer").put(keys.TRAINER, encode_json(status()))
    later = time.time() + 100
    assert read_trainer(run.bucket(clock=lambda: later)).version == 0
    with pytest.raises(SignatureError, match=r"was signed 1\d\d s ago; at most 60 s are allowed"):
        read_trainer(run.bucket(clock=lambda: later, max_age_s=60.0))
    with pytest.raises(SignatureError, match="at most 60 s are allowed"):
        run.bucket(clock=lambda: later, max_age_s=60.0).remember(allow_rollback=False)
    # A reader that follows is told when nothing newer comes, by the poller's alarm.
    follower = run.bucket(clock=lambda: later, max_age_s=60.0)
    follower.get(keys.manifest(0), limit=1 << 20)
    with pytest.raises(SignatureError, match="at most 60 s are allowed"):
        follower.get(keys.manifest(1), limit=1 << 20)


@pytest.mark.parametrize("text", [STRANGER.public_key, f"{OWNER.public_key}:{'cd' * 16}"])
def test_a_pinned_reader_refuses_other_runs(run, text):
    reader = SignedBucket(run.plain, pin=Pin.parse(text))
    with pytest.raises(SignatureError, match=r"signed by another key|has the id"):
        read_run(reader)


def test_a_pinned_reader_refuses_an_unsigned_run():
    plain = open_bucket("memory://")
    plain.put(keys.TRAINER, encode_json(status()))
    for pin in (OWNER.public_key, f"{OWNER.public_key}:{'ab' * 16}"):
        with pytest.raises(SignatureError):
            read_trainer(SignedBucket(plain, pin=Pin.parse(pin)))


def test_a_reader_does_not_go_back(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = SignedRun(tmp_path / "bucket", versions=3)
    trust = ReaderTrust(run.pin)
    reader = open_trusted(run.plain.url, trust)
    run.publish(3)
    reader.get(keys.manifest(3), limit=1 << 20)  # As a reader that follows does.
    run.plain.delete(keys.manifest(3))
    with pytest.raises(SignatureError, match="is version 2, but version 3 was read") as caught:
        open_trusted(run.plain.url, trust)
    assert "--allow-rollback" in str(caught.value)
    with pytest.raises(SignatureError):
        open_trusted(run.plain.url, ReaderTrust(Pin(run.pin.public_key)))
    assert newest_version(open_trusted(run.plain.url, ReaderTrust(run.pin, None, True))) == 2
    open_trusted(run.plain.url, trust)  # A state that was accepted once holds from then on.


def test_a_reader_that_starts_while_others_go_on_sees_no_rollback(tmp_path):
    """Versions that they record between its two reads are newer than the one it finds."""
    mine, theirs = (
        HighestVersion(OWNER.public_key, "ab" * 16, "s3://b", folder=tmp_path) for _ in range(2)
    )
    seen = mine.read()
    theirs.note(7)
    mine.check(6, seen=seen, allow_rollback=False)
    assert mine.read() == 7
    HighestVersion(OWNER.public_key, "ab" * 16, "s3://relay", folder=tmp_path).check(
        2, seen=-1, allow_rollback=False
    )


def test_versions_of_others_are_not_remembered(tmp_path, monkeypatch):
    """Else whoever writes to the bucket could lock every reader out."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run, stranger = SignedRun(), SignedRun(owner=STRANGER, versions=9)
    trust = ReaderTrust(run.pin)
    forged = stranger.plain.get(keys.manifest(8), limit=1 << 20)
    run.plain.put(keys.manifest(8), forged)
    trusted(run.plain, trust).get(keys.manifest(8), limit=1 << 20)
    run.plain.delete(keys.manifest(8))
    trusted(run.plain, trust)


def test_the_highest_version_is_kept_by_many_readers_at_once(tmp_path):
    def note(first):
        highest = HighestVersion(OWNER.public_key, "ab" * 16, "s3://b", folder=tmp_path / "v")
        for version in range(first, 40, 4):
            highest.note(version)

    threads = [threading.Thread(target=note, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert HighestVersion(OWNER.public_key, "ab" * 16, "s3://b", folder=tmp_path / "v").read() == 39


@pytest.mark.skipif(os.name != "posix", reason="files have owners and modes there")
def test_what_is_remembered_is_this_users(tmp_path):
    folder = tmp_path / "v"
    highest = HighestVersion(OWNER.public_key, "ab" * 16, "s3://b", folder=folder)
    highest.check(5, seen=highest.read(), allow_rollback=False)
    (file,) = [path for path in folder.iterdir() if path.name != ".lock"]
    assert file.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    file.chmod(0o666)
    with pytest.raises(InputError, match="other users may write"):
        highest.check(5, seen=highest.read(), allow_rollback=False)
    file.unlink()
    target = tmp_path / "elsewhere"
    target.write_text("0\n")
    file.symlink_to(target)
    with pytest.raises(InputError, match="is a link"):
        highest.check(5, seen=highest.read(), allow_rollback=False)
    file.unlink()
    folder.chmod(0o777)
    with pytest.raises(InputError, match="other users may write"):
        highest.check(5, seen=highest.read(), allow_rollback=False)


def test_a_lease_without_the_key_takes_no_name(run):
    mine = Lease(run.bucket("worker-w0"), "w0", "mine")
    mine.acquire(0)
    for number in (1, 2, 3):
        run.plain.put(keys.lease("w0", number), b"forged")
    mine.confirm(fresh=True)
    successor = Lease(run.bucket("worker-w0"), "w0", "successor")
    successor.acquire(1)
    assert successor.number == 4
    with pytest.raises(FencedError):
        mine.confirm(fresh=True)


def test_a_signed_process_starts_and_ends_beside_forgeries(run):
    """Its own forged heartbeat and lease stop it neither from starting nor from writing."""
    run.plain.put(keys.heartbeat("w0"), encode_json(heartbeat("w0", lease=10**9)))
    run.plain.put(keys.lease("w0", 0), b"forged")
    process = Process(run.bucket("worker-w0"), "w0", "worker", supervised=True)
    with process.registered():
        assert isinstance(process.heartbeat, HeartbeatWriter)
        assert process.lease.number == 1
        assert read_heartbeat(run.bucket(), "w0").nonce == process.nonce
    assert read_heartbeat(run.bucket(), "w0").ended


def step(process, version):
    return Step(
        process=process, at=1.0, version=version, groups=1, dropped=0, reward_mean=0.0, loss=0.0,
        grad_norm=0.0, k3=0.0, ratio_max=1.0, clipped=0.0, staleness=[], tokens=1, seconds=1.0,
    )  # fmt: skip


def test_forged_events_are_not_believed(run):
    """Neither unsigned ones in the trainer's stream, nor those of a worker that name the trainer,
    nor archives that the trainer did not store."""
    key = keys.events("trainer-00", 0)
    run.bucket("trainer").put(key, encode_lines([step("trainer", 1)]))
    data = encode_lines([step("trainer", 666)])
    for number, signed in enumerate((None, STRANGER, WORKER), 1):
        key = keys.events("trainer-00", number)
        role = "worker-w0" if signed is WORKER else "trainer"
        forged = data
        if signed is not None:
            forged = sign_bytes(data, run_id=run.run.id, key=key, signer=signed, role=role)
        run.plain.put(key, forged)
    run.plain.put(keys.events("strange", 0), data)
    own = encode_lines([numbered_event("w0", 2), step("w0", 667)])  # No worker makes a step.
    run.bucket("worker-w0").put(keys.events("w0-00", 0), data + own)
    archive = EventArchive(segments=[ArchivedSegment("trainer-77", 0, data)])
    run.plain.put(keys.archive(0), encode_packed(archive))
    for reader in (run.bucket(), run.bucket(pinned=False)):
        for events in (EventTail(reader).read(everything=True), RecentEvents(reader, 1e9).read()):
            assert sorted((e.process, e.version) for e in events) == [("trainer", 1), ("w0", 2)]
        window = RecentEvents(reader, 1e9)
        window.read()
        assert window.unreadable == {"trainer-00": 3, "strange": 1}
        problems = Watch(reader).poll().problems
        assert any(problem.startswith("trainer-00: 3 segments of events") for problem in problems)
        assert any(problem.startswith("strange: 1 segment of events") for problem in problems)


def test_an_evaluator_takes_no_forged_measurements(run):
    """Versions that were measured, by events in its name, are not measured again."""
    done = [
        Evaluated(process="evaluator", at=1.0, version=v, accuracy=0.0, problems=1, seconds=1.0)
        for v in (1, 2)
    ]
    run.bucket("evaluator").put(keys.events("evaluator-00", 0), encode_lines(done[:1]))
    run.plain.put(keys.events("evaluator-11", 0), encode_lines(done[1:]))
    run.bucket("worker-w0").put(keys.events("w0-11", 0), encode_lines(done[1:]))
    process = Process(run.bucket("evaluator"), "evaluator", "evaluator", supervised=True)
    assert evaluated_versions(process) == {1}


def test_a_supervisor_tells_how_others_ended(run):
    died = Life(process="w0", at=1.0, role="worker", what="died")
    run.bucket("supervisor").put(keys.events("supervisor-00", 0), encode_lines([died]))
    run.bucket("worker-w1").put(keys.events("w1-00", 0), encode_lines([died]))
    assert EventTail(run.bucket()).read(everything=True) == [died]


def test_an_object_is_as_large_as_its_limit_without_its_signature(run):
    run.bucket("trainer").put(keys.TRAINER, bytes(100))
    assert run.bucket().get(keys.TRAINER, limit=100) == bytes(100)
    with pytest.raises(CorruptError, match="the limit is 99"):
        run.bucket().get(keys.TRAINER, limit=99)


def test_an_unsigned_run_is_as_before():
    plain = open_bucket("memory://")
    bucket = SignedBucket(plain)
    data = encode_json(status(version=5))
    bucket.put(keys.TRAINER, data)
    assert plain.get(keys.TRAINER, limit=1 << 20) == data
    assert read_trainer(bucket).version == 5
    plain.put(keys.TRAINER, encode_json(msgspec.structs.replace(status(), version=4)))
    assert read_trainer(bucket).version == 4
