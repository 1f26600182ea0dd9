"""All parts of a run die and hang at random; the run goes on, nothing is trained twice or lost, and
it can be done over to the bit.

The suite strikes a few times. ``--drills 2`` adds an hour of it, ``--drills 3`` another.
"""

from __future__ import annotations

import os

import pytest
from chaos import MORE_VERSIONS, drill

pytestmark = [pytest.mark.drills, pytest.mark.long]

HOUR_S = 3600.0
STRIKES = 2


@pytest.mark.timeout(3 * HOUR_S)
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="victims are found in /proc")  # noqa: PTH112
def test_a_run_survives_all_its_parts(tmp_path, monkeypatch, drill_seed) -> None:
    for name in ("URL", "URL_S3"):
        monkeypatch.setenv(f"AWS_ENDPOINT_{name}", "")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    if drill_seed == 0:
        report = drill(tmp_path, seed=0, seconds=HOUR_S, strikes=STRIKES)
    else:
        report = drill(tmp_path, seed=drill_seed, seconds=HOUR_S)
    assert report.strikes.total() >= STRIKES
    assert report.interrupted, "the run ended by itself while it was struck"
    summary, fates, replayed = report.summary, report.fates, report.replayed
    assert summary is not None
    assert fates is not None
    assert replayed is not None
    assert report.versions == summary.versions >= MORE_VERSIONS
    assert summary.workers
    assert all(worker.bit_identical for worker in summary.workers)
    assert summary.proof is not None
    assert (summary.proof.repeated, summary.proof.lost) == (0, 0)
    assert summary.proof.staleness_max <= summary.staleness.bound
    assert fates.consumed == 4 * report.versions
    assert (fates.twice, fates.forgotten) == ([], [])
    assert replayed.exact, f"version {replayed.differs}: {replayed.reason}"
    assert (replayed.first, replayed.last) == (1, report.versions)
