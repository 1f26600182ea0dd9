"""Totals of allocation in the views."""

from deltawire.dashboard.allocation import AllocationTotals
from deltawire.dashboard.state import RunState
from deltawire.events import Allocated


def event(version, *, at=0.0, **changes):
    fields = {
        "judged": 4,
        "trained": 2,
        "partial": 1,
        "skipped": 1,
        "deferred": 1,
        "passed": 3,
        "equal": 2,
        "completions": {"8": 1, "32": 1},
        "dropped_tokens": 100,
        "saved_tokens": 60,
    }
    return Allocated(process="trainer", at=at, version=version, **{**fields, **changes})


def test_steps_add_up_and_a_repeated_step_counts_once():
    state = RunState()
    state.add([event(1), event(2, completions={"8": 2}), event(2, at=1.0, completions={"8": 2})])
    totals = AllocationTotals.of(state)
    assert (totals.judged, totals.trained, totals.equal_share) == (8, 4, 0.5)
    assert totals.completions == {"8": 3, "32": 1}
    assert totals.sizes == "8: 3, 32: 1"
    rows = dict(totals.rows())
    assert "2 deferred, 6 passed over" in rows["Prompts allocated"]
    assert rows["· tokens saved on them, against a fixed size"] == "120"


def test_a_fixed_group_size_shows_nothing():
    assert AllocationTotals.of(RunState()) is None
