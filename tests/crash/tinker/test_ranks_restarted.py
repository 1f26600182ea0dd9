"""Tinker's own client against models that two ranks compute: the server is killed, or a rank is,
and nothing that was acknowledged is lost."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tinker_scenarios
from client_rank import run_script
from tinker_serving import PATIENCE_S, ServerProcess, make_model

from deltawire.store import open_bucket
from deltawire.sync import read_history, read_run
from deltawire.sync.maintain.fsck import check_run

pytest.importorskip("tinker")
pytestmark = [
    pytest.mark.drills,
    pytest.mark.long,
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc"),
]

ARGUMENTS = ("--ranks", "2", "--context", "64", "--slots", "8", "--samplers", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory, model):
    """The same loop by the library, on two ranks: losses and the digest of the last version."""
    folder = tmp_path_factory.mktemp("library")
    found, _ = run_script(folder, model, "plain", ranks=2, steps=60, tinker=True)
    return found["losses"], found["digests"][-1]


def loop(bucket, model, disturb):
    """Runs the scenario, and disturbs the server once the loop is halfway."""
    server = ServerProcess(bucket, model, *ARGUMENTS).start()
    try:
        command = [sys.executable, tinker_scenarios.__file__, server.url, "loop"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            try:
                until(lambda: len(list(bucket.glob("tinker/models/*/results/*"))) >= 60)
                disturb(server)
                lines, _ = client.communicate(timeout=2 * PATIENCE_S)
            finally:
                client.kill()
    finally:
        server.stop()
    facts = {}
    for line in lines.splitlines():
        with contextlib.suppress(ValueError):
            facts |= json.loads(line)
    assert "error" not in facts["loop"], facts["loop"]["error"]
    found = open_bucket(str(bucket))
    checked = check_run(found)
    assert checked.whole, checked.faults
    return facts["loop"], [one.digest for one in read_history(found, read_run(found))]


def until(condition):
    deadline = time.monotonic() + 2 * PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def restart(server):
    server.kill()
    server.start()


def kill_a_rank(server):
    agents = [one for one in children(server.pid) if b"train.client.host" in command_of(one)]
    (agent,) = agents
    ranks = {rank_of(one): one for one in children(agent)}
    assert set(ranks) == {0, 1}
    os.kill(ranks[1], signal.SIGKILL)


def children(pid):
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(one) for one in (task / "children").read_text().split()]
    return found


def command_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def rank_of(pid):
    raw = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    values = dict(one.split(b"=", 1) for one in raw if b"=" in one)
    return int(values[b"RANK"])


@pytest.mark.parametrize("disturb", [restart, kill_a_rank])
def test_nothing_that_was_acknowledged_is_lost(tmp_path, model, expected, disturb):
    facts, versions = loop(tmp_path / "bucket", model, disturb)
    losses, digest = expected
    assert facts["losses"] == losses
    assert digest in versions
    assert facts["scores"][1:] == pytest.approx(facts["trained"], abs=1e-5)
    assert len(set(versions)) == len(versions)
