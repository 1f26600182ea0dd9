"""A trainer dies between a pilot and its fill: the stored pilot is used, and counted once."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from granted_groups import SECRET, made_up_group, start_with_groups
from heartbeats import put_heartbeat

from deltawire.events import Allocated
from deltawire.export.models import empty_model, fetch_model_files
from deltawire.rl.control.challenges import nonce_of
from deltawire.rl.evaluate.audit import audit_consumption
from deltawire.rl.trainer.resume import metadata_at
from deltawire.rl.trainer.trainer import Trainer
from deltawire.rl.trainer.verify_training import verify_training
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.fleet import read_trainer
from deltawire.runtime.process import Process, open_run
from deltawire.store import Bucket, open_bucket
from deltawire.sync import read_run
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.rollouts import encode_group
from deltawire.wire.status import Challenge

ALLOCATION = {"policy": "pilot", "pilot": 2, "largest": 6}
TRAIN = {"versions": 2, "groups_per_step": 1, "max_staleness": 2, "checkpoint_every": 1}


def trainer_of(bucket: Bucket) -> Trainer:
    torch.set_num_threads(1)
    run, config = open_run(bucket)
    process = Process(bucket, "trainer", "trainer", supervised=False)
    with fetch_model_files(bucket, run) as folder:
        model = empty_model(Path(folder))
    return Trainer(process, run, config, model)


def begun(bucket: Bucket) -> Trainer:
    """A trainer that has read what is stored, decided, and granted."""
    trainer = trainer_of(bucket)
    trainer.begin()
    trainer.turn()
    return trainer


def killed(trainer: Trainer) -> None:
    """Nothing that a trainer does at its end happens; its threads must not outlive the test."""
    trainer._ended = True
    trainer.close()


def draws(bucket: Bucket) -> dict[int, tuple[int, int, int]]:
    """By number, the position, the size and the part that w0 was granted."""
    found = read_trainer(bucket).draws["w0"][0]
    places = zip(found.positions, found.sizes, found.parts, strict=True)
    return dict(zip(found.numbers, places, strict=True))


def deliver(bucket: Bucket, sequence: int, number: int, *, same: bool = False) -> None:
    """Stores the group that was granted as ``number``; its rewards alternate, or are ``same``."""
    position, size, _ = draws(bucket)[number]
    group = made_up_group(position, episodes=size)
    if same:
        for one in group.trajectories:
            object.__setattr__(one, "reward", 1.0)
    object.__setattr__(group, "nonce", nonce_of(SECRET, 0, number))
    bucket.put(keys.rollout("w0", sequence), encode_group(group))
    put_heartbeat(bucket, "w0", stored=sequence + 1, first=0, at=time.time())


def test_a_pilot_is_neither_lost_nor_counted_twice(tmp_path):
    bucket = start_with_groups(
        tmp_path, groups=0, train=TRAIN, rollout={"group_size": 4, "allocation": ALLOCATION}
    )
    bucket = open_bucket(str(tmp_path / "bucket"))
    bucket.put(keys.challenge("w0"), encode_json(Challenge(worker="w0", secret=SECRET)))
    put_heartbeat(bucket, "w0", stored=0, first=0, at=time.time())
    killed(begun(bucket))
    assert draws(bucket)[0] == (0, 2, 0)
    deliver(bucket, 0, 1)  # A pilot with a gradient.
    deliver(bucket, 1, 0, same=True)  # One that succeeds always: it is skipped.
    killed(begun(bucket))  # It granted the fill, and dies.
    fills = {number: one for number, one in draws(bucket).items() if one[2]}
    assert list(fills.values()) == [(1, 4, 1)]
    trainer = begun(bucket)
    assert {number: one for number, one in draws(bucket).items() if one[2]} == fills, "granted once"
    deliver(bucket, 2, *fills)
    while trainer.version < 1:
        trainer.turn()
    trainer.publisher.flush()
    trainer.process.events.flush()
    run = read_run(bucket)
    metadata, _ = metadata_at(bucket, run, 1)
    assert metadata.consumed == [("w0", 0), ("w0", 2)]
    assert metadata.parts == [2]
    assert metadata.dropped == [("w0", 1, 1)]
    verdicts = {one.position: (one.verdict, one.pilot, one.completions) for one in metadata.prompts}
    assert verdicts == {0: ("skip", 2, 2), 1: ("train", 2, 6)}
    killed(trainer)
    trainer = begun(bucket)  # The next one knows what the manifest says.
    assert trainer.version == 1
    assert trainer.buffer.waiting == 0
    assert len([one for one in draws(bucket).values() if one[0] in (0, 1)]) == 0
    killed(trainer)
    assert verify_training(bucket, last=1).exact
    audited = audit_consumption(bucket)
    assert (audited.consumed, audited.repeated) == (2, 0)
    found = EventTail(bucket).read(everything=True)
    events = [one for one in found if isinstance(one, Allocated)]
    assert [(one.judged, one.trained, one.skipped, one.completions) for one in events] == [
        (2, 1, 1, {"6": 1})
    ]
    assert events[0].saved_tokens == 2 * 6  # Two completions of six tokens were not drawn.
