"""A run with one malicious worker and a scribbler in the bucket: it is found, and the run goes on.

Half an hour of it, with processes killed and a bad network as well:
``python tests/support/malicious.py --seconds 1800 --chaos``.
"""

from __future__ import annotations

import os

import pytest
from malicious import EVIL, INTRUDER, attack

pytestmark = [pytest.mark.drills, pytest.mark.long, pytest.mark.timeout(1200)]
"""It ends three versions after the quarantine, which a slow machine reaches late."""


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="processes are found in /proc")  # noqa: PTH112
def test_a_malicious_worker_is_found_and_the_run_goes_on(tmp_path) -> None:
    """With a share of 0.25 the chance that 50 forged groups pass is 6e-7; with 0.1 it is 0.005."""
    found = attack(tmp_path, seconds=600, share=0.25, after=3)
    assert set(found.quarantined) == {EVIL}, found
    assert 0 < found.evil_read <= 50
    assert found.evil_consumed_later == 0
    assert found.versions >= 2
    assert found.largest_share <= 0.5
    assert (found.honest_forgotten, found.twice, found.lost) == ([], 0, 0)
    assert found.honest_consumed.total() > 0
    kinds = found.incidents
    assert kinds[EVIL].keys() & {"reward", "log-probabilities", "task", "prompt"}
    # The other incidents depend on how soon it is found; tests/security has a test of each kind.
    assert kinds.get(INTRUDER, {}).keys() <= {"not allowed"}
