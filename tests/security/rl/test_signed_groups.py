"""Groups of a signed run are their worker's, and nobody else's."""

from dataclasses import replace

import pytest
from signed_run import STRANGER, SignedRun

from deltawire.errors import CorruptError, SignatureError
from deltawire.rl.control.rollout_buffer import QUARANTINE_AFTER, RolloutBuffer, read_consumed
from deltawire.rl.control.rollout_reader import read_group
from deltawire.rl.control.staleness import Strict
from deltawire.rl.rollout.uploader import Uploader
from deltawire.runtime.process import Process
from deltawire.train.checkpoint import load_checkpoint, save_checkpoint
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata, Ledger
from deltawire.wire.roles import sign_bytes
from deltawire.wire.rollouts import encode_group


@pytest.fixture
def run():
    return SignedRun()


def store(run, worker, sequence, group):
    run.bucket(f"worker-{worker}").create(keys.rollout(worker, sequence), encode_group(group))


def test_a_forged_group_is_passed_over_and_nobody_is_blamed(run, make_group):
    forged = encode_group(make_group("w0", [0]))
    for sequence in range(2 * QUARANTINE_AFTER):
        run.plain.create(keys.rollout("w0", sequence), forged)
    key = keys.rollout("w0", 2 * QUARANTINE_AFTER)
    theirs = sign_bytes(forged, run_id=run.run.id, key=key, signer=STRANGER, role="worker-w0")
    run.plain.create(key, theirs)
    last = 2 * QUARANTINE_AFTER + 1
    store(run, "w0", last, make_group("w0", [0]))
    buffer = RolloutBuffer(run.bucket(), Ledger(), limit=64)
    assert buffer.poll(["w0"]) == last + 1
    assert buffer.quarantined == {}
    assert buffer.damaged == []
    (incident,) = buffer.incidents.listed()
    assert (incident.worker, incident.kind, incident.count) == ("w0", "unsigned", last)
    assert not incident.quarantined
    batch = buffer.next_batch(Strict(1, 0), version=0)
    assert [one.sequence for one in batch.taken] == [last]
    assert {drop.cause for drop in batch.drops} == {"unsigned"}
    assert {drop.worker for drop in batch.drops} == {"w0"}


def test_a_group_of_another_worker_is_refused(run, make_group):
    """Also one that a granted worker signed for another's name."""
    data, key = encode_group(make_group("w0", [0])), keys.rollout("w0", 0)
    with pytest.raises(Exception, match="only the worker-w0 may write"):
        run.bucket("worker-w1").create(key, data)
    moved = SignedRun()
    store(moved, "w1", 0, make_group("w0", [0]))
    run.plain.put(key, moved.plain.get(keys.rollout("w1", 0), limit=1 << 20))
    with pytest.raises(SignatureError, match="signed in the role 'worker-w1'"):
        read_group(run.bucket(), "w0", 0)


def test_damage_that_a_worker_signs_is_its_own(run):
    for sequence in range(QUARANTINE_AFTER):
        run.bucket("worker-w0").create(keys.rollout("w0", sequence), b"no group")
    buffer = RolloutBuffer(run.bucket(), Ledger(), limit=64)
    buffer.poll(["w0"])
    assert buffer.quarantined.keys() == {"w0"}
    assert {one.kind for one in buffer.incidents.listed()} == {"damaged"}


def test_consumed_groups_are_read_back_by_their_hash(run, make_group):
    store(run, "w0", 0, make_group("w0", [0]))
    _, digest = read_group(run.bucket(), "w0", 0)
    metadata = CommitMetadata(step=1, consumed=[("w0", 0)], hashes=[digest])
    assert len(read_consumed(run.bucket(pinned=False), metadata)) == 1
    run.plain.put(keys.rollout("w0", 0), encode_group(make_group("w0", [0])))
    with pytest.raises(SignatureError):
        read_consumed(run.bucket(), metadata)


def test_a_worker_stores_its_groups_around_forgeries(run, make_group):
    for sequence in (0, 2):
        run.plain.create(keys.rollout("w0", sequence), b"forged")
    process = Process(run.bucket("worker-w0"), "w0", "worker", supervised=True)
    with process.registered():
        uploader = Uploader(process.bucket, "w0", 0, process)
        uploader.start()
        for nonce in ("a", "b"):
            uploader.submit(replace(make_group("w0", [0]), nonce=nonce))
        uploader.close()
        uploader.raise_error()
    assert uploader.stored == 4
    for sequence in (1, 3):
        assert read_group(run.bucket(), "w0", sequence) is not None


def test_a_forged_checkpoint_is_not_resumed_from(run):
    import torch

    trainer = run.bucket("trainer")
    save_checkpoint(trainer, {"a": torch.ones(2)}, Ledger(), version=1, digest="0" * 32)
    stranger = SignedRun(owner=STRANGER)
    theirs = stranger.bucket("trainer", signer=STRANGER)
    save_checkpoint(theirs, {"a": torch.zeros(2)}, Ledger(), version=2, digest="0" * 32)
    for key in stranger.plain.list(keys.CHECKPOINTS):
        run.plain.put(key, stranger.plain.get(key, limit=1 << 20))
    save_checkpoint(run.plain, {"a": torch.zeros(2)}, Ledger(), version=3, digest="0" * 32, keep=0)
    state = {"a": torch.zeros(2)}
    commit = load_checkpoint(run.bucket("trainer"), state, newest=9)
    assert commit.version == 1
    assert state["a"].tolist() == [1, 1]
    with pytest.raises(CorruptError):
        run.bucket().get(keys.checkpoint_commit(3), limit=1 << 20)
