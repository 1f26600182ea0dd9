"""A worker that dies ends the engine without a wrong token, and a new engine continues."""

import pytest
from drills import (  # noqa: F401  (its test is run here)
    test_a_killed_rank_costs_the_engine_and_the_next_one_serves_the_newest,
)
from engine import Engine
from shapes import build

from deltawire.store import open_bucket


def test_an_engine_that_cannot_open_its_run_reports_it_and_ends(family, ranks, tmp_path):
    """vLLM's own client would wait forever for a core that ended while starting."""
    empty = open_bucket(str(tmp_path / "empty"), create=True)
    with pytest.raises(Exception, match="there is no run"):
        Engine(build(family, tmp_path / "model"), ranks=ranks, run=empty.url)
