"""Publishing and pulling directories: byte for byte, with clear errors, over interruptions."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from checkpoint_dirs import SHAPES, contents, files_in, write_directory
from key_meter import KeyMeter

from deltawire.errors import CorruptError, InputError, RetryError
from deltawire.store import Bucket, MeteredBucket, RetryingBucket, open_bare_bucket
from deltawire.sync import (
    Checkout,
    CheckpointPublisher,
    CheckpointWatcher,
    load_mirror,
    read_manifest,
    read_run,
)
from deltawire.sync.chain.payloads import read_blobs
from deltawire.sync.huggingface.checkpoint_dir import INDEX, read_checkpoint
from deltawire.sync.huggingface.safetensors_layout import (
    SafetensorsLayout,
    WeightFile,
    encode_layout,
    plan_files,
)
from deltawire.sync.maintain.fsck import check_run
from deltawire.sync.publish.safetensors_files import CheckpointDirError
from deltawire.testing.faulty import FaultyBucket, disk_full
from deltawire.wire import keys
from deltawire.wire.run import Run


def publish(bucket: Bucket, *paths: Path, **options: Any) -> list[tuple[int, bool]]:
    with CheckpointPublisher(bucket, **options) as series:
        return [(o.version, o.published) for o in map(series.publish, paths)]


def pull(bucket: Bucket, path: Path, version: int) -> None:
    run = read_run(bucket)
    with Checkout(bucket, run, path) as checkout:
        checkout.bring_to(version)


@pytest.mark.parametrize("sharded", [False, True])
def test_directories_come_out_byte_for_byte(tmp_path: Path, sharded: bool) -> None:
    bucket = open_bare_bucket("memory://")
    paths = [write_directory(tmp_path / f"c-{n}", n, sharded=sharded) for n in range(4)]
    assert publish(bucket, *paths) == [(0, True), (1, True), (2, True), (3, True)]
    for version in (0, 1, 3, 2):  # forward, over two, and back
        pull(bucket, tmp_path / "out", version)
        assert files_in(tmp_path / "out") == files_in(paths[version])
    assert check_run(bucket).faults == []


def test_one_object_moves_back_and_forth(tmp_path: Path) -> None:
    """A version whose files were deleted meanwhile is built again, as a search asks for it."""
    bucket = open_bare_bucket("memory://")
    paths = [write_directory(tmp_path / f"c-{n}", n) for n in range(5)]
    publish(bucket, *paths)
    with Checkout(bucket, read_run(bucket), tmp_path / "out") as checkout:
        for version in (3, 2, 1, 2, 4, 1, 2, 2, 0, 3):
            checkout.bring_to(version)
            assert files_in(tmp_path / "out") == files_in(paths[version])


def test_files_and_sharding_that_change_belong_to_their_version(tmp_path: Path) -> None:
    bucket = open_bare_bucket("memory://")
    first = write_directory(tmp_path / "c-1", 1, config='{"a": 1}')
    second = write_directory(tmp_path / "c-2", 1, sharded=True, config='{"a": 2}')
    assert publish(bucket, first, second) == [(0, True), (1, True)]
    for version, path in enumerate((first, second)):
        pull(bucket, tmp_path / "out", version)
        assert files_in(tmp_path / "out") == files_in(path)
    run = read_run(bucket)
    manifest = read_manifest(bucket, run, 1)
    assert manifest is not None
    assert manifest.delta is not None
    assert manifest.delta.bytes == 0  # The weights are the same: nothing of them was sent.
    assert check_run(bucket).unreferenced == 0


def test_versions_are_recognized_by_content(tmp_path: Path) -> None:
    bucket = open_bare_bucket("memory://")
    paths = [write_directory(tmp_path / f"c-{n}", n) for n in range(3)]
    again = write_directory(tmp_path / "c-3", 0)  # the trainer went back
    assert publish(bucket, *paths[:2]) == [(0, True), (1, True)]
    assert publish(bucket, *paths, again) == [(0, False), (1, False), (2, True), (0, False)]
    back: dict[str, Any] = {"backwards": True}
    assert publish(bucket, *paths, again, **back) == [
        (0, False),
        (1, False),
        (2, False),
        (3, True),
    ]
    assert publish(bucket, *paths, again, **back) == [(n, False) for n in range(4)]


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    bucket = open_bare_bucket("memory://")
    paths = [write_directory(tmp_path / f"c-{n}", n) for n in range(2)]
    assert publish(bucket, *paths, dry_run=True) == [(0, False), (1, False)]
    assert bucket.list("") == []


def change_shape(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "model.norm.weight", ((11, 3), "F32"))
    write_directory(path, 1)


def change_dtype(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "model.embed.weight", ((64, 48), "BOOL"))
    write_directory(path, 1)


def lose_tensor(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(SHAPES, "nothing")
    write_directory(path, 1)


def add_tensor(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "lora", ((2, 2), "F32"))
    write_directory(path, 1)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (change_shape, r"'model.norm.weight' has shape \[11, 3\], the run's has \[33\]"),
        (change_dtype, "'model.embed.weight' has dtype BOOL, the run's has BF16"),
        (lose_tensor, "'nothing' is missing"),
        (add_tensor, "'lora' is not one of the run's"),
    ],
)
def test_another_model_is_one_clear_error(
    tmp_path: Path, damage: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = open_bare_bucket("memory://")
    publish(bucket, write_directory(tmp_path / "c-0", 0))
    with monkeypatch.context() as patch:
        damage(tmp_path / "c-1", patch)
    with pytest.raises(InputError, match=says):
        publish(bucket, tmp_path / "c-1")
    assert len(bucket.list(keys.MANIFESTS)) == 1
    assert publish(bucket, write_directory(tmp_path / "c-2", 2)) == [(1, True)]


def test_an_incomplete_file_is_refused(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "c", 0)
    weights = path / "model.safetensors"
    whole = weights.read_bytes()
    for data in (whole[:-1], whole + b"\0", whole[:20], b""):
        weights.write_bytes(data)
        with pytest.raises(InputError):
            read_checkpoint(path)
    weights.write_bytes(whole)
    assert read_checkpoint(path).bytes == sum(map(len, contents(0).values()))


def test_code_pickles_and_trainer_state_are_not_published(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "c", 0)
    odd = ["modeling.py", "optimizer.pt", "trainer_state.json", ".hidden.json"]
    for name in odd:
        (path / name).write_text("{}")
    (path / "global_step1").mkdir()
    assert sorted(read_checkpoint(path).left_out) == sorted([*odd, "global_step1"])
    bucket = open_bare_bucket("memory://")
    publish(bucket, path)
    pull(bucket, tmp_path / "out", 0)
    assert sorted(files_in(tmp_path / "out")) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_weights_that_change_while_they_are_published_are_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = open_bare_bucket("memory://")
    first, second = (write_directory(tmp_path / f"c-{n}", n) for n in range(2))
    with CheckpointPublisher(bucket) as series:
        series.publish(first)

        def overwrite(path: Path) -> None:
            with (path / "model.safetensors").open("r+b") as file:
                file.seek(-8, os.SEEK_END)
                file.write(b"\1\0\1\0\1\0\1\1")

        series._on_digest = overwrite
        with pytest.raises(InputError, match="changed while"):
            series.publish(second)
        series._on_digest = None
        assert len(bucket.list(keys.MANIFESTS)) == 1
        assert series.publish(second).version == 1


def test_files_taken_from_a_stalled_publisher_are_uploaded_again(
    tmp_path: Path,
) -> None:
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    first, second = (
        write_directory(tmp_path / f"c-{n}", n, config=f'{{"step": {n}}}') for n in range(2)
    )
    with CheckpointPublisher(bucket) as series:
        series.publish(first)
        files = {file.name: file.blob for file in read_checkpoint(second).model_files()}
        create = bucket.create

        def stalled(key: str, data: bytes) -> bool:
            bucket.delete(keys.blob(files["config.json"]))
            return create(key, data)

        bucket.create = stalled  # type: ignore[method-assign]
        series.publish(second)
    pull(bucket, tmp_path / "out", 1)
    assert files_in(tmp_path / "out") == files_in(second)


# --- pulled directories --------------------------------------------------------------------------


def test_readers_see_complete_versions_and_the_previous_one_stays(tmp_path: Path) -> None:
    bucket = open_bare_bucket("memory://")
    paths = [write_directory(tmp_path / f"c-{n}", n) for n in range(6)]
    publish(bucket, *paths)
    whole = [files_in(path) for path in paths]
    out, seen, stop = tmp_path / "out", [], threading.Event()
    pull(bucket, out, 0)

    def read() -> None:
        while not stop.is_set():
            seen.append(files_in(out.resolve()) in whole)

    reader = threading.Thread(target=read)
    reader.start()
    held = out.resolve()
    for version in range(1, 6):
        pull(bucket, out, version)
        assert files_in(held) == whole[version - 1]
        held = out.resolve()
    stop.set()
    reader.join()
    assert seen
    assert all(seen)
    assert len([p for p in (tmp_path / ".out.deltawire").iterdir() if p.is_dir()]) == 2


def test_only_deltas_are_fetched_once_a_version_is_there(tmp_path: Path) -> None:
    inner = open_bare_bucket("memory://")
    paths = [write_directory(tmp_path / f"c-{n}", n) for n in range(3)]
    publish(inner, *paths, anchor_every=0)
    pull(inner, tmp_path / "out", 0)
    bucket = KeyMeter(inner)
    pull(bucket, tmp_path / "out", 2)
    run = read_run(inner)
    first = read_manifest(inner, run, 0)
    assert first is not None
    assert first.anchor is not None
    assert not {keys.blob(ref.hash) for ref in read_blobs(bucket, run, first.anchor)} & set(
        bucket.read_keys
    )
    assert files_in(tmp_path / "out") == files_in(paths[2])


@pytest.mark.parametrize("at", range(1, 12))
def test_an_interrupted_pull_is_continued(tmp_path: Path, at: int) -> None:
    inner = open_bare_bucket("memory://")
    paths = [write_directory(tmp_path / f"c-{n}", n) for n in range(3)]
    publish(inner, *paths, blob_bytes=512, chunk=64, anchor_every=0)
    bucket = FaultyBucket(inner)
    run = read_run(inner)
    bucket.fail("get", "weights/blobs/*", at=at, error=lambda verb, key: CorruptError("stopped"))
    out = tmp_path / "out"
    stopped = True
    with Checkout(bucket, run, out) as checkout:
        try:
            checkout.bring_to(2)
            stopped = False
        except CorruptError:
            assert not out.exists()
            assert checkout.unfinished() in (None, 2)
    bucket.heal()
    counted = MeteredBucket(bucket)
    pull(counted, out, 2)
    assert files_in(out) == files_in(paths[2])
    if stopped and at > 6:
        whole = MeteredBucket(inner)
        pull(whole, tmp_path / "other", 2)
        assert counted.read_bytes < whole.read_bytes


def test_a_changed_directory_is_not_used_as_a_base(tmp_path: Path) -> None:
    bucket = open_bare_bucket("memory://")
    paths = [write_directory(tmp_path / f"c-{n}", n) for n in range(2)]
    publish(bucket, *paths)
    pull(bucket, tmp_path / "out", 0)
    weights = tmp_path / "out" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    pull(bucket, tmp_path / "out", 1)
    assert files_in(tmp_path / "out") == files_in(paths[1])


@pytest.mark.parametrize("at", range(1, 9))
def test_a_full_disk_is_one_error_and_the_pull_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Every write in turn meets a full disk after half of its bytes."""
    bucket = open_bare_bucket("memory://")
    first = write_directory(tmp_path / "1", 0, sharded=True)
    publish(bucket, first)
    writes = 0

    def scarce(path: Path, data: bytes) -> None:
        nonlocal writes
        writes += 1
        path.write_bytes(data[: len(data) // 2] if writes == at else data)
        if writes == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def reserve(file: IO[bytes], size: int) -> None:
        nonlocal writes
        writes += 1
        if writes == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.flush()
        file.truncate(size)

    with monkeypatch.context() as patch:
        patch.setattr("deltawire.sync.huggingface.checkout._write", scarce)
        patch.setattr("deltawire.sync.huggingface.checkout._reserve", reserve)
        if at <= 7:  # run, two weight files, the number of what is built, index, two others
            with pytest.raises(InputError, match=r"No space left on device.*free some"):
                pull(bucket, tmp_path / "pulled", 0)
            assert not (tmp_path / "pulled").exists()
        else:
            pull(bucket, tmp_path / "pulled", 0)
    pull(bucket, tmp_path / "pulled", 0)
    assert files_in(tmp_path / "pulled") == files_in(first)


def test_existing_files_are_not_touched(tmp_path: Path) -> None:
    bucket, other = open_bare_bucket("memory://"), open_bare_bucket("memory://")
    path = write_directory(tmp_path / "c", 0)
    publish(bucket, path)
    publish(other, path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "full")
    for name in ("full", "file", "link"):
        with pytest.raises(InputError):
            pull(bucket, tmp_path / name, 0)
    assert (tmp_path / "full" / "mine").read_text() == "x"
    (tmp_path / "empty").mkdir()
    pull(bucket, tmp_path / "empty", 0)
    assert files_in(tmp_path / "empty") == files_in(path)
    with pytest.raises(InputError, match="another run"):
        pull(other, tmp_path / "empty", 0)
    run = read_run(bucket)
    with (
        Checkout(bucket, run, tmp_path / "empty"),
        pytest.raises(InputError, match="another process"),
    ):
        Checkout(bucket, run, tmp_path / "empty")


def test_a_run_without_directories_is_written_as_one_file(tmp_path: Path) -> None:
    safetensors_numpy = pytest.importorskip("safetensors.numpy")
    from deltawire.sync import open_publisher

    shared = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensors = {"b": shared, "lm_head": shared, "a": np.arange(5, dtype=np.int64)}
    bucket = open_bare_bucket("memory://")
    open_publisher(bucket, tensors).close()
    pull(bucket, tmp_path / "out", 0)
    found = safetensors_numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(found[name], tensors[name]) for name in tensors)


def header(**entries: Any) -> str:
    return json.dumps(entries)


SPEC = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "files",
    [
        [("../x.safetensors", header(a=SPEC))],
        [("/x.safetensors", header(a=SPEC))],
        [("x.bin", header(a=SPEC))],
        [("x.safetensors", header(a={**SPEC, "shape": [3]}))],
        [("x.safetensors", header(a={**SPEC, "dtype": "I32"}))],
        [("x.safetensors", header(a={**SPEC, "data_offsets": [4, 12]}))],
        [("x.safetensors", header(a={**SPEC, "data_offsets": [0, 1 << 50]}))],
        [("x.safetensors", header(b=SPEC))],
        [("x.safetensors", header())],
        [("x.safetensors", "[" * 100_000)],
        [("x.safetensors", header(a=SPEC)), ("y.safetensors", header(a=SPEC))],
        [("x.safetensors", header(a=SPEC)), ("x.safetensors", header())],
        [("x.safetensors", header(a=7))],
        [("x.safetensors", "7")],
    ],
)
def test_hostile_layouts_make_no_file(files: list[tuple[str, str]]) -> None:
    from deltawire.wire.run import TensorSpec

    table = Run(
        id="ab" * 16, name="", created_at=0, tensors=[TensorSpec("a", (2,), "F32")], digest="0" * 32
    )
    with pytest.raises(CorruptError):
        plan_files(SafetensorsLayout(files=[WeightFile(*file) for file in files]), table)


@pytest.mark.parametrize(
    "name",
    ["../evil.json", "/etc/x.json", "a/b.json", "x.py", "", "x.json\n", "con.json", "Com1.txt"],
)
def test_hostile_file_names_are_refused(tmp_path: Path, name: str) -> None:
    from deltawire.sync.huggingface.checkpoint_dir import read_files
    from deltawire.wire.run import ModelFile

    with pytest.raises(CorruptError, match="not a file that a run may carry"):
        read_files(open_bare_bucket("memory://"), [ModelFile(name, "0" * 64, 1)], version=0)


# --- watched folders -----------------------------------------------------------------------------


def test_a_watcher_yields_complete_directories_in_order(tmp_path: Path) -> None:
    now = 0.0
    watched = CheckpointWatcher(tmp_path, settle_s=5, clock=lambda: now)

    def ready(at: float) -> list[str]:
        nonlocal now
        now = at
        return [path.name for path in watched.ready()]

    for name in ("checkpoint-1000", "checkpoint-900", "checkpoint-800"):
        write_directory(tmp_path / name, 0, sharded=True)
    missing = tmp_path / "checkpoint-900" / "model-00002-of-00002.safetensors"
    kept = missing.read_bytes()
    missing.unlink()
    half = tmp_path / "checkpoint-1000" / "model-00001-of-00002.safetensors"
    whole = half.read_bytes()
    half.write_bytes(whole[:-5])
    (tmp_path / "logs").mkdir()
    assert ready(0) == ready(4) == []
    assert ready(6) == ["checkpoint-800"]
    half.write_bytes(whole)
    assert ready(7) == ready(11) == []  # Changed at 7: not before 12.
    assert ready(13) == ["checkpoint-1000"]
    missing.write_bytes(kept)
    assert ready(14) == ready(30) == []
    assert [path.name for path in watched.passed_over] == ["checkpoint-900"]


def test_a_published_directory_can_be_loaded_as_a_mirror(tmp_path: Path) -> None:
    bucket = open_bare_bucket("memory://")
    publish(bucket, *(write_directory(tmp_path / f"c-{n}", n) for n in range(2)))
    run = read_run(bucket)
    mirror = load_mirror(bucket, run)
    assert {n: b.tobytes() for n, b in mirror.tensors.items()} == contents(1)
    assert encode_layout(SafetensorsLayout(files=[])).endswith(b"\n")


def test_a_readme_added_to_an_old_checkpoint_publishes_nothing(tmp_path: Path) -> None:
    bucket = open_bare_bucket("memory://")
    paths = [write_directory(tmp_path / f"c-{n}", n) for n in range(3)]
    publish(bucket, *paths)
    (paths[0] / "README.md").write_text("old")
    assert publish(bucket, *paths) == [(0, False), (1, False), (2, False)]
    (paths[2] / "README.md").write_text("new")  # The newest weights may get new files.
    assert publish(bucket, *paths) == [(0, False), (1, False), (3, True)]


def test_pruned_versions_with_metadata_of_each_step_are_known(tmp_path: Path) -> None:
    bucket = open_bare_bucket("memory://")
    paths = [write_directory(tmp_path / f"c-{n}", n) for n in range(6)]
    options: dict[str, Any] = {"anchor_every": 2, "retain": 2, "grace_s": 0.0}
    publish(bucket, *paths, **options)
    run = read_run(bucket)
    first = read_manifest(bucket, run, 0)
    assert first is not None
    assert first.pruned
    assert publish(bucket, *paths, **options) == [(n, False) for n in range(6)]


def watch_once(bucket: Bucket, folder: Path) -> list[tuple[str, str]]:
    watcher = CheckpointWatcher(folder, settle_s=0)
    with CheckpointPublisher(bucket) as publisher:
        found = [publisher.publish(path, in_name_order=True) for path in watcher.ready()]
    return [(result.path.name, result.state) for result in found]


def test_a_link_to_the_latest_checkpoint_is_that_checkpoint(tmp_path: Path) -> None:
    bucket = open_bare_bucket("memory://")
    for number in (1, 2, 3):
        write_directory(tmp_path / f"checkpoint-{number}", number)
    (tmp_path / "latest").symlink_to(tmp_path / "checkpoint-3")
    names = [f"checkpoint-{n}" for n in (1, 2, 3)]
    assert watch_once(bucket, tmp_path) == [(name, "published") for name in names]
    assert watch_once(bucket, tmp_path) == [(name, "there") for name in names]
    pull(bucket, tmp_path / "out", 2)
    assert files_in(tmp_path / "out") == files_in(tmp_path / "latest")


def test_a_restarted_watcher_never_publishes_old_weights_as_newest(tmp_path: Path) -> None:
    """An older checkpoint that became complete late was left out before, and still is."""
    bucket = open_bare_bucket("memory://")
    for number in (1, 3):
        write_directory(tmp_path / f"checkpoint-{number}", number)
    watch_once(bucket, tmp_path)
    write_directory(tmp_path / "checkpoint-2", 2)
    assert watch_once(bucket, tmp_path) == [
        ("checkpoint-1", "there"),
        ("checkpoint-2", "older"),
        ("checkpoint-3", "there"),
    ]
    assert len(bucket.list(keys.MANIFESTS)) == 2
    write_directory(tmp_path / "checkpoint-4", 4)
    assert watch_once(bucket, tmp_path)[-1] == ("checkpoint-4", "published")


def test_shards_without_an_index_that_names_them_all_are_not_complete(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "c", 0, sharded=True)
    index = (path / INDEX).read_bytes()
    (path / INDEX).unlink()
    with pytest.raises(CheckpointDirError, match="shards and no"):
        read_checkpoint(path)
    second = path / "model-00002-of-00002.safetensors"
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(CheckpointDirError, match="1 of 2 shards"):
        read_checkpoint(path)
    first_only = {n: f for n, f in json.loads(index)["weight_map"].items() if "00001" in f}
    (path / INDEX).write_text(json.dumps({"weight_map": first_only}))
    with pytest.raises(CheckpointDirError, match="names 1 of 2 shards"):
        read_checkpoint(path)
    second.write_bytes(kept)
    (path / INDEX).write_bytes(index)
    assert read_checkpoint(path).bytes == sum(map(len, contents(0).values()))


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("other", [False, True])
def test_a_publish_after_a_lost_answer_reports_what_there_is(
    tmp_path: Path, committed: bool, other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltawire.store.retrying.FIRST_PAUSE_S", 0.0)
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    paths = [write_directory(tmp_path / f"c-{n}", n) for n in range(4)]
    with CheckpointPublisher(RetryingBucket(bucket)) as publisher:
        publisher.publish(paths[0])
        bucket.fail("create", "*/manifests/*", times=1 if committed else None, done=committed)
        bucket.fail("get", "*/manifests/*", times=None)
        with pytest.raises(RetryError):
            publisher.publish(paths[1])
        bucket.heal()
        again = publisher.publish(paths[2] if other else paths[1])
        expected = 2 if committed and other else 1
        assert (again.version, again.published) == (expected, other or not committed)
        last = publisher.publish(paths[3])
        assert (last.version, last.published) == (expected + 1, True)
    run = read_run(bucket)
    mirror = load_mirror(bucket, run, at=again.version)
    assert mirror.digest.hex() == again.digest


def test_an_uncommitted_start_is_explained(tmp_path: Path) -> None:
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    first, other = (write_directory(tmp_path / f"c-{n}", n) for n in range(2))
    bucket.fail("create", "*/manifests/*", times=None, error=disk_full)
    with pytest.raises(InputError, match="lack of space"):
        publish(bucket, first)
    bucket.heal()
    with pytest.raises(InputError, match=r"never committed.*delete run.json"):
        publish(bucket, other)
    assert publish(bucket, first) == [(0, True)]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_a_pulled_directory_that_was_changed_is_noticed_and_built_again(
    tmp_path: Path, name: str, how: str
) -> None:
    bucket = open_bare_bucket("memory://")
    path = write_directory(tmp_path / "c", 0)
    publish(bucket, path)
    run = read_run(bucket)
    out = tmp_path / "out"
    pull(bucket, out, 0)
    with Checkout(bucket, run, out) as checkout:
        assert checkout.verify()[0] == 0
    file = out / name
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    if how == "remove":
        file.unlink()
    else:
        file.write_bytes(data if how == "flip" else data[:-1])
    with Checkout(bucket, run, out) as checkout, pytest.raises(CorruptError):
        checkout.verify()
    pull(bucket, out, 0)
    assert files_in(out) == files_in(path)


def test_tied_names_are_compared_too(tmp_path: Path) -> None:
    from deltawire.sync import open_publisher

    shared = np.arange(12, dtype=np.float32).reshape(3, 4)
    bucket = open_bare_bucket("memory://")
    open_publisher(bucket, {"b": shared, "lm_head": shared}).close()
    pull(bucket, tmp_path / "out", 0)
    weights = tmp_path / "out" / "model.safetensors"
    whole = weights.read_bytes()
    run = read_run(bucket)
    for place in (-1, -49):  # One byte of each copy.
        data = bytearray(whole)
        data[place] ^= 1
        weights.write_bytes(data)
        with Checkout(bucket, run, tmp_path / "out") as checkout, pytest.raises(CorruptError):
            checkout.verify()


def test_a_disk_too_small_is_known_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = open_bare_bucket("memory://")
    path = write_directory(tmp_path / "c", 0)
    publish(bucket, path)
    real = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: real._replace(free=100))
        with pytest.raises(InputError, match=r"needs .* bytes; .* has 100 free"):
            pull(bucket, tmp_path / "out", 0)
    assert not (tmp_path / ".out.deltawire" / "building").exists()
    pull(bucket, tmp_path / "out", 0)


def test_a_disk_that_fills_up_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = open_bare_bucket("memory://")
    publish(bucket, write_directory(tmp_path / "c", 0))

    def full(path: Path, data: bytes) -> None:
        if path.parent.name == "building":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path.write_bytes(data)

    with monkeypatch.context() as patch:
        patch.setattr("deltawire.sync.huggingface.checkout._write", full)
        with pytest.raises(InputError, match="No space left"):
            pull(bucket, tmp_path / "out", 0)
    assert not (tmp_path / ".out.deltawire" / "building").exists()


def test_a_checkpoint_truncated_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """Mapped into memory, it would end the process with a signal."""
    bucket = open_bare_bucket("memory://")
    first, second = (write_directory(tmp_path / f"c-{n}", n) for n in range(2))

    def cut(path: Path) -> None:
        os.truncate(path / "model.safetensors", 200)

    with CheckpointPublisher(bucket) as publisher:
        publisher.publish(first)
        publisher._on_digest = cut
        with pytest.raises(CheckpointDirError, match="was truncated while"):
            publisher.publish(second)
        publisher._on_digest = None
        with pytest.raises(CheckpointDirError):
            publisher.publish(second)
        assert publisher.publish(write_directory(tmp_path / "c-2", 2)).version == 1


def test_odd_tensor_names_are_one_clear_error(tmp_path: Path) -> None:
    for number, name in enumerate(("a\ud800", "", "x" * 5000)):
        path = write_directory(tmp_path / f"c-{number}", 0)
        entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
        text = json.dumps({name: entry}).encode()
        data = len(text).to_bytes(8, "little") + text + bytes(8)
        (path / "model.safetensors").write_bytes(data)
        with pytest.raises(InputError) as caught:
            publish(open_bare_bucket("memory://"), path)
        str(caught.value).encode()


@pytest.mark.parametrize("shape", [[-1, 3], [1.5], ["a"], [1 << 70, 1 << 70], [True], "ab", None])
def test_odd_shapes_are_one_clear_error(tmp_path: Path, shape: object) -> None:
    path = write_directory(tmp_path / "c", 0)
    text = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 12]}}).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(12)
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointDirError, match="is not a safetensors file"):
        read_checkpoint(path)


def test_names_that_differ_in_case_only_are_refused_on_both_sides(tmp_path: Path) -> None:
    from deltawire.sync.huggingface.checkpoint_dir import read_files
    from deltawire.wire.run import ModelFile

    path = write_directory(tmp_path / "c", 0)
    (path / "Config.json").write_text("{}")
    with pytest.raises(CheckpointDirError, match="differs only in case"):
        read_checkpoint(path)
    twins = [ModelFile(name, "0" * 64, 1) for name in ("a.json", "A.json")]
    with pytest.raises(CorruptError, match="two files have the same name"):
        read_files(open_bare_bucket("memory://"), twins, version=0)


def test_damaged_and_junk_manifests_do_not_stop_a_publisher(tmp_path: Path) -> None:
    """Neither a damaged newest version nor a key with a huge number stops it."""
    bucket = open_bare_bucket("memory://")
    paths = [write_directory(tmp_path / f"c-{n}", n) for n in range(4)]
    publish(bucket, *paths[:3])
    bucket.put(keys.manifest(2), b"junk")
    bucket.put(keys.manifest(9_999_999_999), b"junk")
    assert publish(bucket, *paths[:2], paths[3]) == [(0, False), (1, False), (3, True)]
    pull(bucket, tmp_path / "out", 3)
    assert files_in(tmp_path / "out") == files_in(paths[3])
