"""A version that cannot be committed stops a trainer that waits for groups."""

import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from granted_groups import start_with_groups

from deltawire.errors import DeltawireError, InputError
from deltawire.export.models import empty_model, fetch_model_files
from deltawire.rl.trainer.trainer import Trainer
from deltawire.runtime.process import Process, open_run
from deltawire.wire import keys


def turn_until(trainer, condition):
    deadline = time.monotonic() + 100
    while not condition(trainer.turn()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_trainer_without_groups_learns_that_its_version_was_refused(tmp_path):
    torch.set_num_threads(1)
    train = {"versions": 100, "groups_per_step": 1, "max_staleness": 0}
    bucket = start_with_groups(tmp_path, groups=1, train=train)
    run, config = open_run(bucket)
    process = Process(bucket, "trainer", "trainer", supervised=False)
    with fetch_model_files(bucket, run) as folder:
        trainer = Trainer(process, run, config, empty_model(Path(folder)))
    try:
        trainer.begin()
        bucket.put(keys.manifest(1), b"somebody's object")
        turn_until(trainer, bool)
        # The version consumed its only group, so no other step would tell it.
        with pytest.raises(InputError, match="unreadable object has this version's name"):
            turn_until(trainer, lambda _: False)
    finally:
        with suppress(DeltawireError):
            trainer.close()
