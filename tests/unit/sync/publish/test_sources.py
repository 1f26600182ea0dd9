"""Opening runs and publishing mappings, tied arrays and safetensors files."""

import json

import numpy as np
import pytest

from deltawire.errors import CorruptError, InputError
from deltawire.store import open_bucket
from deltawire.sync import (
    CheckpointPublisher,
    Subscriber,
    find_run,
    load_mirror,
    open_publisher,
    read_run,
    read_safetensors,
)
from deltawire.sync.publish.safetensors_files import safetensors_table
from deltawire.sync.publish.sources import continue_publisher, table_of
from deltawire.testing.tiny import same_bits
from deltawire.wire import keys
from deltawire.wire.signing import Ed25519Signer


def model(step=0):
    rng = np.random.default_rng(step)
    return {"b": rng.random((3, 4), np.float32), "a": rng.integers(0, 9, 5).astype(np.int64)}


def test_a_run_is_opened_and_continued():
    bucket = open_bucket("memory://")
    publisher = open_publisher(bucket, model(0), name="mine", compaction_strides=())
    assert (publisher.version, publisher.epoch) == (0, 0)
    publisher.publish(model(1))
    publisher.close()
    again = open_publisher(bucket, model(5), compaction_strides=())
    assert (again.version, again.epoch) == (1, 1)
    assert again.publish(model(2)) == 2
    again.close()
    held = load_mirror(bucket, again.run).tensors
    for name, array in model(2).items():
        assert held[name].tobytes() == array.tobytes()
    with pytest.raises(InputError, match="another model"):
        open_publisher(bucket, {"b": model()["b"]})


def test_tied_arrays_once():
    array = np.zeros((4, 4), np.float32)
    tensors = {"z": array, "a": array, "view": array[:2], "flat": array.reshape(-1), "c": array + 0}
    specs, aliases = table_of(tensors)
    assert [spec.name for spec in specs] == ["c", "flat", "view", "z"]
    assert aliases == {"a": "z"}
    assert table_of(tensors, stored={"a"})[1] == {"z": "a"}
    # A transposed view begins where its tensor does, and of a square one has its shape.
    assert table_of({"a": array, "t": array.T})[1] == {}
    empty = np.zeros((0, 3))
    assert table_of({"x": empty, "y": empty})[1] == {}


def test_signed_from_end_to_end():
    signer, other = Ed25519Signer.generate(), Ed25519Signer(b"x" * 32)
    bucket = open_bucket("memory://")
    publisher = open_publisher(
        bucket, model(0), signer=signer, compaction_strides=(2,), anchor_every=0
    )
    for step in range(1, 5):
        publisher.publish(model(step))
    publisher.close()
    assert publisher.compaction.error is None
    run = read_run(bucket, public_key=signer.public_key)
    subscriber = Subscriber(bucket, run, load_mirror(bucket, run, at=0))
    assert subscriber.advance()
    with pytest.raises(CorruptError, match="another key"):
        find_run(bucket, public_key=other.public_key)
    for wrong, error in ((None, InputError), (other, CorruptError)):
        with pytest.raises(error):
            open_publisher(bucket, model(0), signer=wrong, compaction_strides=())


@pytest.mark.parametrize("forger", [None, Ed25519Signer(b"x" * 32)], ids=["unsigned", "foreign"])
@pytest.mark.parametrize("kind", ["run", "manifest", "fold"])
def test_objects_of_another_writer_are_refused(forger, kind):
    """An attacker with write access replaces one object by a well-formed one."""
    import msgspec

    from deltawire.sync import read_manifest
    from deltawire.sync.chain.objects import read_compacted_delta
    from deltawire.wire.manifest import encode_compacted, encode_manifest
    from deltawire.wire.run import encode_run

    bucket, signer = open_bucket("memory://"), Ed25519Signer.generate()
    rng = np.random.default_rng(0)
    big = [{"w": rng.integers(0, 9, 4000).astype(np.int64)} for _ in range(1)]
    for _ in range(4):
        big.append({"w": big[-1]["w"].copy()})
        big[-1]["w"][:40] += 1
    publisher = open_publisher(
        bucket, big[0], signer=signer, compaction_strides=(2, 4), anchor_every=0
    )
    for tensors in big[1:]:
        publisher.publish(tensors)
    publisher.close()
    run = publisher.run
    if kind == "run":
        bucket.put(keys.RUN, encode_run(run, signer=forger))
    elif kind == "manifest":
        value = msgspec.structs.replace(read_manifest(bucket, run, 4), metadata={"mine": 1})
        bucket.put(keys.manifest(4), encode_manifest(value, signer=forger))
    else:
        assert (0, 4) in publisher.compaction.made
        bucket.put(
            keys.compacted(0, 4),
            encode_compacted(read_compacted_delta(bucket, run, 0, 4), signer=forger),
        )
    if kind == "fold":
        with pytest.raises(CorruptError, match="sign"):
            read_compacted_delta(bucket, run, 0, 4)
        held = load_mirror(bucket, run, at=4)
        assert same_bits(held.tensors, {"w": big[4]["w"].view("u8")})
        return
    with pytest.raises(CorruptError, match="sign"):
        load_mirror(bucket, find_run(bucket, public_key=signer.public_key), at=4)


def write_safetensors(path, tensors, pad=0):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, array) in tensors.items():
        raw = array.tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode() + b" " * pad
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_a_directory_of_safetensors(tmp_path):
    first = {
        "x": ("BF16", np.arange(6, dtype=np.uint16).reshape(2, 3)),
        "e": ("F32", np.zeros((0, 2), np.uint32)),
    }
    second = {
        "odd": ("U8", np.arange(3, dtype=np.uint8)),
        "y": ("F32", np.arange(4, dtype=np.uint32)),
    }
    write_safetensors(tmp_path / "1.safetensors", first)
    write_safetensors(tmp_path / "2.safetensors", second, pad=1)
    found = read_safetensors(tmp_path)
    for name, (_, array) in {**first, **second}.items():
        assert found[name].shape == array.shape
        assert np.array_equal(found[name], array)
    table = {spec.name: spec.dtype for spec in safetensors_table(tmp_path)}
    assert table == {"x": "BF16", "e": "F32", "odd": "U8", "y": "F32"}
    bucket = open_bucket("memory://")
    specs = safetensors_table(tmp_path)
    publisher = open_publisher(bucket, found, specs=specs, compaction_strides=())
    assert publisher.publish(found) == 1
    publisher.close()
    assert find_run(bucket).tensors == specs


def test_it_equals_the_libraries_own(tmp_path):
    from safetensors.numpy import save_file

    tensors = {"a": np.random.default_rng(1).random((5, 3), np.float32), "b": np.arange(7)}
    save_file(tensors, tmp_path / "m.safetensors")
    found = read_safetensors(tmp_path)
    for name, array in tensors.items():
        assert found[name].tobytes() == array.tobytes()
        assert found[name].shape == array.shape


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:7],
        lambda data: data[:40],
        lambda data: data[:-1],
        lambda data: (1 << 62).to_bytes(8, "little") + data[8:],
        lambda data: data.replace(b"BF16", b"BF17"),
        lambda data: data.replace(b"[0, 12]", b"[0, 11]"),
        lambda data: data.replace(b"[0, 12]", b"[-2, 9]"),
        lambda data: data.replace(b'"shape"', b'"shap"'),
        lambda data: b"\x05\0\0\0\0\0\0\0[1,2]",
        lambda data: (20_000).to_bytes(8, "little") + b"[" * 20_000,
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, damage):
    path = tmp_path / "m.safetensors"
    write_safetensors(path, {"x": ("BF16", np.zeros((2, 3), np.uint16))})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError, match=r"m\.safetensors"):
        read_safetensors(tmp_path)


def test_no_files_and_a_name_twice(tmp_path):
    with pytest.raises(InputError, match="no safetensors"):
        read_safetensors(tmp_path)
    for name in ("1", "2"):
        write_safetensors(tmp_path / f"{name}.safetensors", {"x": ("U8", np.zeros(2, np.uint8))})
    with pytest.raises(InputError, match="'x' twice"):
        read_safetensors(tmp_path)


def test_a_location_in_place_of_a_bucket_says_what_to_pass(tmp_path):
    for call in (
        lambda: find_run("runs/x"),
        lambda: load_mirror("runs/x", None),
        lambda: CheckpointPublisher(tmp_path / "x"),
    ):
        with pytest.raises(InputError, match=r"got the location.*pass open_bucket\("):
            call()
    with pytest.raises(InputError, match="expected a bucket, got a int"):
        open_publisher(3, {"a": np.zeros(3, np.float32)})
    open_publisher(tmp_path / "run", {"a": np.zeros(3, np.float32)}).close()
    assert find_run(open_bucket(tmp_path / "run")).tensors[0].name == "a"


def test_a_new_folder_is_made_only_if_it_is_asked_for(tmp_path):
    with pytest.raises(InputError, match=r"create=True\) of Python makes a new folder"):
        open_bucket(str(tmp_path / "new"))
    open_bucket(str(tmp_path / "new"), create=True)
    assert find_run(open_bucket(str(tmp_path / "new"))) is None


def test_a_module_is_no_mapping_of_tensors(tmp_path):
    class Module:
        def named_parameters(self):
            return iter(())

    publisher = open_publisher(tmp_path / "run", {"a": np.zeros(3, np.float32)})
    with pytest.raises(InputError, match=r"is a module.*pass deltawire\.tensors_of\(model\)"):
        publisher.publish(Module())
    with pytest.raises(InputError, match="tensors is a list"):
        publisher.publish([np.zeros(3, np.float32)])
    assert publisher.publish({"a": np.ones(3, np.float32)}) == 1
    publisher.close()


def test_a_publisher_knows_whether_weights_are_its_newest_version(tmp_path):
    first = {"a": np.zeros(3, np.float32), "b": np.ones(2, np.float32)}
    publisher = open_publisher(tmp_path / "run", first)
    assert publisher.holds(first)
    publisher.publish({**first, "a": np.ones(3, np.float32)})
    assert not publisher.holds(first)
    assert publisher.holds({"b": first["b"]}), "some of them"
    with pytest.raises(InputError, match="no tensor 'c'"):
        publisher.holds({"c": first["a"]})
    publisher.close()
    again = continue_publisher(open_bucket(tmp_path / "run"))
    assert (again.version, again.epoch) == (1, 1)
    assert again.holds({"a": np.ones(3, np.float32)})
    again.close()
    with pytest.raises(InputError, match="there is no run here"):
        continue_publisher(open_bucket("memory://"))
