"""Explores the protocol within bounds, and refutes protocols without one of its rules.

``scripts/check_protocol.py`` prints the same with figures and traces.
"""

import pytest
from cases import BROKEN, CASES, check, refute
from exploring import explore

pytestmark = pytest.mark.timeout(1800)
"""A case takes a processor for up to two minutes, and other work may have it meanwhile."""


def sized(cases):
    sizes = {"drills": lambda one: not one.small, "long": lambda one: getattr(one, "long", False)}
    return [
        pytest.param(
            one,
            id=one.name,
            marks=[getattr(pytest.mark, mark) for mark, marked in sizes.items() if marked(one)],
        )
        for one in cases
    ]


@pytest.mark.parametrize("case", sized(CASES))
def test_every_invariant_holds_in_every_order(case):
    found = check(case)
    assert not found.fault, "\n".join([found.fault, *found.trace])
    assert found.ends, "no order of the steps ended"


@pytest.mark.parametrize("case", sized(BROKEN))
def test_a_protocol_without_a_rule_is_refuted(case):
    found = refute(case)
    assert case.fault in found.fault
    assert found.trace


@pytest.mark.parametrize("name", ["two writers", "retention, a writer"])
def test_what_is_taken_first_hides_no_outcome(name):
    """The processes end in the same ways with and without the reduction."""
    case = next(one for one in CASES if one.name == name)
    reduced, full = check(case), explore(case.make(), case.bounds, reduced=False)
    assert not full.fault
    assert full.ends == reduced.ends
    assert full.states > reduced.states
