"""Checkpoints: what was saved comes back to the bit, and a damaged one is passed over."""

import pytest
import torch

from deltawire.errors import CorruptError
from deltawire.store import open_bucket
from deltawire.train import checkpoint
from deltawire.train.checkpoint import KEPT, load_checkpoint, save_checkpoint
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


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].numpy().tobytes() == tensor.contiguous().numpy().tobytes()


def kept(bucket):
    return sorted({int(key.split("/")[1]) for key in bucket.list(keys.CHECKPOINTS)})


def test_a_new_run_has_none(bucket):
    assert load_checkpoint(bucket, newest=100) is None


def test_round_trip(bucket):
    ledger = save(bucket, 7)
    commit, found = load_checkpoint(bucket, newest=7)
    same(found, state(7))
    assert (commit.version, commit.digest, commit.ledger) == (7, "ab" * 16, ledger)


def test_masters_come_back_from_the_bucket_to_the_bit(bucket, tiny):
    from deltawire.config import OptimizerConfig, TrainConfig

    masters = MasterWeights(tiny, TrainConfig(optimizer=OptimizerConfig(learning_rate=1e-3)))
    for parameter in tiny.parameters():
        parameter.grad = torch.ones_like(parameter)
    masters.step()
    save_checkpoint(bucket, masters.state(), Ledger(), version=1, digest="ab" * 16)
    _, found = load_checkpoint(bucket, newest=1)
    same(found, masters.state())


def test_only_the_newest_are_kept(bucket):
    for version in (2, 4, 6, 8, 10):
        save(bucket, version)
    assert kept(bucket) == [8, 10]
    assert len(bucket.list(keys.CHECKPOINTS)) == 2 * KEPT


def test_nothing_newer_than_the_committed_version_is_loaded(bucket):
    save(bucket, 4)
    save(bucket, 8)
    assert load_checkpoint(bucket, newest=8)[0].version == 8
    assert load_checkpoint(bucket, newest=7)[0].version == 4
    assert load_checkpoint(bucket, newest=3) is None


def flip(bucket, key):
    data = bytearray(bucket.get(key, limit=1 << 20))
    data[-5] ^= 1
    bucket.put(key, bytes(data))


STATE, COMMIT = keys.checkpoint_part(8, 0), keys.checkpoint_commit(8)

DAMAGE = {
    "state flipped": lambda bucket: flip(bucket, STATE),
    "state missing": lambda bucket: bucket.delete(STATE),
    "state cut": lambda bucket: bucket.put(STATE, bucket.get(STATE, limit=1 << 20)[:-1]),
    "state longer": lambda bucket: bucket.put(STATE, bucket.get(STATE, limit=1 << 20) + b"x"),
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
        COMMIT, bucket.get(COMMIT, limit=1 << 20).replace(b'"bytes":', b'"bytes":-')
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_falls_back_to_the_older(bucket, damage):
    save(bucket, 4)
    save(bucket, 8)
    DAMAGE[damage](bucket)
    commit, found = load_checkpoint(bucket, newest=10)
    assert commit.version == 4
    same(found, state(4))


def test_when_all_are_damaged_there_is_none(bucket):
    save(bucket, 8)
    flip(bucket, STATE)
    assert load_checkpoint(bucket, newest=10) is None
    with pytest.raises(CorruptError, match="damaged"):
        checkpoint._load(bucket, 8)


def test_a_state_that_hashes_right_but_is_no_safetensors_is_corrupt(bucket, monkeypatch):
    monkeypatch.setattr(checkpoint.safetensors.torch, "save", lambda _: b"not a state")
    save(bucket, 8)
    with pytest.raises(CorruptError):
        checkpoint._load(bucket, 8)
    assert load_checkpoint(bucket, newest=8) is None


@pytest.mark.parametrize(
    "name",
    ["99999999999/commit.json", "²/commit.json", "5/commit.json", "commit.json", "a/b/commit.json"],
)
def test_strange_keys_are_no_checkpoints(bucket, name):
    bucket.put(f"{keys.CHECKPOINTS}{name}", b"{}")
    for version in (4, 8):
        save(bucket, version)
    assert load_checkpoint(bucket, newest=8)[0].version == 8
    assert load_checkpoint(bucket, newest=7)[0].version == 4


def test_a_crash_before_the_commit_leaves_the_older(bucket):
    save(bucket, 4)
    bucket.put(STATE, b"half a state")
    assert load_checkpoint(bucket, newest=8)[0].version == 4
    save(bucket, 8)
    assert load_checkpoint(bucket, newest=8)[0].version == 8


def test_a_large_state_is_stored_in_parts(bucket, monkeypatch):
    """No object is larger than a part and one tensor: stores take no more than 5 GiB in one."""
    monkeypatch.setattr(checkpoint, "PART_BYTES", 60)
    save(bucket, 8)
    commit, found = load_checkpoint(bucket, newest=8)
    same(found, state(8))
    assert len(commit.parts) == 3
    bucket.delete(keys.checkpoint_part(8, 2))
    assert load_checkpoint(bucket, newest=8) is None


def test_an_empty_state_comes_back(bucket):
    save_checkpoint(bucket, {}, Ledger(), version=3, digest="ab" * 16)
    assert load_checkpoint(bucket, newest=3)[1] == {}
