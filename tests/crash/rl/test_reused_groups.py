"""Groups whose episodes share a beginning are consumed like others: after a crash to the same bits,
and groups with reuse that the run does not have are dropped."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from granted_groups import made_up_group, start_with_groups

from deltawire.errors import CorruptError
from deltawire.events import Step
from deltawire.export.models import empty_model, fetch_model_files
from deltawire.rl.control.rollout_reader import Bounds, read_group
from deltawire.rl.evaluate.audit import audit_consumption
from deltawire.rl.trainer.trainer import Trainer
from deltawire.rl.trainer.verify_training import verify_training
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.process import Process, open_run
from deltawire.store import Bucket, open_bucket
from deltawire.sync import read_history, read_run
from deltawire.wire.rollouts import Group, Reuse

SHARED = 3
TRAIN = {"versions": 3, "groups_per_step": 2, "max_staleness": 100, "checkpoint_every": 2}
REUSING = {"max_turns": 2, "group_size": 4, "max_tokens": 8}


def reusing_group(number: int) -> Group:
    """Episode 1 continues from episode 0, and episode 3 from episode 2."""
    group = made_up_group(number)
    every = list(group.trajectories)
    for place in (1, 3):
        source, own = every[place - 1], every[place]
        parts = {}
        for name in ("tokens_T", "logprobs_T", "versions_T", "mask_T"):
            parts[name] = getattr(own, name).copy()
            parts[name][:SHARED] = getattr(source, name)[:SHARED]
        parts["mask_T"][:SHARED] = 0
        every[place] = replace(own, **parts, reuse=Reuse(place - 1, SHARED))
    return replace(group, trajectories=every)


def trained(bucket: Bucket, *, to: int = 3, die: bool = False) -> list[str]:
    """Trains up to a version; what dies leaves no checkpoint of its end."""
    torch.set_num_threads(1)
    run, config = open_run(bucket)
    train = msgspec.structs.replace(config.train, versions=to)
    config = msgspec.structs.replace(config, train=train)
    with fetch_model_files(bucket, run) as folder:
        model = empty_model(Path(folder))
    process = Process(bucket, "trainer", "trainer", supervised=False)
    trainer = Trainer(process, run, config, model)
    if die:
        trainer._finish = trainer.publisher.close  # type: ignore[method-assign]
    trainer.loop()
    process.events.flush()
    return [one.digest for one in read_history(bucket, read_run(bucket))]


def begun(folder: Path, train: str, **rollout: Any) -> Bucket:
    rollout = {**REUSING, "reuse": {"episodes": 2, "train": train}, **rollout}
    start_with_groups(folder, groups=6, train=TRAIN, group=reusing_group, rollout=rollout)
    return open_bucket(str(folder / "bucket"))


def steps_of(bucket: Bucket) -> list[Step]:
    return [one for one in EventTail(bucket).read(everything=True) if isinstance(one, Step)]


def test_after_a_crash_the_same_bits(tmp_path) -> None:
    bucket = begun(tmp_path, "once")
    shutil.copytree(tmp_path / "bucket", tmp_path / "again")
    whole = trained(bucket)
    again = open_bucket(str(tmp_path / "again"))
    trained(again, to=1, die=True)
    assert trained(again) == whole
    assert verify_training(again).exact
    audited = audit_consumption(again)
    assert (audited.consumed, audited.repeated, audited.lost) == (6, 0, 0)
    steps = steps_of(bucket)
    assert {one.reused_length for one in steps} == {2 * SHARED / 4}
    assert {one.tokens for one in steps} == {2 * (4 * 6 - 2 * SHARED)}


def test_told_to_the_run_trains_on_shared_tokens_with_every_episode(tmp_path) -> None:
    bucket = begun(tmp_path, "every")
    trained(bucket, to=1)
    assert [one.tokens for one in steps_of(bucket)] == [2 * 4 * 6]
    assert verify_training(bucket, last=1).exact


def test_a_run_without_reuse_drops_such_groups(tmp_path) -> None:
    bucket = begun(tmp_path, "once", reuse={})
    _, config = open_run(bucket)
    with pytest.raises(CorruptError, match="does not share its beginning"):
        read_group(bucket, "w0", 0, bounds=Bounds.of(config, 300))
    assert read_group(bucket, "w0", 0) is not None
