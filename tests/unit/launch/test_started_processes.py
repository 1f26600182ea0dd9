"""The processes that ``deltawire run`` starts, by its configuration."""

from types import SimpleNamespace

import pytest

from deltawire.config import parse_config
from deltawire.launch import session
from deltawire.store import RetryingBucket, RetryPolicy, open_bare_bucket, open_bucket
from deltawire.testing.faulty import FaultyBucket
from deltawire.wire import keys
from deltawire.wire.status import TrainerStatus


class Recording:
    """A supervisor that starts nothing."""

    def __init__(self):
        self.names = []

    def add(self, name, role, arguments):
        del role, arguments
        self.names.append(name)

    def check(self):
        return False


@pytest.mark.parametrize(
    ("settings", "others"),
    [
        ({}, ["w0", "w1", "evaluator"]),
        ({"evaluate": {"every": 0}}, ["w0", "w1"]),
        ({"rollout": {"workers": 0}}, ["evaluator"]),
        ({"reference": {"mode": "process"}, "train": {"loss": {"kl": "k3"}}},
         ["w0", "w1", "reference", "evaluator"]),
    ],
)  # fmt: skip
def test_each_process_is_started_only_if_it_is_configured(tmp_path, settings, others):
    config = parse_config({"name": "x", **settings}, source="test")
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    job = session.Job(config, tmp_path / "x.toml", None, tmp_path, bucket)
    supervisor = Recording()
    session._start_all(job, supervisor, SimpleNamespace(tick=lambda: None), [])
    assert supervisor.names == ["trainer", *others]


def sleepless_job(tmp_path):
    """A job whose bucket fails on command, and whose retries must not wait."""
    faulty = FaultyBucket(open_bare_bucket("memory://"))
    policy = RetryPolicy(sleep=lambda _: pytest.fail("waited for the store"))
    config = parse_config({"name": "x"}, source="test")
    bucket = RetryingBucket(faulty, policy)
    return session.Job(config, tmp_path / "x.toml", None, tmp_path, bucket), faulty


def test_an_outage_at_the_start_is_waited_out_in_ticks(tmp_path):
    job, faulty = sleepless_job(tmp_path)
    faulty.fail("get", keys.TRAINER, times=3)
    ticks, supervisor = [], Recording()
    watcher = SimpleNamespace(tick=lambda: ticks.append(supervisor.names.copy()))
    session._start_all(job, supervisor, watcher, [])
    assert ticks == [["trainer"]] * 3
    assert "w0" in supervisor.names


def test_an_interrupt_is_heeded_during_an_outage_at_the_start(tmp_path):
    job, faulty = sleepless_job(tmp_path)
    faulty.fail("get", keys.TRAINER, times=None)
    supervisor, stop = Recording(), []
    session._start_all(job, supervisor, SimpleNamespace(tick=lambda: stop.append(2)), stop)
    assert supervisor.names == ["trainer"]


def test_the_audit_at_the_end_ticks_during_an_outage(tmp_path, monkeypatch):
    job, faulty = sleepless_job(tmp_path)
    status = TrainerStatus(phase="finished", version=0, digest="", epoch=0, credits={}, at=0.0)
    for name, answer in (
        ("find_run", None), ("check_start", None), ("_make_model", True), ("_start_all", None),
        ("last_status", status), ("served_status", status),
    ):  # fmt: skip
        monkeypatch.setattr(session, name, lambda *_, answer=answer: answer)
    faulty.fail("list", times=3)
    ticks = []
    watcher = SimpleNamespace(tick=lambda: ticks.append(1), state=SimpleNamespace(version=0))
    supervisor = SimpleNamespace(start=int, check=lambda: True, running=lambda: False)
    assert session._stages(job, supervisor, watcher, [], lambda _: None) == []
    assert len(ticks) == 3
