"""Faults of real runs, found by a test that samples answers."""

import numpy as np
import pytest

from benchmarks.branches.real_culprits import FAULTS, bisected, faulty_run, is_found

DROP = 0.1
"""The smallest drop of the pass rate that a bisection looks for."""


@pytest.mark.drills
@pytest.mark.long
@pytest.mark.parametrize("fault", [*FAULTS, None])
def test_the_fault_of_a_real_run_is_found(tmp_path, fault):
    run = faulty_run(tmp_path, fault, [*FAULTS, None].index(fault))
    if run.culprit is not None:
        before, after = np.split(np.array(run.rates), [run.culprit])
        assert before.mean() - after.mean() > DROP, "the planted fault spoils nothing"
    assert is_found(run, bisected(run, tmp_path)["culprit"])
