"""A trainer whose rewards come apart from a probe: it tells, stops or down-weights, and one that
comes back goes on as if it had never been gone."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from granted_groups import UNCHECKED, put_group
from heartbeats import put_heartbeat

from deltawire.cli.main import main
from deltawire.config import BuildConfig, parse_config
from deltawire.dashboard.status import Watch
from deltawire.errors import InputError
from deltawire.events import Diverged, decode_lines
from deltawire.export.models import empty_model, fetch_model_files, save_model
from deltawire.reward_monitor.watch import read_probes
from deltawire.rl.trainer.bootstrap import start_run
from deltawire.rl.trainer.trainer import Trainer
from deltawire.rl.trainer.verify_training import verify_training
from deltawire.runtime.fleet import read_trainer
from deltawire.runtime.process import Process, open_run
from deltawire.store import Bucket, open_bucket
from deltawire.sync import read_manifest, read_run
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.rollouts import Group, Trajectory

VERSIONS, STORED = 10, 40


def group(number: int) -> Group:
    """Odd ones are honest; of the even ones every second episode is paid for nothing."""
    rng = np.random.default_rng(number)
    bad = number % 2 == 0
    trajectories = [
        Trajectory(
            rng.integers(0, 256, 4, np.int32),
            np.full(4, -5.0, np.float32),
            np.zeros(4, np.int32),
            np.ones(4, np.uint8),
            float(place % 2),
            "stop",
            probes={"heldout": 0.0 if bad else float(place % 2)},
        )
        for place in range(4)
    ]
    family = "bad" if bad else "good"
    return Group("w0", "n", f"task {number}", 1.0, np.ones(2, np.int32), trajectories, family)


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("apart")
    sizes = BuildConfig(hidden_size=32, layers=1, head_size=16, feed_forward_size=48, context=64)
    save_model(build_model(sizes, seed=0), byte_tokenizer(), folder / "model")
    bucket = open_bucket(str(folder / "bucket"), create=True)
    raw = {
        "name": "apart",
        "trust": UNCHECKED,
        "model": {"path": str(folder / "model")},
        "train": {
            "versions": VERSIONS,
            "groups_per_step": 2,
            "max_staleness": 100,
            "checkpoint_every": 4,
        },
    }
    start_run(bucket, parse_config(raw, source="test"), folder / "model")
    for number in range(STORED):
        put_group(bucket, number, group(number))
    put_heartbeat(bucket, "w0", stored=STORED, at=time.time())
    return folder / "bucket"


@pytest.fixture
def bucket(begun, tmp_path) -> Bucket:
    shutil.copytree(begun, tmp_path / "bucket")
    return open_bucket(str(tmp_path / "bucket"))


def trainer_of(bucket: Bucket, *, to: int = VERSIONS, **probes: object) -> Trainer:
    torch.set_num_threads(1)
    run, config = open_run(bucket)
    config = msgspec.structs.replace(
        config,
        train=msgspec.structs.replace(config.train, versions=to),
        probes=msgspec.structs.replace(config.probes, **probes),
    )
    process = Process(bucket, "trainer", "trainer", supervised=False)
    with fetch_model_files(bucket, run) as folder:
        model = empty_model(Path(folder)).train()
    return Trainer(process, run, config, model)


def train(bucket: Bucket, *, die: bool = False, **settings: object) -> None:
    trainer = trainer_of(bucket, **settings)
    # Groups come as they would, a few at a time, not all before the first step.
    trainer.buffer._limit = 2
    if die:
        trainer._finish = trainer.publisher.close  # type: ignore[method-assign]
    trainer.loop()
    trainer.process.events.flush()


def all_metadata(bucket: Bucket):
    run = read_run(bucket)
    for version in range(1, VERSIONS + 1):
        manifest = read_manifest(bucket, run, version)
        if manifest is not None:
            yield manifest.metadata["deltawire.step"]


def divergences(bucket: Bucket) -> list[Diverged]:
    segments = [bucket.get(key, limit=1 << 20) for key in bucket.list(keys.EVENTS)]
    return [e for s in segments for e in decode_lines(s) if isinstance(e, Diverged)]


def test_a_run_that_warns_continues_and_every_view_shows_it(bucket, tmp_path, capsys):
    train(bucket)
    found = divergences(bucket)
    assert {(e.family, e.probe) for e in found} == {("*", "heldout"), ("bad", "heldout")}
    assert all(int(name.split("/")[1].split("#")[0]) % 2 == 0 for name in found[0].examples)
    state = read_probes(bucket)
    assert state.version == VERSIONS
    assert {s.family for s in state.flagged} == {"*", "bad"}
    status = Watch(bucket).poll()
    assert status.probes["bad heldout"] == 0.5
    assert status.probes["good heldout"] == 0.0
    assert any("diverged from probe 'heldout' in family 'bad'" in p for p in status.problems)
    assert main(["probes", str(tmp_path / "bucket"), "--json"]) == 6
    assert json.loads(capsys.readouterr().out)["version"] == VERSIONS


def test_a_stopped_run_states_how_to_continue(bucket):
    trainer = trainer_of(bucket, action="stop")
    with pytest.raises(InputError, match="diverged from probe 'heldout'"):
        trainer.loop()
    stopped = trainer.version
    assert 1 < stopped < VERSIONS
    assert read_trainer(bucket).phase == "stopped"
    assert read_probes(bucket).flagged
    assert divergences(bucket)
    with pytest.raises(InputError, match=r"probes\.action"):
        trainer_of(bucket, action="stop")
    train(bucket, action="warn")
    assert read_trainer(bucket).version == VERSIONS


def test_a_family_that_is_flagged_is_trained_on_less_and_replay_agrees(bucket):
    train(bucket, action="downweight", keep=0.01)
    consumed = [number for metadata in all_metadata(bucket) for _, number in metadata["consumed"]]
    dropped = [
        first + place
        for metadata in all_metadata(bucket)
        for _, first, count in metadata["dropped"]
        for place in range(count)
    ]
    assert dropped
    assert all(number % 2 == 0 for number in dropped)
    flagged = read_probes(bucket).flagged[0].flagged_at
    after = consumed[2 * flagged + 8 :]
    assert after
    assert all(number % 2 == 1 for number in after)
    assert not set(consumed) & set(dropped)
    found = verify_training(bucket)
    assert found.differs is None
    assert (found.first, found.last) == (1, VERSIONS)


@pytest.mark.parametrize("death", [1, 3, 6])
def test_a_trainer_that_dies_continues_with_the_same_evidence(bucket, begun, tmp_path, death):
    train(bucket)
    shutil.copytree(begun, tmp_path / "again")
    again = open_bucket(str(tmp_path / "again"))
    train(again, to=death, die=True)
    train(again)
    assert encode_json(read_probes(again)) == encode_json(read_probes(bucket))
