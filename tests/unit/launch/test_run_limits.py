"""A session stops at its limit as at a signal, and tells a command of failures."""

import argparse
import sys
import threading
from types import SimpleNamespace

import pytest
from rich.console import Console

from deltawire.cli import run
from deltawire.cli.main import main
from deltawire.config import parse_config
from deltawire.errors import InputError, RetryError
from deltawire.launch import session
from deltawire.launch.run_limits import Deadline, StallAlarm, deadline_of, notify

TELL = (
    "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text('|'.join("
    "os.environ[f'DELTAWIRE_{name}'] for name in ('EVENT', 'RUN', 'REASON')))"
)


def telling(path):
    return f'{sys.executable} -c "{TELL}" {path}'


def executed(monkeypatch, execute, command, deadline):
    monkeypatch.setattr(session, "execute", execute)
    arguments = argparse.Namespace(notify=command, plain=True)
    job = SimpleNamespace(bucket=SimpleNamespace(url="memory://run"))
    return run._execute(arguments, job, Console(quiet=True), launcher=None, deadline=deadline)


def test_a_session_is_asked_to_stop_at_its_limit(monkeypatch, tmp_path):
    def execute(*_, deadline, **__):
        stopped = threading.Event()
        stop = SimpleNamespace(append=lambda _: stopped.set())
        deadline.start(stop)
        assert stopped.wait(60)
        deadline.cancel()

    told = tmp_path / "told"
    assert executed(monkeypatch, execute, telling(told), Deadline(0.01)) is None
    assert told.read_text() == "limit|memory://run|the limit of hours or dollars is reached"


def test_a_failure_is_told_and_stays_the_failure(monkeypatch, tmp_path):
    def execute(*_, **__):
        raise RetryError("the trainer cannot be kept running")

    told = tmp_path / "told"
    with pytest.raises(RetryError):
        executed(monkeypatch, execute, telling(told), None)
    assert told.read_text() == "failed|memory://run|the trainer cannot be kept running"
    with pytest.raises(RetryError):
        executed(monkeypatch, execute, "/no/such/program", None)


def test_nobody_is_told_of_a_signal_or_an_end(monkeypatch, tmp_path):
    told = tmp_path / "told"
    for summary in (None, "summary"):
        found = executed(monkeypatch, lambda *_, s=summary, **__: s, telling(told), Deadline(1e6))
        assert found == summary
    assert not told.exists()


def test_each_stall_is_told_once():
    now, told, heard = [0.0], [], threading.Semaphore(0)

    def tell(reason):
        told.append(reason)
        heard.release()

    alarm = StallAlarm(100.0, tell, clock=lambda: now[0])
    for at, version in ((0, None), (90, 0), (180, 0), (189, 0), (190, 0), (400, 0), (401, 1)):
        now[0] = float(at)
        alarm.observe(version)
    assert heard.acquire(timeout=60)
    now[0] = 501.0
    alarm.observe(1)
    assert heard.acquire(timeout=60)
    assert told == [f"no version after {n} for 100 s (faults.long_s)" for n in (0, 1)]


def test_a_stall_is_told_while_the_run_goes_on(monkeypatch, tmp_path):
    told = tmp_path / "told"

    def execute(*_, on_stall, **__):
        on_stall("no version after 7")
        assert told.read_text() == "stalled|memory://run|no version after 7"
        return "summary"

    assert executed(monkeypatch, execute, telling(told), None) == "summary"


def test_the_earlier_limit_counts():
    assert deadline_of(None, None, None) is None
    assert deadline_of(2.0, None, None)._limit_s == 7200
    assert deadline_of(2.0, 30.0, 20.0)._limit_s == 5400


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((0.0, None, None), "--max-hours 0.0 is no number above 0"),
        ((float("nan"), None, None), "no number above 0"),
        ((None, 5.0, None), "are given together"),
        ((None, None, 5.0), "are given together"),
    ],
)
def test_limits_that_mean_nothing(given, message):
    with pytest.raises(InputError, match=message):
        deadline_of(*given)


def test_a_wrong_limit_is_an_error_before_anything_starts(tmp_path, capsys):
    assert main(["run", "none.toml", "--max-dollars", "5"]) == 2
    assert "are given together" in capsys.readouterr().err


def test_what_became_of_the_command_is_said(tmp_path):
    words = {"event": "failed", "run": "r", "reason": "x"}
    assert notify("", **words) == ""
    assert "status 3" in notify(f'{sys.executable} -c "raise SystemExit(3)"', **words)
    assert "--notify: " in notify("/no/such/program", **words)
    assert "--notify: " in notify("'", **words)


def test_a_long_warm_start_is_no_stall(monkeypatch, tmp_path):
    """The time counts from when the processes were started."""
    order = []
    monkeypatch.setattr(session, "find_run", lambda _: None)
    monkeypatch.setattr(session, "check_start", lambda _: None)
    monkeypatch.setattr(session, "_make_model", lambda *_: order.append("model made") or True)
    monkeypatch.setattr(session, "_start_all", lambda *_: order.append("processes started"))
    monkeypatch.setattr(session, "last_status", lambda _: SimpleNamespace(phase="training"))

    def alarm(limit_s, report):
        order.append(f"counting to {limit_s:.0f} s")
        return StallAlarm(limit_s, report)

    monkeypatch.setattr(session, "StallAlarm", alarm)
    config = parse_config({"name": "slow", "faults": {"long_s": 900.0}}, source="test")
    job = session.Job(config, tmp_path / "c.toml", None, tmp_path, None)
    supervisor = SimpleNamespace(start=lambda: None, check=lambda: True)
    assert session._stages(job, supervisor, None, [], print) is None
    assert order == ["model made", "processes started", "counting to 900 s"]
