"""A whole run that publishes bf16 and fp8, whose workers sample from the fp8 line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tiny_config

from deltawire.config import run_config
from deltawire.config.served import served_precision
from deltawire.runtime.fleet import read_trainer
from deltawire.runtime.heartbeat import read_heartbeat
from deltawire.runtime.lines import line_bucket
from deltawire.store import open_bucket
from deltawire.sync import read_manifest, read_run

pytestmark = [pytest.mark.drills, pytest.mark.long, pytest.mark.timeout(600)]

VERSIONS = 3
CONFIG = f"""
name = "tiny"
{tiny_config.MODEL}[task]
heldout = 4
options = {{ min_word_len = 3, max_word_len = 4 }}
[warm_start]
max_steps = 4
check_every = 4
{tiny_config.ROLLOUT}weights = "fp8-block"
[train]
versions = {VERSIONS}
groups_per_step = 2
max_staleness = 2
also_publish = ["fp8-block", "int4-g32"]
[evaluate]
every = 2
samples = 1
"""


def test_workers_sample_from_the_fp8_line_and_attest_it(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    words = ["run", "config.toml", "--out", "run", "--bucket", "bucket", "--plain"]
    done = subprocess.run(
        [sys.executable, "-m", "deltawire", *words],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    bucket = open_bucket(str(tmp_path / "bucket"))
    status = read_trainer(bucket)
    assert (status.phase, status.version) == ("finished", VERSIONS)
    digests = {}
    for name in ("fp8-block", "int4-g32"):
        line = line_bucket(bucket, name)
        digests[name] = read_manifest(line, read_run(line), VERSIONS).digest
    assert len({status.digest, *digests.values()}) == 3
    for worker in ("w0", "w1"):
        found = read_heartbeat(bucket, worker).worker
        assert found.attested
        assert (found.version, found.digest) == (VERSIONS, digests["fp8-block"])
    config = run_config(read_run(bucket).config, url=bucket.url)
    assert served_precision(config).weights == "fp8-block"
    assert "the sampler's weights are fp8-block, rounded once more" in done.stdout
