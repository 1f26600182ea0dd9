"""Folders as prime-rl, SkyRL and slime write them (from their sources), watched and published."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoint_dirs import files_in, write_directory

from deltawire.cli.main import main
from deltawire.errors import InputError
from deltawire.store import open_bucket
from deltawire.sync import (
    Checkout,
    CheckpointPublisher,
    CheckpointWatcher,
    committed_versions,
    read_manifest,
    read_run,
)
from deltawire.sync.huggingface.checkpoint_dir import lent_files
from deltawire.sync.huggingface.checkpoint_folder import NumberGaps


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def names_of(url: str) -> list[Any]:
    bucket = open_bucket(url)
    run = read_run(bucket)
    found = [read_manifest(bucket, run, version) for version in committed_versions(bucket)]
    return [None if one is None else one.metadata["checkpoint"] for one in found]


def broadcast(folder: Path, step: int, *, marked: bool = True, sharded: bool = False) -> Path:
    """prime-rl's ``broadcasts/step_N``: weights and nothing else, STABLE last."""
    path = write_directory(folder / f"step_{step}", step, sharded=sharded)
    (path / "config.json").unlink()
    (path / "tokenizer.json").unlink()
    if marked:
        (path / "STABLE").touch()
    return path


def test_broadcasts_of_prime_rl_are_taken_when_they_are_marked(tmp_path: Path) -> None:
    base = write_directory(tmp_path / "base", 0, config='{"model_type": "qwen3"}')
    folder = tmp_path / "broadcasts"
    folder.mkdir()
    clock = Clock()
    watcher = CheckpointWatcher(folder, settle_s=5, lent=lent_files(base), clock=clock)
    bucket = open_bucket("memory://")
    published = []
    with CheckpointPublisher(bucket, lent=watcher.lent) as publisher:

        def poll() -> None:
            published.extend(
                (path.name, publisher.publish(path, in_name_order=True).state)
                for path in watcher.ready()
            )

        broadcast(folder, 0)
        poll()
        for step in range(1, 4):
            path = broadcast(folder, step, marked=False, sharded=step % 2 == 1)
            for _ in range(3):  # It settles, and has no marker.
                clock.now += 30
                poll()
            assert len(published) == step
            (path / "STABLE").touch()
            poll()  # Taken at once: two steps later it is removed.
            assert len(published) == step + 1
            if step >= 2:
                shutil.rmtree(folder / f"step_{step - 2}")
    assert published == [(f"step_{n}", "published") for n in range(4)]
    run = read_run(bucket)
    with Checkout(bucket, run, tmp_path / "out") as checkout:
        checkout.bring_to(3)
    pulled = files_in(tmp_path / "out")
    assert pulled["config.json"] == (base / "config.json").read_bytes()
    assert pulled["tokenizer.json"] == (base / "tokenizer.json").read_bytes()
    weights = [name for name in pulled if name.endswith(".safetensors")]
    kept = files_in(folder / "step_3")
    assert {name: pulled[name] for name in weights} == {name: kept[name] for name in weights}
    assert "STABLE" not in pulled


def test_a_step_that_is_removed_while_it_is_published_is_skipped(tmp_path: Path) -> None:
    base = write_directory(tmp_path / "base", 0)
    folder = tmp_path / "broadcasts"
    folder.mkdir()
    broadcast(folder, 1)
    watcher = CheckpointWatcher(folder, lent=lent_files(base))
    with CheckpointPublisher(open_bucket("memory://"), lent=watcher.lent) as publisher:
        for path in watcher.ready():
            shutil.rmtree(path)
            with pytest.raises(InputError, match="step_1"):
                publisher.publish(path)
        broadcast(folder, 2)
        assert [publisher.publish(path).version for path in watcher.ready()] == [0]


def test_files_are_lent_only_where_they_are_missing(tmp_path: Path) -> None:
    base = write_directory(tmp_path / "base", 0, sharded=True, config='{"from": "base"}')
    lent = lent_files(base)
    assert sorted(lent) == ["config.json", "tokenizer.json"], "no weights, and no index of them"
    own = write_directory(tmp_path / "own", 1, config='{"from": "own"}')
    bucket = open_bucket("memory://")
    with CheckpointPublisher(bucket, lent=lent) as publisher:
        publisher.publish(own)
        assert publisher.publish(own).state == "there"
    run = read_run(bucket)
    with Checkout(bucket, run, tmp_path / "out") as checkout:
        checkout.bring_to(0)
    assert files_in(tmp_path / "out") == files_in(own)
    with pytest.raises(InputError, match=r"has no config\.json"):
        lent_files(tmp_path)


def test_exports_of_skyrl_lie_a_level_deeper(tmp_path: Path) -> None:
    exports = tmp_path / "exports"
    for step in (900, 1000):
        write_directory(exports / f"global_step_{step}" / "policy", step // 100)
        write_directory(exports / f"global_step_{step}" / "critic", 1)
    url = str(tmp_path / "run")
    options = ["--settle", "0", "--idle", "0.3", "--json"]
    assert main(["publish", "--watch", str(exports), "--to", url, *options]) == 0
    assert names_of(url) == ["global_step_900", "global_step_1000"]
    # A later start knows them by name, and publishes what has come since.
    write_directory(exports / "global_step_950" / "policy", 4)
    write_directory(exports / "global_step_1100" / "policy", 5)
    assert main(["publish", "--watch", str(exports), "--to", url, *options]) == 0
    assert names_of(url) == ["global_step_900", "global_step_1000", "global_step_1100"]


def test_kept_versions_of_slime_are_published(tmp_path: Path) -> None:
    for version in (1, 2, 10):
        write_directory(tmp_path / "disk" / f"weight_v{version:06d}", version, sharded=True)
    url = str(tmp_path / "run")
    arguments = ["publish", "--watch", str(tmp_path / "disk"), "--to", url]
    assert main([*arguments, "--settle", "0", "--idle", "0.3"]) == 0
    assert names_of(url) == ["weight_v000001", "weight_v000002", "weight_v000010"]
    assert main(["log", url]) == 0


def test_a_folder_that_is_not_taken_is_told_why_and_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = tmp_path / "watched"
    (watched / "logs").mkdir(parents=True)
    broadcast(watched, 1, marked=False)
    adapter = write_directory(watched / "step_2", 2)
    (adapter / "model.safetensors").rename(adapter / "adapter_model.safetensors")
    half = write_directory(watched / "step_3", 3, sharded=True)
    (half / "model-00002-of-00002.safetensors").unlink()
    url = str(tmp_path / "run")
    arguments = ["publish", "--watch", str(watched), "--to", url, "--settle", "0", "--idle", "1.5"]
    started = time.monotonic()
    assert main(arguments) == 0
    assert time.monotonic() - started > 1, "several polls"
    told = capsys.readouterr().err
    for text in (
        "logs is not taken: there are no safetensors files",
        "step_1 is not taken: it has no config.json; lend a model's files with --files MODEL_DIR",
        "step_2 is not taken:",
        "holds an adapter but no base model",
        "step_3 is not taken:",
        "has no model-00002-of-00002.safetensors, which its index names",
    ):
        assert told.count(text) == 1, (text, told)
    broadcast(watched, 4)
    base = write_directory(tmp_path / "base", 0)
    assert main([*arguments, "--files", str(base), "--json"]) == 0
    out = capsys.readouterr()
    assert [json.loads(line)["version"] for line in out.out.splitlines()] == [0]
    assert out.err.count("step_1 is not taken: it has no STABLE") == 1


def test_wrong_folders_are_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = str(tmp_path / "run")
    (tmp_path / "file").touch()
    for arguments, text in (
        (["--watch", str(tmp_path / "file")], "is no folder to watch"),
        ([str(tmp_path / "checkpoint-7")], "there is no directory"),
        (["--watch", str(tmp_path), "--files", str(tmp_path)], "has no config.json"),
    ):
        assert main(["publish", *arguments, "--to", url]) == 2
        assert text in capsys.readouterr().err
    assert not Path(url).exists()


def test_a_pattern_finds_the_folder_that_appears_last(tmp_path: Path) -> None:
    """As prime-rl names it: ``output_dir/RUN_NAME/broadcasts`` with a random name."""
    clock = Clock()
    base = lent_files(write_directory(tmp_path / "base", 0))
    watcher = CheckpointWatcher(
        str(tmp_path / "outputs" / "*" / "broadcasts"), lent=base, clock=clock
    )
    assert not list(watcher.ready())
    assert watcher.notes == [f"there is no folder {watcher.folder.given} yet: waiting for it"]
    first = broadcast(tmp_path / "outputs" / "zeta" / "broadcasts", 7)
    (tmp_path / "outputs" / "zeta" / "configs").mkdir()
    assert list(watcher.ready()) == [first]
    again = broadcast(tmp_path / "outputs" / "alpha" / "broadcasts", 1)
    broadcast(tmp_path / "outputs" / "zeta" / "broadcasts", 8)
    assert list(watcher.ready()) == [again]
    assert watcher.notes[1:] == [
        f"watching {first.parent}",
        f"watching {again.parent}, no longer {first.parent}",
    ]


def test_of_several_matches_the_one_changed_last_is_watched_first(tmp_path: Path) -> None:
    for name, at in (("a", 2), ("b", 3), ("c", 1)):
        path = write_directory(tmp_path / name / "out" / "step_1", 1)
        os.utime(path.parent, (at, at))
    watcher = CheckpointWatcher(str(tmp_path / "*" / "out"), settle_s=0)
    assert list(watcher.ready()) == [tmp_path / "b" / "out" / "step_1"]


def test_folders_that_were_removed_unread_are_named(tmp_path: Path) -> None:
    clock = Clock()
    folder = tmp_path / "out"
    watcher = CheckpointWatcher(folder, settle_s=5, clock=clock)
    list(watcher.ready())
    for step in (3, 4):  # The first look sees the third and the fourth step.
        write_directory(folder / f"step_{step}", step)
    list(watcher.ready())
    assert watcher.notes[-1].startswith("missed number 1 to 2 (2): removed before it could be read")
    clock.now = 6
    assert len(list(watcher.ready())) == 2
    shutil.rmtree(folder / "step_3")  # Published: nothing is missed.
    write_directory(folder / "step_5", 5)
    list(watcher.ready())
    shutil.rmtree(folder / "step_5")
    write_directory(folder / "step_9", 9)
    notes = len(watcher.notes)
    list(watcher.ready())
    list(watcher.ready())
    assert len(watcher.notes) == notes + 1
    assert watcher.notes[-1].startswith("missed step_5, number 6 to 8 (3):")


@pytest.mark.parametrize(
    ("looks", "missing"),
    [
        ([{100, 1000}, {1100}, {1300}], [range(1200, 1300, 100)]),
        ([{100}, {200}, {500}], [range(300, 500, 100)]),
        ([{7}, {9}, {9, 11}], []),
        ([set(), {10}, {11}], []),
        ([{1_732_470_000, 1_732_470_060}], []),
    ],
)
def test_gaps_are_measured_by_the_smallest_step(looks: Any, missing: Any) -> None:
    for from_start in (False, True):
        gaps = NumberGaps(from_start=from_start)
        assert [gap for look in looks for gap in gaps.add(look)] == missing


def test_the_command_waits_for_a_folder_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pattern = str(tmp_path / "*" / "broadcasts")
    words = ["publish", "--watch", pattern, "--to", str(tmp_path / "run"), "--idle", "0.01"]
    assert main(words) == 0
    told = capsys.readouterr()
    assert "waiting for it" in " ".join((told.out + told.err).split())
