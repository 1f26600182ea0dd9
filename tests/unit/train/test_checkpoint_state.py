"""Checkpoints: what was saved comes back to the bit, and a damaged one is passed over."""

import threading

import msgspec
import pytest
import torch

from deltawire.errors import CorruptError, InputError
from deltawire.store import open_bucket
from deltawire.train import checkpoint, checkpoint_storage
from deltawire.train.checkpoint import (
    KEPT,
    CheckpointWriter,
    load_checkpoint,
    save_checkpoint,
)
from deltawire.train.masters import MasterWeights
from deltawire.wire import keys
from deltawire.wire.ledger import Ledger


@pytest.fixture(params=["memory", "folder"])
def bucket(request, tmp_path):
    location = "memory://" if request.param == "memory" else str(tmp_path / "bucket")
    return open_bucket(location, create=True)


def state(version):
    generator = torch.Generator().manual_seed(version)
    return {
        "steps": torch.tensor(version),
        "master/w": torch.randn(5, 3, generator=generator),
        "master/turned": torch.randn(5, 3, generator=generator).T,
        "adam/step/w": torch.tensor(float(version)),
        "odd": torch.tensor([float("nan"), float("-inf"), -0.0]),
    }


def save(bucket, version):
    ledger = Ledger()
    for sequence in (*range(version), version + 3):
        ledger.settle("worker-0", sequence)
    save_checkpoint(bucket, state(version), ledger, version=version, digest="ab" * 16)
    return ledger


def blank():
    return {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}


def load(bucket, newest):
    """The commit that is loaded, and the state; None without one."""
    into = blank()
    commit = load_checkpoint(bucket, into, newest=newest)
    return commit and (commit, into)


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].numpy().tobytes() == tensor.contiguous().numpy().tobytes()


def kept(bucket):
    return sorted({int(key.split("/")[1]) for key in bucket.list(keys.CHECKPOINTS)})


def test_a_new_run_has_none(bucket):
    assert load(bucket, 100) is None


def test_round_trip(bucket):
    ledger = save(bucket, 7)
    commit, found = load(bucket, 7)
    same(found, state(7))
    assert (commit.version, commit.digest, commit.ledger) == (7, "ab" * 16, ledger)


def test_masters_come_back_from_the_bucket_to_the_bit(bucket, tiny):
    from deltawire.config import OptimizerConfig, TrainConfig

    masters = MasterWeights(tiny, TrainConfig(optimizer=OptimizerConfig(learning_rate=1e-3)))
    for parameter in tiny.parameters():
        parameter.grad = torch.ones_like(parameter)
    masters.step()
    save_checkpoint(bucket, masters.state(), Ledger(), version=1, digest="ab" * 16)
    found = {name: torch.zeros_like(tensor) for name, tensor in masters.state().items()}
    load_checkpoint(bucket, found, newest=1)
    same(found, masters.state())


def test_only_the_newest_are_kept(bucket):
    for version in (2, 4, 6, 8, 10):
        save(bucket, version)
    assert kept(bucket) == [8, 10]
    assert len(bucket.list(keys.CHECKPOINTS)) == 2 * KEPT


def test_nothing_newer_than_the_committed_version_is_loaded(bucket):
    save(bucket, 4)
    save(bucket, 8)
    assert load(bucket, 8)[0].version == 8
    assert load(bucket, 7)[0].version == 4
    assert load(bucket, 3) is None


def flip(bucket, key):
    data = bytearray(bucket.get(key, limit=1 << 20))
    data[-5] ^= 1
    bucket.put(key, bytes(data))


STATE, COMMIT = keys.checkpoint_part(8, 0), keys.checkpoint_commit(8)

DAMAGE = {
    "state flipped": lambda bucket: flip(bucket, STATE),
    "state missing": lambda bucket: bucket.delete(STATE),
    "state cut": lambda bucket: bucket.put(STATE, bucket.get(STATE, limit=1 << 20)[:-1]),
    "state empty": lambda bucket: bucket.put(STATE, b""),
    "commit empty": lambda bucket: bucket.put(COMMIT, b""),
    "commit no json": lambda bucket: bucket.put(COMMIT, b'{"format":1,'),
    "commit no text": lambda bucket: bucket.put(COMMIT, b"\xff\xfe"),
    "commit of another version": lambda bucket: bucket.put(
        COMMIT, bucket.get(keys.checkpoint_commit(4), limit=1 << 20)
    ),
    "commit of another format": lambda bucket: bucket.put(
        COMMIT, bucket.get(COMMIT, limit=1 << 20).replace(b'"format":1', b'"format":2')
    ),
    "commit lies about the size": lambda bucket: bucket.put(
        COMMIT, bucket.get(COMMIT, limit=1 << 20).replace(b'"sizes":[', b'"sizes":[9')
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_falls_back_to_the_older(bucket, damage):
    save(bucket, 4)
    save(bucket, 8)
    DAMAGE[damage](bucket)
    commit, found = load(bucket, 10)
    assert commit.version == 4
    same(found, state(4))


def test_when_all_are_damaged_there_is_none(bucket):
    save(bucket, 8)
    flip(bucket, STATE)
    assert load(bucket, 10) is None
    with pytest.raises(CorruptError, match="damaged"):
        checkpoint._load(bucket, blank(), 8, run="")


@pytest.mark.parametrize("lie", ["shape", "dtype", "box", "hole", "name"])
def test_a_table_that_does_not_fit_is_passed_over(bucket, lie):
    """A commit is sealed by nothing: whatever it says, no memory is read or written outside."""
    save(bucket, 4)
    save(bucket, 8)
    commit = msgspec.json.decode(bucket.get(COMMIT, limit=1 << 20))
    entry = commit["tensors"]["master/w"]
    if lie == "shape":
        entry["shape"] = [3, 5]
    elif lie == "dtype":
        entry["dtype"] = "bfloat16"
    elif lie == "box":
        entry["chunks"][0]["offsets"] = [1, 0]
    elif lie == "hole":
        entry["chunks"] = []
    else:
        commit["tensors"]["master/v"] = commit["tensors"].pop("master/w")
    bucket.put(COMMIT, msgspec.json.encode(commit))
    assert load(bucket, 8)[0].version == 4


def test_a_checkpoint_of_another_run_is_refused(bucket):
    save_checkpoint(bucket, state(8), Ledger(), version=8, digest="ab" * 16, run="theirs")
    with pytest.raises(InputError, match="another run") as raised:
        load_checkpoint(bucket, blank(), newest=8, run="ours")
    assert "delete" in raised.value.hint
    assert load_checkpoint(bucket, blank(), newest=8, run="theirs").version == 8


def test_a_writer_saves_next_to_training(bucket):
    """A save holds the state as it was, whatever happens to it afterwards."""
    gate, live = threading.Event(), state(4)
    expected = {name: tensor.clone() for name, tensor in live.items()}
    writer = CheckpointWriter(bucket, None, confirm=lambda: gate.wait(60))
    try:
        writer.save(live, Ledger(), version=4, digest="ab" * 16)
        for tensor in live.values():
            tensor.zero_()
        assert load(bucket, 9) is None
        gate.set()
        writer.flush()
    finally:
        gate.set()
        writer.close()
    same(load(bucket, 9)[1], expected)


def test_an_error_of_a_save_is_raised_by_the_next(bucket):
    def forbid():
        raise InputError("another trainer has the lease")

    writer = CheckpointWriter(bucket, None, confirm=forbid)
    writer.save(state(4), Ledger(), version=4, digest="ab" * 16)
    with pytest.raises(InputError, match="lease"):
        writer.close()
    assert load(bucket, 9) is None


@pytest.mark.parametrize(
    "name",
    ["99999999999/commit.json", "²/commit.json", "5/commit.json", "commit.json", "a/b/commit.json"],
)
def test_strange_keys_are_no_checkpoints(bucket, name):
    bucket.put(f"{keys.CHECKPOINTS}{name}", b"{}")
    for version in (4, 8):
        save(bucket, version)
    assert load(bucket, 8)[0].version == 8
    assert load(bucket, 7)[0].version == 4


def test_a_crash_before_the_commit_leaves_the_older(bucket):
    save(bucket, 4)
    bucket.put(STATE, b"half a state")
    assert load(bucket, 8)[0].version == 4
    save(bucket, 8)
    assert load(bucket, 8)[0].version == 8


def test_a_large_state_is_stored_in_parts(bucket, monkeypatch):
    """No object is larger than a part and one tensor: stores take no more than 5 GiB in one."""
    monkeypatch.setattr(checkpoint_storage, "PART_BYTES", 60)
    save(bucket, 8)
    commit, found = load(bucket, 8)
    same(found, state(8))
    assert {one.part for entry in commit.tensors.values() for one in entry.chunks} == {0, 1, 2}
    bucket.delete(keys.checkpoint_part(8, 2))
    assert load(bucket, 8) is None


def test_an_empty_state_comes_back(bucket):
    save_checkpoint(bucket, {}, Ledger(), version=3, digest="ab" * 16)
    assert load_checkpoint(bucket, {}, newest=3).version == 3
