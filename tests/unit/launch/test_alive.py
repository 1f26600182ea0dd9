"""A probe replaces processes that are silent or hang, and none in an outage of the store."""

import json
import time

import pytest

from deltawire.cli.main import main
from deltawire.errors import RetryError
from deltawire.launch import alive
from deltawire.launch.alive import examine_process
from deltawire.store import open_bucket
from deltawire.wire import keys
from deltawire.wire.decider_state import DeciderState
from deltawire.wire.objects import encode_json
from deltawire.wire.status import Heartbeat


def beat(bucket, *, at=1000.0, quiet_s=0.0, ended=False):
    heartbeat = Heartbeat(
        process="w0", role="worker", nonce="n", lease=0, supervised=False, host="h", pid=1,
        started_at=0.0, at=at, number=3, doing="sample", quiet_s=quiet_s, allowed_s=60.0,
        ended=ended,
    )  # fmt: skip
    bucket.put(keys.heartbeat("w0"), encode_json(heartbeat))


@pytest.mark.parametrize(
    ("seconds", "quiet_s", "ended", "state"),
    [
        (1.0, 0.0, False, "alive"),
        (29.0, 0.0, False, "alive"),
        (31.0, 0.0, False, "silent"),
        (1.0, 61.0, False, "stalled"),
        (9999.0, 61.0, True, "ended"),
        (-50.0, 0.0, False, "alive"),
    ],
)
def test_one_heartbeat_decides(seconds, quiet_s, ended, state, tmp_path):
    beat(open_bucket(tmp_path), quiet_s=quiet_s, ended=ended)
    found = examine_process(str(tmp_path), "w0", silence_s=30.0, now=1000.0 + seconds)
    assert found.state == state
    assert bool(found.reason) == (state in ("silent", "stalled"))


def test_exit_codes_are_what_a_probe_needs(tmp_path, capsys):
    bucket = open_bucket(tmp_path)
    assert main(["alive", str(tmp_path), "w0"]) == 12  # No heartbeat yet: a probe waits before.
    beat(bucket)
    assert main(["alive", str(tmp_path), "w0", "--json"]) == 12
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["state"] == "silent"
    beat(bucket, at=time.time())
    assert main(["alive", str(tmp_path), "w0", "--silence", "1e6"]) == 0
    assert "w0: alive" in capsys.readouterr().out
    assert main(["alive", str(tmp_path), "../x"]) == 2
    assert main(["alive", str(tmp_path), "w0", "--silence", "0"]) == 2


@pytest.mark.parametrize(
    ("seconds", "ended", "state"),
    [(1.0, False, "alive"), (31.0, False, "silent"), (9999.0, True, "ended")],
)
def test_a_decider_is_examined_by_its_own_state(seconds, ended, state, tmp_path):
    found = examine_process(str(tmp_path), "decider", silence_s=30.0, now=1000.0)
    assert found.state == "silent"
    state_of = DeciderState(run="0" * 32, by="ann", host="h", at=1000.0, ended=ended)
    open_bucket(tmp_path).put(keys.LIVE_DECIDER, encode_json(state_of))
    found = examine_process(str(tmp_path), "decider", silence_s=30.0, now=1000.0 + seconds)
    assert found.state == state
    assert bool(found.reason) == (state == "silent")


def test_an_outage_replaces_nobody(tmp_path, monkeypatch):
    def fail(*_):
        raise RetryError("the store does not answer")

    monkeypatch.setattr(alive, "read_heartbeat", fail)
    open_bucket(tmp_path)
    assert examine_process(str(tmp_path), "w0").state == "unknown"
    assert main(["alive", str(tmp_path), "w0"]) == 0
