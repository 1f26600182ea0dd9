"""A run goes from `deltawire run` to a client's own loop and back, to the same bits."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import msgspec
import pytest
import torch
from granted_groups import made_up_group, start_with_groups

from deltawire.config import BuildConfig
from deltawire.errors import InputError
from deltawire.export.models import empty_model, fetch_model_files
from deltawire.rl.trainer.trainer import Trainer
from deltawire.rl.trainer.verify_training import verify_training
from deltawire.runtime.process import Process, open_run
from deltawire.store import Bucket, open_bucket
from deltawire.sync import read_history, read_manifest, read_run
from deltawire.train import AdamParams, Datum, ModelInput, TrainingClient
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.status import TrainerStatus

SIZES = BuildConfig(hidden_size=32, layers=1, head_size=16, feed_forward_size=48, context=64)
TRAIN = {"versions": 4, "groups_per_step": 1, "max_staleness": 100, "checkpoint_every": 2}


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """A bucket with a run at version 0, and groups for four steps."""
    folder = tmp_path_factory.mktemp("handover")
    start_with_groups(
        folder, groups=4, train=TRAIN, group=lambda n: made_up_group(n, tokens=5, episodes=2)
    )
    return folder / "bucket"


@pytest.fixture
def bucket(begun, tmp_path) -> Bucket:
    shutil.copytree(begun, tmp_path / "bucket")
    return open_bucket(str(tmp_path / "bucket"))


def manage(bucket: Bucket, *, to: int) -> None:
    """Train as ``deltawire run`` does, up to a version."""
    run, config = open_run(bucket)
    config = msgspec.structs.replace(
        config, train=msgspec.structs.replace(config.train, versions=to)
    )
    with fetch_model_files(bucket, run) as folder:
        model = empty_model(Path(folder))
    Trainer(Process(bucket, "trainer", "trainer", supervised=False), run, config, model).loop()


def step(client: TrainingClient) -> None:
    data = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})
    client.forward_backward([data], "cross_entropy")
    client.optim_step(AdamParams(learning_rate=1e-3))
    client.save_weights_for_sampler().result()


def digests(bucket: Bucket) -> list[str]:
    run = read_run(bucket)
    return [m.digest for m in [read_manifest(bucket, run, 0), *read_history(bucket, run)]]


def test_a_visit_changes_nothing(bucket, begun, tmp_path) -> None:
    shutil.copytree(begun, tmp_path / "whole")
    whole = open_bucket(str(tmp_path / "whole"))
    manage(whole, to=4)
    manage(bucket, to=3)
    with TrainingClient.load(bucket.url) as client:
        assert client.version == 3
        client.forward(
            [Datum(ModelInput.from_ints([1]), {"target_tokens": [2]})], "cross_entropy"
        ).result()
    manage(bucket, to=4)
    assert digests(bucket) == digests(whole)


def test_managed_then_a_loop_then_managed(bucket, begun, tmp_path) -> None:
    """The optimizer's state crosses both times, and no group is consumed twice."""
    manage(bucket, to=2)
    with TrainingClient.load(bucket.url) as client:
        step(client)
        step(client)
    manage(bucket, to=6)
    # The same, but with the client closed and opened between its two steps, and a copied bucket.
    shutil.copytree(begun, tmp_path / "again")
    again = open_bucket(str(tmp_path / "again"))
    torch.manual_seed(time.monotonic_ns() % 2**31)
    manage(again, to=2)
    for _ in range(2):
        with TrainingClient.load(again.url) as client:
            step(client)
    manage(again, to=6)
    found = digests(bucket)
    assert found == digests(again)
    assert len(set(found)) == 7


def test_a_loop_outranks_a_trainer_that_published_nothing(bucket) -> None:
    manage(bucket, to=1)
    run = read_run(bucket)
    newest = read_manifest(bucket, run, 1).epoch
    status = TrainerStatus(
        phase="training", version=1, digest="", epoch=newest + 5, credits={}, at=0.0
    )
    bucket.put(keys.TRAINER, encode_json(status))
    with TrainingClient.load(bucket.url) as client:
        step(client)
    assert read_manifest(bucket, run, 2).epoch == newest + 6


def test_a_loop_that_saved_no_state_is_named(bucket) -> None:
    client = TrainingClient.load(bucket.url)
    step(client)
    client.close(save=False)
    with pytest.raises(InputError, match="client"):
        manage(bucket, to=3)
    with TrainingClient.load(bucket.url, lost_state="reset"):
        pass
    manage(bucket, to=3)
    with pytest.raises(InputError, match="not made from groups"):
        verify_training(bucket)
