"""The trainer's own view of groups that fail: go on, or stop after so many in a row."""

from types import SimpleNamespace

import pytest

from deltawire.config import RunConfig, TrainConfig
from deltawire.errors import InputError
from deltawire.rl.control.worker_guard import WorkerGuard
from deltawire.rl.trainer.trainer import Trainer
from deltawire.store import open_bucket


def trainer(limit, failed):
    found = Trainer.__new__(Trainer)
    found.config = RunConfig(name="t", train=TrainConfig(max_failed_groups=limit))
    found.buffer = SimpleNamespace(
        failed=failed, failing={"w0"}, failure="step took longer than 120 s"
    )
    found.guard = WorkerGuard(open_bucket("memory://"), found.config)
    found.bucket = SimpleNamespace(url="memory://")
    found.version = 7
    return found


@pytest.mark.parametrize(("limit", "failed"), [(0, 10**6), (5, 4), (1, 0)])
def test_a_run_continues_below_the_failure_limit(limit, failed):
    trainer(limit, failed)._stop_if_all_fail()


def test_a_broken_environment_stops_the_run_with_its_cause():
    with pytest.raises(InputError, match="5 groups in a row failed") as caught:
        trainer(5, 5)._stop_if_all_fail()
    assert "step took longer than 120 s" in str(caught.value)
    assert "max_failed_groups" in caught.value.hint
