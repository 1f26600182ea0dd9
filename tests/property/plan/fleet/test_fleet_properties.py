"""Laws of random fleets: no rollout is too old, trained on twice or forgotten."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_fleets import RATES

pytest.importorskip("simpy")

import msgspec

from deltawire.plan.catalogue import find_model
from deltawire.plan.fleet.description import describe_fleet
from deltawire.plan.fleet.request import PlanRequest
from deltawire.plan.fleet.simulation.fleet import simulate_fleet

MODEL = find_model("qwen3-30b-a3b")[0]


@st.composite
def fleets(draw):
    """A request for a small fleet, with deaths, lag and a long tail."""
    regions = [
        {
            "name": f"r{number}",
            "accelerator": "h100",
            "accelerators": 4 * draw(st.integers(1, 3)),
            "tensor_parallel": draw(st.sampled_from([1, 2, 4])),
            "away": draw(st.booleans()),
            "relay": draw(st.booleans()),
            "poll_s": draw(st.sampled_from([0.1, 2.0])),
        }
        for number in range(draw(st.integers(1, 3)))
    ]
    return msgspec.convert(
        {
            "name": "random",
            "model": {"config": "-", "precision": "fp8", "changed": draw(st.floats(0.0005, 0.2))},
            "trainer": {
                "accelerator": "h100",
                "accelerators": draw(st.sampled_from([1, 8])),
                "step_s": draw(st.floats(1, 200)),
            },
            "rollouts": {
                "batch": draw(st.integers(1, 24)),
                "seconds": draw(st.floats(1, 200)),
                "tail": draw(st.floats(1, 6)),
                "per_engine": draw(st.integers(1, 6)),
                "max_staleness": draw(st.integers(1, 5)),
            },
            "regions": regions,
            "faults": {
                "mean_life_s": draw(st.sampled_from([0.0, 300.0, 3000.0])),
                "restart_s": draw(st.floats(1, 100)),
                "slow_share": draw(st.sampled_from([0.0, 0.3])),
                "slowness": 10.0,
            },
        },
        PlanRequest,
    )


@settings(max_examples=25, deadline=None)
@given(request=fleets(), seed=st.integers(0, 1 << 16))
def test_staleness_is_bounded_and_nothing_is_lost(request, seed):
    described = describe_fleet(request, MODEL, RATES, changed=request.model.changed)
    found = simulate_fleet(request, described, steps=5, seed=seed, faults=request.faults)
    assert found.staleness_max <= request.rollouts.max_staleness
    assert found.trained_twice == 0
    assert found.trained == 5 * request.rollouts.batch
    accounted = found.trained + found.evicted + found.lost + found.outstanding
    assert accounted == found.granted
    limit = (request.rollouts.max_staleness + 1) * request.rollouts.batch
    assert 0 <= found.outstanding <= limit
    for name, side in described.readers.items():
        assert found.bytes_got[name] >= 0
        assert side.count > 0
