"""Two ranks over gloo: replicas of a Hugging Face trainer, and a model sharded with FSDP2."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.ports import free_port
from deltawire.store import open_bucket
from deltawire.sync import committed_versions, load_mirror, read_manifest, read_run
from deltawire.sync.chain.payloads import read_payload
from deltawire.sync.maintain.fsck import check_run

SUPPORT = Path(__file__).parents[2] / "support"


@pytest.mark.drills
def test_ranks_publish_one_model_whole_gathered_and_by_rows(tmp_path):
    port = str(free_port())
    with (tmp_path / "printed").open("w") as printed:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(SUPPORT / "trainer_rank.py"), str(tmp_path)],
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                     "MASTER_PORT": port, "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
                stdout=printed, stderr=printed,
            )
            for rank in range(2)
        ]  # fmt: skip
    try:
        codes = [rank.wait(280) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [0, 0], (tmp_path / "printed").read_text()[-6000:]
    expected = json.loads((tmp_path / "told.json").read_text())
    for kind in ("replicas", "gathered", "rows"):
        bucket = open_bucket(str(tmp_path / kind))
        run = read_run(bucket)
        for version in range(3):
            manifest = read_manifest(bucket, run, version)
            assert manifest.metadata == {"global_step": version}
            assert manifest.digest == expected[kind][version]
            assert load_mirror(bucket, run, at=version).compute_held().hex() == manifest.digest
        assert {file.name for file in run.model_files} >= {"config.json", "tokenizer.json"}
        assert check_run(bucket).faults == []
    steps = [read_manifest(bucket, run, v).metadata["global_step"] for v in range(5)]
    assert committed_versions(bucket) == [0, 1, 2, 3, 4]
    assert steps == [0, 1, 2, 0, 2], "the second training begins with the first weights again"
    assert read_manifest(bucket, run, 3).digest == expected["rows"][0]
    first = read_manifest(bucket, run, 0)
    assert len(read_payload(bucket, run, first, first.anchor).blobs) == 2, "each rank wrote one"
    for rank in range(2):
        assert "dtype BF16" in (tmp_path / f"refused-{rank}").read_text()
