"""Runs that publish in further precisions: the bits of a run that publishes only those, crashes
between two publications, readers that choose, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from granted_groups import start_with_groups
from packed_run import TRAIN, VERSIONS, train

from deltawire.cli.main import main
from deltawire.config import BuildConfig, parse_config
from deltawire.config.machine import POLICY
from deltawire.config.served import samples_quantized
from deltawire.dashboard.status import Watch
from deltawire.errors import InputError
from deltawire.export.source import open_source
from deltawire.launch.fsck import check_published
from deltawire.rl.evaluate.attestation import served_status
from deltawire.rl.trainer.model import open_policy_model
from deltawire.runtime.fleet import read_trainer
from deltawire.runtime.lines import line_bucket, publication_bucket
from deltawire.runtime.process import open_run
from deltawire.store import Bucket, open_bucket
from deltawire.sync import load_mirror, newest_version, read_history, read_manifest, read_run
from deltawire.train import publications
from deltawire.wire import keys

ALSO = ["fp8-block-f32", "int4-g32"]


def start(folder: Path, **changed: object) -> Bucket:
    sizes = BuildConfig(
        hidden_size=64, layers=1, head_size=16, feed_forward_size=160, vocabulary=300, context=64
    )
    folder.mkdir(exist_ok=True)
    settings = TRAIN | {"also_publish": ALSO} | changed
    return start_with_groups(folder, groups=VERSIONS, train=settings, sizes=sizes)


def digests(bucket: Bucket) -> list[str]:
    run = read_run(bucket)
    return [one.digest for one in [read_manifest(bucket, run, 0), *read_history(bucket, run)]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    bucket = start(tmp_path_factory.mktemp("trained"))
    train(bucket)
    return bucket


def test_a_line_is_the_quantized_twin_of_each_version(trained, tmp_path):
    """The slow twin restores each bf16 version into a model, and quantizes that."""
    run, config = open_run(trained)
    for exporter in ALSO:
        line = line_bucket(trained, exporter)
        source = None
        for version, digest in enumerate(digests(line)):
            model = open_policy_model(trained, run, config)
            open_source("bf16", model).restore(load_mirror(trained, run, at=version))
            twin = open_source(exporter, model)
            if source is not None:
                twin.continue_from(source)
            tensors = twin.tensors()
            source = load_mirror(line, read_run(line), at=version)
            for spec in twin.specs():
                bits = tensors[spec.name].reshape(-1).view(torch.uint8).numpy()
                assert (source.tensors[spec.name].view("u1") == bits).all(), spec.name
            assert source.digest.hex() == digest
        assert version == VERSIONS
        assert len(set(digests(line))) == VERSIONS + 1


def test_a_publisher_on_disk_publishes_the_same(trained, tmp_path, monkeypatch):
    """Of the run and each line, from version 0 on; without the machine's folder it is refused."""
    monkeypatch.setenv(POLICY, str(tmp_path / "policy.toml"))
    (tmp_path / "policy.toml").write_text("")
    with pytest.raises(InputError, match="snapshot_dir"):
        start(tmp_path / "refused", publisher_offload="disk")
    (tmp_path / "policy.toml").write_text(f'snapshot_dir = "{tmp_path}/missing"')
    with pytest.raises(InputError, match="no folder"):
        start(tmp_path / "refused", publisher_offload="disk")
    assert not [one for one in (tmp_path / "refused" / "bucket").rglob("*") if one.is_file()]
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "policy.toml").write_text(f'snapshot_dir = "{tmp_path}/snapshots"')
    bucket = start(tmp_path / "disk", publisher_offload="disk")
    train(bucket)
    for place, other in (
        (bucket, trained),
        *((line_bucket(bucket, one), line_bucket(trained, one)) for one in ALSO),
    ):
        assert digests(place) == digests(other)
        blobs = [sorted(key for key in one.list("") if "blobs/" in key) for one in (place, other)]
        assert blobs[0] == blobs[1]
        assert len(blobs[0]) > VERSIONS
    assert list((tmp_path / "snapshots").iterdir()) == []


def test_a_kill_between_two_publications_leaves_no_version_without_the_other(
    trained, tmp_path, monkeypatch
):
    bucket = start(tmp_path)
    for version in range(1, VERSIONS + 1):
        undo = die_after_the_commit(monkeypatch)
        with pytest.raises(InputError, match="killed"):
            train(bucket, to=version)
        undo()
        assert newest_version(bucket) == version
        for exporter in ALSO:
            assert newest_version(line_bucket(bucket, exporter)) == version - 1
        found, lines = check_published(bucket, deep=False)
        assert found.whole
        assert [fault.level for one in lines.values() for fault in one.faults] == ["warning"] * 2
    train(bucket)
    assert digests(bucket) == digests(trained)
    for exporter in ALSO:
        assert digests(line_bucket(bucket, exporter)) == digests(line_bucket(trained, exporter))
    assert main(["fsck", bucket.url]) == 0


def die_after_the_commit(monkeypatch):
    """The process ends after each commit of the run's, before those of the lines."""
    own = publications.Publication._make

    def die(self, version, bits, committed=None):
        if committed is None:  # A version that the last process did not make.
            own(self, version, bits)
            return
        committed.result()
        raise InputError("killed")

    monkeypatch.setattr(publications.Publication, "_make", die)
    return lambda: monkeypatch.setattr(publications.Publication, "_make", own)


@pytest.mark.parametrize("killed", [False, True])
def test_lines_skip_the_numbers_that_the_run_skips(tmp_path, monkeypatch, killed):
    """An object that cannot be read occupies a number of the run, which goes on at the next."""
    bucket = start(tmp_path)
    train(bucket, to=1)
    bucket.put(keys.manifest(2), b"junk")
    if killed:
        undo = die_after_the_commit(monkeypatch)
        with pytest.raises(InputError, match="killed"):
            train(bucket)
        assert newest_version(bucket) == 3
        undo()
    train(bucket)
    for place in (bucket, *(line_bucket(bucket, one) for one in ALSO)):
        history = list(read_history(place, read_run(place)))
        assert [(one.version, one.base) for one in history] == [(1, 0), (3, 1)]
    run, config = open_run(bucket)
    for exporter in ALSO:
        line = line_bucket(bucket, exporter)
        model = open_policy_model(bucket, run, config)
        open_source("bf16", model).restore(load_mirror(bucket, run, at=3))
        twin = open_source(exporter, model)
        twin.continue_from(load_mirror(line, read_run(line), at=1))
        tensors = twin.tensors()
        held = load_mirror(line, read_run(line), at=3)
        for spec in twin.specs():
            bits = tensors[spec.name].reshape(-1).view(torch.uint8).numpy()
            assert (held.tensors[spec.name].view("u1") == bits).all(), spec.name


def test_a_line_that_lacks_several_versions_is_completed(trained, tmp_path):
    """As after a training client, which publishes the run's versions only."""
    shutil.copytree(trained.url.removeprefix("file://"), tmp_path / "bucket")
    bucket = open_bucket(str(tmp_path / "bucket"))
    line = line_bucket(bucket, ALSO[0])
    wanted = digests(line)
    for version in (VERSIONS, VERSIONS - 1):
        line.delete(keys.manifest(version))
    _, lines = check_published(bucket, deep=False)
    assert "error" in [fault.level for fault in lines[ALSO[0]].faults]
    train(bucket)
    assert digests(line) == wanted


def test_fsck_status_and_pull_know_the_lines(trained, tmp_path, capsys):
    assert main(["fsck", trained.url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(found["lines"]) == ALSO
    assert all(one["newest"] == VERSIONS for one in found["lines"].values())
    assert Watch(trained).poll().lines == dict.fromkeys(ALSO, VERSIONS)
    assert main(["status", trained.url]) == 0
    assert "also published: fp8-block-f32 3, int4-g32 3" in capsys.readouterr().out
    out = tmp_path / "pulled"
    assert main(["pull", trained.url, str(out), "--precision", ALSO[0]]) == 0
    config = json.loads((out / "config.json").read_bytes())
    assert config["quantization_config"]["quant_method"] == "fp8"
    copy = tmp_path / "copy"
    assert main(["relay", trained.url, str(copy), "--precision", ALSO[1]]) == 0
    assert main(["fsck", str(copy)]) == 0
    capsys.readouterr()
    assert main(["pull", trained.url, str(tmp_path / "x"), "--precision", "mxfp4"]) == 2
    assert "it publishes bf16, fp8-block-f32, int4-g32" in capsys.readouterr().err
    assert publication_bucket(trained, "bf16") is trained


def test_workers_are_attested_by_the_line_that_they_serve(trained):
    _, config = open_run(trained)
    status = msgspec.structs.replace(read_trainer(trained), version=VERSIONS)
    assert served_status(trained, config, status) is status
    rollout = msgspec.structs.replace(config.rollout, weights=ALSO[1])
    served = served_status(trained, msgspec.structs.replace(config, rollout=rollout), status)
    assert served.digest == digests(line_bucket(trained, ALSO[1]))[-1] != status.digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"also_publish": ["fp8-block", "fp8-block"]}, "names fp8-block twice"),
        ({"also_publish": ["bf16"]}, "names bf16 twice"),
        ({"also_publish": ["f32"]}, "f32 does not quantize"),
        ({"exporter": "f16", "compute": "bfloat16"}, "bfloat16 cannot hold float16 weights"),
        ({"also_publish": ["int4-g32"], "exporter": "fp8-block"}, "train.exporter is fp8-block"),
        (
            {"also_publish": ["mxfp4"], "adapter": {"kind": "lora", "targets": ["q_proj"]}},
            "cannot quantize an adapter",
        ),
    ],
)
def test_publications_that_cannot_be_are_refused(change, message):
    raw = {"name": "x", "model": {"path": "x"}, "train": change}
    with pytest.raises(InputError, match=message):
        parse_config(raw, source="test")


def test_weights_that_the_run_does_not_publish_are_refused():
    raw = {"name": "x", "model": {"path": "x"}, "rollout": {"weights": "mxfp4"}}
    with pytest.raises(InputError, match="this run publishes bf16, not mxfp4"):
        parse_config(raw, source="test")


def test_the_loss_corrects_for_a_quantized_line_that_is_served():
    raw = {
        "name": "x",
        "model": {"path": "x"},
        "train": {"also_publish": ["mxfp4"], "loss": {"ratio_base": "old"}, "max_staleness": 1},
    }
    assert not samples_quantized(parse_config(raw, source="test"))
    with pytest.raises(InputError, match=r"rollout.weights mxfp4 .* does not correct for"):
        parse_config(raw | {"rollout": {"weights": "mxfp4"}}, source="test")


def test_a_layout_that_a_format_cannot_hold_is_refused_before_anything_is_stored(tmp_path):
    with pytest.raises(InputError, match="48 columns"):
        start_with_groups(tmp_path, groups=1, train=TRAIN | {"also_publish": ["int4-g32"]})
    assert not list((tmp_path / "bucket").iterdir())
