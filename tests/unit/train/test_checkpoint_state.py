"""Checkpoints: what was saved comes back to the bit, and a damaged one is passed over."""

import base64
import threading
import tracemalloc
import zlib
from random import Random

import msgspec
import pytest
import torch

from deltawire.errors import CorruptError, InputError
from deltawire.store import open_bucket
from deltawire.train import checkpoint, checkpoint_commit, checkpoint_storage
from deltawire.train.checkpoint import CheckpointWriter, load_checkpoint, save_checkpoint
from deltawire.train.checkpoint_commit import MAX_COMMIT_BYTES, Commit, StoredShard, TensorEntry
from deltawire.train.checkpoint_folders import KEPT
from deltawire.train.masters import MasterWeights
from deltawire.wire import keys
from deltawire.wire.ledger import Ledger
from deltawire.wire.objects import encode_json


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


def pack(bucket):
    """Packs the newest commit, as that of a fork."""
    commit = Commit.decode(bucket.get(COMMIT, limit=1 << 20), run="", key=COMMIT)
    bucket.put(COMMIT, commit.encode(packed=True))


def edit_table(bucket, edit):
    """Changes the bytes of the newest commit's table."""
    pack(bucket)
    raw = msgspec.json.decode(bucket.get(COMMIT, limit=1 << 20))
    raw["table"] = edit(base64.b64decode(raw["table"]))
    bucket.put(COMMIT, msgspec.json.encode(raw))


def edit_hashes(bucket, edit):
    def packed(table):
        rows, hashes = msgspec.msgpack.decode(zlib.decompress(table))
        return zlib.compress(msgspec.msgpack.encode((rows, edit(hashes))))

    edit_table(bucket, packed)


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
    "commit without a table": lambda bucket: edit_table(bucket, lambda _: b""),
    "table cut": lambda bucket: edit_table(bucket, lambda table: table[:-1]),
    "table flipped": lambda bucket: edit_table(
        bucket, lambda table: table[:9] + bytes([table[9] ^ 1]) + table[10:]
    ),
    "table of other types": lambda bucket: edit_table(
        bucket, lambda _: zlib.compress(msgspec.msgpack.encode(({"w": ["float32"]}, b"")))
    ),
    "table with a hash too few": lambda bucket: edit_hashes(bucket, lambda all_: all_[:-32]),
    "table with a hash too many": lambda bucket: edit_hashes(bucket, lambda all_: all_ + bytes(32)),
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


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("lie", ["shape", "dtype", "box", "size", "hole", "name"])
def test_a_table_that_does_not_fit_is_passed_over(bucket, lie, packed):
    """A commit is sealed by nothing: whatever it says, no memory is read or written outside."""
    save(bucket, 4)
    save(bucket, 8)
    commit = Commit.decode(bucket.get(COMMIT, limit=1 << 20), run="", key=COMMIT)
    tensors = msgspec.to_builtins(commit.tensors)
    entry = tensors["master/w"]
    if lie == "shape":
        entry["shape"] = [3, 5]
    elif lie == "dtype":
        entry["dtype"] = "bfloat16"
    elif lie == "box":
        entry["chunks"][0]["offsets"] = [1, 0]
    elif lie == "size":
        entry["chunks"][0]["sizes"] = [95, 3]
    elif lie == "hole":
        entry["chunks"] = []
    else:
        tensors["master/v"] = tensors.pop("master/w")
    lying = msgspec.structs.replace(
        commit, tensors=msgspec.convert(tensors, dict[str, TensorEntry])
    )
    bucket.put(COMMIT, lying.encode(packed=packed))
    assert load(bucket, 8)[0].version == 4


def test_a_packed_table_is_read(bucket):
    """As FORMAT-PROTOCOL.md describes it."""
    save(bucket, 8)
    commit = Commit.decode(bucket.get(COMMIT, limit=1 << 20), run="", key=COMMIT)
    pack(bucket)
    raw = msgspec.json.decode(bucket.get(COMMIT, limit=1 << 20))
    assert raw["tensors"] == {}
    rows, hashes = msgspec.msgpack.decode(zlib.decompress(base64.b64decode(raw["table"])))
    chunks = [(name, chunk) for name, entry in commit.tensors.items() for chunk in entry.chunks]
    assert {name: [*row[:2]] for name, row in rows.items()} == {
        name: [entry.dtype, entry.shape] for name, entry in commit.tensors.items()
    }
    assert [shard for row in rows.values() for shard in row[2]] == [
        [chunk.offsets, chunk.sizes, chunk.part, chunk.start] for _, chunk in chunks
    ]
    assert hashes.hex() == "".join(chunk.hash for _, chunk in chunks)
    assert MAX_COMMIT_BYTES == 2**28
    found, tensors = load(bucket, 8)
    assert found == commit
    same(tensors, state(8))


class CommitOf01(msgspec.Struct):
    """The members of a commit that release 0.1 reads."""

    format: int
    version: int
    tensors: dict[str, TensorEntry]


def test_the_previous_release_reads_a_trainers_state(bucket):
    """So that a trainer can go back to it."""
    save(bucket, 8)
    old = msgspec.json.decode(bucket.get(COMMIT, limit=1 << 20), type=CommitOf01)
    assert (old.format, old.version) == (1, 8)
    assert old.tensors.keys() == state(8).keys()


def test_a_table_is_not_unpacked_beyond_the_limit(bucket, monkeypatch):
    """Some kilobytes unpack to gigabytes: no more than the limit is ever held."""
    save(bucket, 4)
    save(bucket, 8)
    edit_table(bucket, lambda _: zlib.compress(bytes(64 << 20)))
    monkeypatch.setattr(checkpoint_commit, "MAX_COMMIT_BYTES", 1 << 20)
    tracemalloc.start()
    try:
        assert load(bucket, 8)[0].version == 4
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_the_commit_of_a_real_models_state_is_small():
    """With the tensors of SmolLM2-135M: as JSON the table has 253 kB, most of a fork's 100 kB."""
    parts = [
        *(f"self_attn.{one}_proj" for one in "qkvo"),
        *(f"mlp.{one}_proj" for one in ("gate", "up", "down")),
        "input_layernorm",
        "post_attention_layernorm",
    ]
    names = [f"model.layers.{layer}.{part}.weight" for layer in range(30) for part in parts]
    names += ["model.embed_tokens.weight", "model.norm.weight"]
    random = Random(0)
    tensors = {}
    for number, kind in enumerate(("master", "adam/step", "adam/exp_avg", "adam/exp_avg_sq")):
        for place, name in enumerate(names):
            shape = [] if number == 1 else [1536, 576]
            hashed = "ab" * 32 if number == 1 else random.randbytes(32).hex()
            shard = StoredShard([0] * len(shape), shape, number, place * 3538944, hashed)
            tensors[f"{kind}/{name}"] = TensorEntry("float32", shape, [shard])
    commit = Commit(version=100, digest="ab" * 16, tensors=tensors, ledger=Ledger())
    assert len(encode_json(commit)) > 250_000
    assert len(data := commit.encode(packed=True)) < 48_000
    assert Commit.decode(data, run="", key="") == commit


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
