"""`deltawire run` trains two adapters over one base, on tasks of their own; a worker is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_config
from killing import run_and_kill_a_worker

from deltawire.codec import Digest
from deltawire.rl.control.rollout_reader import read_group
from deltawire.runtime.fleet import known_trainer
from deltawire.runtime.heartbeat import read_heartbeat
from deltawire.runtime.lines import line_bucket
from deltawire.store import open_bucket
from deltawire.sync import newest_version, read_history, read_run
from deltawire.wire.ledger import CommitMetadata

pytestmark = [pytest.mark.drills, pytest.mark.long, pytest.mark.timeout(300)]

VERSIONS = 6
CONFIG = f"""
name = "two"
{tiny_config.MODEL}[task]
environment = "dataset"
prompt = "{{question}}"
heldout = 1
[task.data]
path = "sums.jsonl"
answer = "answer"
{tiny_config.ROLLOUT}[train]
versions = {VERSIONS}
groups_per_step = 2
checkpoint_every = 4
ranks = RANKS
[[train.adapters]]
name = "sums"
rank = 4
[[train.adapters]]
name = "echo"
rank = 2
targets = ["q_proj", "v_proj"]
[train.adapters.task]
environment = "dataset"
prompt = "{{question}}"
heldout = 1
[train.adapters.task.data]
path = "rows.jsonl"
answer = "answer"
[evaluate]
every = 3
samples = 1
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_adapters_train_on_tasks_of_their_own(tmp_path: Path, ranks: int) -> None:
    for name, question in (("rows", "say {0}"), ("sums", "{0} + 1 =")):
        lines = [{"question": question.format(n), "answer": str(n + 1)} for n in range(40)]
        text = "".join(json.dumps(one) + "\n" for one in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "run.toml").write_text(CONFIG.replace("RANKS", str(ranks)))
    bucket = open_bucket(str(tmp_path / "out" / "bucket"), create=True)
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "deltawire", "run", "run.toml", "--out", "out", "--plain"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        line = line_bucket(bucket, "sums", create=True)
        killed = run_and_kill_a_worker(process, line, ("w0",), within_s=250)
        logs = sorted((tmp_path / "out" / "logs").glob("*"))
        text = (tmp_path / "log").read_text() + "".join(one.read_text() for one in logs)
        assert process.poll() == 0, text[-6000:]
        assert killed
    finally:
        log.close()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    assert newest_version(bucket) == 0, "the base is sent once"
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    verdicts = {one["id"]: one["bit_identical"] for one in report["workers"]}
    # A worker that was killed may still load when the run ends: it is left out then.
    assert {name.partition("/")[0] for name in verdicts} == {"sums", "echo"}, verdicts
    assert set(verdicts.values()) == {True}, verdicts
    proof = report["proof"]
    assert proof["groups"] == 2 * 2 * VERSIONS
    assert proof["repeated"] == proof["lost"] == 0
    families = {}
    for name in ("sums", "echo"):
        place = line_bucket(bucket, name)
        run = read_run(place)
        status = known_trainer(place)
        assert (status.phase, status.version) == ("finished", VERSIONS)
        worker = read_heartbeat(place, "w0").worker
        assert worker.attested
        assert worker.digest == status.digest, "the adapter that is served is the trainer's"
        consumed = [
            key
            for one in read_history(place, run)
            for key in CommitMetadata.of(one.metadata, run="", version=one.version).consumed
        ]
        assert len(consumed) == len(set(consumed)) == 2 * VERSIONS
        families[name] = {read_group(place, *key)[0].task for key in consumed}
        assert Digest.from_hex(status.digest) != Digest(0, 0)
    assert report["heldout_sets"].keys() == {"sums", "echo"}, "each was evaluated at the end"
    assert families["sums"].isdisjoint(families["echo"])
