"""The continuation of a run's further precision, whose run skipped a number."""

import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from answer_damages import Command, Stage
from granted_groups import start_with_groups
from packed_run import TRAIN

from deltawire.config import BuildConfig
from deltawire.errors import InputError
from deltawire.rl.trainer.model import open_policy_model
from deltawire.runtime.process import open_run
from deltawire.sync import Publisher, committed_versions, load_mirror, read_manifest, read_run
from deltawire.train import publications
from deltawire.train.parallel import open_mesh
from deltawire.wire import keys

LINE = "fp8-block-f32"
SIZES = BuildConfig(
    hidden_size=64, layers=1, head_size=16, feed_forward_size=160, vocabulary=300, context=64
)
NEWEST = 3


def line_stage():
    """The line has version 0; the run has 0, 1 and 3, because an unreadable object occupies 2."""
    stage = Stage.begin("run", "line")
    with tempfile.TemporaryDirectory() as folder:
        train = TRAIN | {"also_publish": [LINE]}
        bucket = start_with_groups(Path(folder), groups=1, train=train, sizes=SIZES)
        for key in bucket.list(""):
            data = bucket.get(key, limit=1 << 30)
            if key.startswith(keys.line(LINE)):
                stage.sound("line").put(key.removeprefix(keys.line(LINE)).lstrip("/"), data)
            else:
                stage.sound("run").put(key, data)
        run, config = open_run(bucket)
        stage.facts |= {"run": run, "train": config.train}
        stage.facts["model"] = open_policy_model(bucket, run, config)
    stage.remember()
    publish_with_a_gap(stage.sound("run"), run)
    return stage


def publish_with_a_gap(bucket, run):
    mirror = load_mirror(bucket, run)
    shapes = {spec.name: spec.shape for spec in run.tensors}
    tensors = {name: bits.reshape(shapes[name]).copy() for name, bits in mirror.tensors.items()}
    publisher = Publisher(bucket, run, mirror, epoch=1, anchor_every=100, compaction_strides=())
    for version in (1, 2, NEWEST):
        if version == 2:
            bucket.put(keys.manifest(version), b"junk")
        for bits in tensors.values():
            bits.reshape(-1)[:3] ^= 1
        with suppress(InputError):  # An unreadable object has the name of version 2.
            publisher.publish(tensors)
            publisher.flush()
    publisher.close()


def run_line(stage):
    run = stage.facts["run"]
    held = load_mirror(stage.sound("run"), run)
    main = SimpleNamespace(held=held, staged=held, version=held.version, committing=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publications, "line_bucket", lambda *_: stage.bucket("line"))
        line = object.__new__(publications.Publication)
        try:
            line.__init__(
                stage.bucket("run"), run, LINE, stage.facts["model"],
                open_mesh(stage.facts["train"], "cpu"), main=main, train=stage.facts["train"],
                epoch=1, session="s",
            )  # fmt: skip
        finally:  # After an error too, or its threads would go on.
            if hasattr(line, "_pending"):
                line.close()


def digests(stage):
    bucket = stage.sound("line")
    run = read_run(bucket)
    found = {}
    for version in committed_versions(bucket):
        assert load_mirror(bucket, run, at=version).version == version
        found[version] = read_manifest(bucket, run, version).digest
    return found


def audit_line(stage, _outcome):
    assert digests(stage).keys() <= {0, 1, NEWEST}, "the line numbers its versions otherwise"


def finished_line(stage, sound):
    assert digests(stage) == digests(sound)
    assert NEWEST in digests(stage), "the line lacks the newest version"


LINE_COMMAND = Command("continue a precision", line_stage, run_line, audit_line, finished_line)
