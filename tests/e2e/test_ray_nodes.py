"""A signed run on a Ray cluster of several nodes: trainer ranks on different nodes, one killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_config

from deltawire.cli.main import main
from deltawire.events import Life
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.fleet import read_trainer
from deltawire.runtime.trusted import ReaderTrust, open_trusted
from deltawire.store import open_bucket
from deltawire.sync import newest_version
from deltawire.wire.roles import Pin
from deltawire.wire.signing import Ed25519Signer

pytestmark = [pytest.mark.drills, pytest.mark.long, pytest.mark.timeout(300)]

VERSIONS = 5
CONFIG = f"""
name = "nodes"
{tiny_config.MODEL}[task]
heldout = 4
{tiny_config.ROLLOUT.replace("workers = 2", "workers = 1")}[train]
ranks = 2
versions = {VERSIONS}
groups_per_step = 2
checkpoint_every = 2
[evaluate]
every = 0
"""
WAIT_S = 200.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes of one CPU, so that no two processes share one."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        made.add_node(num_cpus=1)
    made.wait_for_nodes()
    yield made
    made.shutdown()


def ranks_of(folder: Path) -> dict[int, int]:
    """The process of each rank, by the folder in its command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes()
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        rank = next((one[5:] for one in variables if one.startswith(b"RANK=")), b"")
        if str(folder).encode() in words and b"\0trainer\0" in words and rank:
            found[int(rank)] = int(entry.name)
    return found


def test_a_signed_run_over_three_nodes_survives_a_killed_rank(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    key = tmp_path / "owner.key"
    assert main(["keygen", str(key)]) == 0
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "deltawire", "run", "run.toml", "--launcher", "ray", "--plain",
         "--out", str(tmp_path / "out"), "--bucket", bucket.url, "--key", str(key)],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + WAIT_S
        while (newest_version(bucket) or 0) < 1:
            assert process.poll() is None, process.communicate()[0][-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ranks = ranks_of(tmp_path)
        assert sorted(ranks) == [0, 1]
        parents = {rank: Path(f"/proc/{pid}/stat").read_text().split()[3] for rank, pid in
                   ranks.items()}  # fmt: skip
        assert len(set(parents.values())) == 2, "each rank has an actor"
        os.kill(ranks[1], signal.SIGKILL)
        output, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, output[-4000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.communicate(timeout=60)
    owner = Ed25519Signer.read(key).public_key
    signed = open_trusted(bucket.url, ReaderTrust(Pin(owner)))
    status = read_trainer(signed)
    assert (status.phase, status.version) == ("finished", VERSIONS)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [one["bit_identical"] for one in report["workers"]] == [True]
    lives = [event for event in EventTail(signed).read(everything=True) if isinstance(event, Life)]
    trainer = [one.what for one in lives if one.process == "trainer"]
    assert {"died", "restarted"} <= set(trainer)
    assert main(["fsck", bucket.url, "--public-key", owner]) == 0
