"""No example of a property is refused because the machine was busy."""

import time

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def test_examples_have_no_deadline_unless_a_test_sets_one():
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check


@settings(max_examples=2)
@given(st.booleans())
def test_an_example_that_takes_longer_than_the_librarys_deadline_passes(example):
    time.sleep(0.25 + 0 * example)
