"""Admission grants as the rule says it, one place at a time, however it is computed."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from deltawire.rl.control.admission import Admission, WorkerLoad


@st.composite
def loads(draw):
    settled = draw(st.integers(0, 6))
    stored = settled + draw(st.integers(0, 6))
    granted = stored + draw(st.integers(0, 6))
    return WorkerLoad(
        granted,
        stored,
        settled,
        alive=draw(st.booleans()),
        proven=draw(st.booleans()),
        trial=draw(st.booleans()),
    )


def grant_one_by_one(admission, workers, free):
    """The rule in its simplest form: look at every worker for each place."""
    granted = {name: load.granted for name, load in workers.items()}
    alive = sorted(name for name, load in workers.items() if load.alive)
    proven = [name for name in alive if workers[name].proven]
    new = [name for name in alive if not workers[name].proven]
    most = math.ceil(admission.limit * max(admission.share, 1 / max(1, len(alive))))
    allocated = free is not None
    free = admission.limit - admission.outstanding(workers) if free is None else free
    for _ in range(free):
        held = sum(granted[name] - workers[name].stored for name in new)
        able = proven if proven and held >= admission.limit // 2 else alive
        within = [name for name in able if granted[name] - workers[name].settled < most]
        able = within or (able if allocated else [])
        if not able:
            break
        granted[min(able, key=lambda name: granted[name] - workers[name].stored)] += 1
    for name in new:
        if workers[name].trial:
            granted[name] = max(granted[name], workers[name].stored + 1)
    return granted


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), loads(), max_size=8),
    st.integers(1, 8),
    st.integers(0, 3),
    st.sampled_from([1.0, 0.5, 0.2]),
    st.none() | st.integers(0, 20),
)
def test_places_go_to_the_worker_with_the_fewest_unfinished_groups(
    workers, groups_per_step, staleness, share, free
):
    admission = Admission(groups_per_step=groups_per_step, max_staleness=staleness)
    admission.share = share
    assert admission.grant(workers, free=free) == grant_one_by_one(admission, workers, free)
