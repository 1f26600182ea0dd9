"""Each rebuilt bug is named by deltawire's own functions, and the same without it is equal."""

import re

import pytest

from benchmarks.attest.known_bugs import BUGS


@pytest.mark.parametrize("bug", BUGS)
def test_a_known_bug_is_named(bug):
    assert BUGS[bug].rebuilt(True) == BUGS[bug].named


@pytest.mark.parametrize("bug", BUGS)
def test_the_same_without_the_bug_is_equal(bug):
    assert BUGS[bug].rebuilt(False) == {}


def test_each_bug_cites_its_threads():
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", t) for b in BUGS.values() for t in b.threads)
    assert all(bug.threads and bug.rebuilt.__doc__ for bug in BUGS.values())
