"""A short storm of real readers, with a publisher next to them; `deltawire bench scale` measures it
at full length."""

import pytest

from benchmarks.scale.storm_run import Level, run_storm

pytestmark = pytest.mark.drills


def test_readers_that_outrun_their_store_are_late_and_never_dead():
    storm = run_storm(Level(needed_s=6, blobs=40, readers=6))
    assert storm.ended == 0
    assert storm.last_s < float("inf")
    assert storm.cold_s < float("inf")
    assert storm.attempts < 4, "without the window: 21"
    assert len(storm.commits_s) == len(storm.commits_alone_s)
