"""A trainer that dies between two optimizer steps of one version makes the same version again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from granted_groups import start_with_groups

from deltawire.config import OptimizerConfig
from deltawire.export.models import empty_model, fetch_model_files
from deltawire.rl.trainer.trainer import Trainer
from deltawire.rl.trainer.verify_training import verify_training
from deltawire.runtime.fleet import read_trainer
from deltawire.runtime.process import Process, open_run
from deltawire.store import Bucket, open_bucket
from deltawire.sync import read_history, read_manifest
from deltawire.train.checkpoint_folders import checkpoint_versions
from deltawire.train.masters import MasterWeights
from deltawire.train.policy import TrainedPolicy

VERSIONS, GROUPS, MINIBATCHES = 3, 4, 2


class Killed(BaseException):
    """The end of the process, at any moment."""


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("minibatches")
    begin(folder, MINIBATCHES, checkpoint_every=1)
    return folder / "bucket"


def begin(folder: Path, minibatches: int, *, checkpoint_every: int) -> Bucket:
    train = {
        "versions": VERSIONS,
        "groups_per_step": GROUPS,
        "minibatches": minibatches,
        "max_staleness": 100,
        "max_tokens_per_batch": 64,  # Several micro-batches.
        "checkpoint_every": checkpoint_every,
        "optimizer": {"learning_rate": 1e-2, "kind": "adamw"},
        "schedule": {"warmup_steps": 1},
    }
    return start_with_groups(folder, groups=GROUPS * VERSIONS, train=train)


def copied(begun: Path, folder: Path) -> Bucket:
    shutil.copytree(begun, folder)
    return open_bucket(str(folder))


def trainer_of(bucket: Bucket) -> Trainer:
    torch.set_num_threads(1)
    run, config = open_run(bucket)
    with fetch_model_files(bucket, run) as folder:
        model = empty_model(Path(folder))
    return Trainer(Process(bucket, "trainer", "trainer", supervised=False), run, config, model)


def digests(bucket: Bucket) -> list[str]:
    run, _ = open_run(bucket)
    return [m.digest for m in [read_manifest(bucket, run, 0), *read_history(bucket, run)] if m]


def dies_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the process end right after an optimizer step; returns what takes that back."""
    honest: Any = MasterWeights.step
    count = [0]

    def counted(self: MasterWeights, *args: Any, **named: Any) -> float:
        norm: float = honest(self, *args, **named)
        count[0] += 1
        if count[0] == step:
            raise Killed
        return norm

    monkeypatch.setattr(MasterWeights, "step", counted)
    return lambda: monkeypatch.setattr(MasterWeights, "step", honest)


def test_a_death_between_two_optimizer_steps_changes_no_bit(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = copied(begun, tmp_path / "whole")
    trainer = trainer_of(whole)
    trainer.loop()
    assert trainer.masters.steps == VERSIONS * MINIBATCHES
    wanted = digests(whole)
    assert len(set(wanted)) == VERSIONS + 1
    for step in range(1, VERSIONS * MINIBATCHES + 1):
        bucket = copied(begun, tmp_path / f"killed {step}")
        restore = dies_at(step, monkeypatch)
        with pytest.raises(Killed):
            trainer_of(bucket).loop()
        restore()
        made = len(digests(bucket)) - 1
        assert made <= (step - 1) // MINIBATCHES, "half a version was published"
        again = trainer_of(bucket)
        assert again.masters.steps % MINIBATCHES == 0
        again.loop()
        assert digests(bucket) == wanted
    assert verify_training(bucket).exact


def test_minibatches_are_several_steps_and_not_one(begun: Path, tmp_path: Path) -> None:
    """Otherwise the test above would hold for a step that ignores the setting."""
    bucket = copied(begun, tmp_path / "bucket")
    trainer = trainer_of(bucket)
    assert trainer.config.train.minibatches == MINIBATCHES
    assert isinstance(trainer.config.train.optimizer, OptimizerConfig)
    trainer.loop()
    assert trainer.masters.steps == MINIBATCHES * VERSIONS


@pytest.mark.parametrize("minibatches", [1, MINIBATCHES])
def test_a_trainer_asked_to_stop_in_a_step_leaves_its_groups_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minibatches: int
) -> None:
    """It ends between two micro-batches, with a checkpoint and a status of the version before."""
    bucket, whole = begin(tmp_path, minibatches, checkpoint_every=100), tmp_path / "whole"
    shutil.copytree(tmp_path / "bucket", whole)
    trainer_of(open_bucket(str(whole))).loop()
    wanted = digests(open_bucket(str(whole)))
    assert len(set(wanted)) == VERSIONS + 1
    trainer = trainer_of(bucket)
    honest: Any = TrainedPolicy.terms

    def slow(self: TrainedPolicy, *given: Any) -> Any:
        if trainer.version == 1:
            assert not trainer.process.stopping, "it goes on"
            trainer.process.stop()
        return honest(self, *given)

    monkeypatch.setattr(TrainedPolicy, "terms", slow)
    trainer.loop()
    monkeypatch.setattr(TrainedPolicy, "terms", honest)
    status = read_trainer(bucket)
    assert status is not None
    assert (status.phase, status.version) == ("stopped", 1)
    assert checkpoint_versions(bucket) == [1]
    trainer_of(bucket).loop()
    assert digests(bucket) == wanted
