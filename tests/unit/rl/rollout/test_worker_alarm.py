"""A worker that passes over a manifest reports it in its heartbeat and in its line of progress."""

from types import SimpleNamespace

from deltawire.codec import ZERO
from deltawire.errors import CorruptError
from deltawire.rl.rollout.worker import Worker
from deltawire.wire.objects import decode_json, encode_json
from deltawire.wire.status import MAX_ALARM, WorkerStatus


def worker_with(alarm: CorruptError | None, lines: list[str]) -> Worker:
    worker = Worker.__new__(Worker)
    worker.phase, worker.attested = "sampling", None
    worker.served = SimpleNamespace(live=SimpleNamespace(version=3, digest=ZERO))
    worker.link = SimpleNamespace(status=None, alarm=None)
    worker.uploader = SimpleNamespace(stored=7)
    worker.follower = SimpleNamespace(alarm=alarm)
    worker._first, worker._episodes, worker._tokens = 0, 5, 321
    worker._failures = SimpleNamespace(count=0)
    worker._report = lines.append
    return worker


def test_an_alarm_is_reported():
    lines: list[str] = []
    worker = worker_with(CorruptError("not a valid manifest " + "x" * 5000, version=4), lines)
    status = worker._status()
    assert (status.episodes, status.tokens) == (5, 321)
    assert status.alarm.startswith("not a valid manifest")
    assert len(status.alarm) == MAX_ALARM
    assert decode_json(encode_json(status), WorkerStatus, run="r", key="k") == status
    worker.report_progress()
    assert "warning: passed over an object: not a valid manifest" in lines[0]


def test_no_alarm_is_no_warning():
    lines: list[str] = []
    worker = worker_with(None, lines)
    assert worker._status().alarm == ""
    worker.report_progress()
    assert lines == ["version 3, lag 0, 7 groups stored, sampling"]
