"""A rank that dies ends the server without a wrong token, and a new server continues."""

from drills import (  # noqa: F401  (its test is run here)
    test_a_killed_rank_costs_the_engine_and_the_next_one_serves_the_newest,
)
