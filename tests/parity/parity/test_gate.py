"""The gate: each named threshold warns, masks or stops, and stale tokens are not parity."""

import math

import msgspec
import pytest
import torch

from deltawire import events
from deltawire.config import ParityConfig, ParityLimits, RunConfig, parse_config
from deltawire.dashboard.state import RunState
from deltawire.errors import InputError
from deltawire.parity import ParityMeter, parity_event


def look(config, gaps, *, versions=None, mask=None, version=5):
    """A meter that saw one micro-batch with these gaps, and what it kept."""
    meter = ParityMeter(config, version)
    trainer = torch.tensor(gaps, dtype=torch.float64)
    drawn = torch.ones(trainer.shape) if mask is None else torch.tensor(mask)
    by = torch.full(trainer.shape, version) if versions is None else torch.tensor(versions)
    keep = meter.measure(trainer, torch.zeros_like(trainer), drawn, by)
    return meter, keep.tolist()


def limits(**values):
    return ParityLimits(**values)


def only(**settings):
    """A configuration without default warnings."""
    return ParityConfig(**{"warn": limits(), **settings})


CROSSED = {
    "k3": (1e-3, [[0.1, -0.1]], 0.01),
    "k3_swapped": (1e-3, [[0.1, -0.1]], 0.01),
    "mean_gap": (0.05, [[0.1, 0.1]], 0.2),
    "largest_gap": (0.5, [[0.0, -0.6]], 0.7),
    "extreme_share": (0.4, [[0.7, 0.0]], 0.5),
    "drift_k3": (1e-3, [[0.1, -0.1]], 0.01),
    "drift_largest_gap": (0.5, [[0.0, -0.6]], 0.7),
    "drift_extreme_share": (0.4, [[0.7, 0.0]], 0.5),
    "drift_effective_share": (0.9, [[2.0, 0.0]], 0.1),
}


@pytest.mark.parametrize("name", CROSSED)
@pytest.mark.parametrize("action", ["warn", "stop"])
def test_each_threshold_is_named_when_crossed(name, action):
    limit, gaps, wide = CROSSED[name]
    config = only(min_tokens=2, **{action: limits(**{name: limit})})
    result = look(config, gaps)[0].result()
    crossed = result.warnings if action == "warn" else result.stopped
    assert [one.name for one in crossed] == [name]
    if action == "stop":
        with pytest.raises(InputError, match=rf"{name} .* against .*parity.stop"):
            result.raise_if_stopped()
    else:
        result.raise_if_stopped()
    wider = msgspec.structs.replace(config, **{action: limits(**{name: wide})})
    result = look(wider, gaps)[0].result()
    assert not result.warnings
    assert not result.stopped


def test_every_threshold_is_tested():
    assert set(ParityLimits.__struct_fields__) == {*CROSSED, "flipped_share"}


def test_stale_tokens_count_as_drift_only():
    """A sequence of an older version, and one that was in flight during the swap."""
    config = ParityConfig(warn=limits(k3=1e-9, drift_k3=1e-3), min_tokens=1)
    gaps = [[0.0, 0.0, 0.0], [0.5, 0.5, 0.5], [0.0, 0.5, 0.5]]
    versions = [[5, 5, 5], [4, 4, 4], [5, 4, 5]]
    result = look(config, gaps, versions=versions)[0].result()
    assert result.numeric.tokens == 4
    assert result.numeric.k3 == 0
    assert result.drift.tokens == 9
    assert [one.name for one in result.warnings] == ["drift_k3"]


def test_what_the_environment_wrote_does_not_make_a_prefix_stale():
    config = ParityConfig()
    result = look(config, [[0.0] * 3], versions=[[5, -1, 5]], mask=[[1, 0, 1]])[0].result()
    assert result.numeric.tokens == 2


def test_without_tokens_of_the_trained_version_nothing_warns():
    config = ParityConfig(stop=limits(k3=1e-9, largest_gap=1e-9))
    result = look(config, [[3.0] * 40], versions=[[4] * 40])[0].result()
    assert result.numeric.tokens == 0
    assert not result.stopped
    assert [one.name for one in result.warnings] == ["drift_extreme_share"]


def test_masking_takes_out_only_the_sequences_that_cross():
    config = ParityConfig(mask=limits(largest_gap=0.5))
    meter, keep = look(config, [[0.0, 0.1], [0.0, 0.9], [-0.7, 0.0]])
    assert keep == [1, 0, 0]
    more = torch.tensor([[0.0, 0.0], [4.0, 0.0]])
    same = torch.full((2, 2), 5)
    assert meter.measure(more, torch.zeros(2, 2), torch.ones(2, 2), same).tolist() == [1, 0]
    assert meter.result().masked == (1, 2, 4)


def test_few_tokens_have_no_mean_but_a_largest_gap():
    config = ParityConfig(stop=limits(k3=1e-3, largest_gap=0.5), min_tokens=3)
    result = look(config, [[0.9, 0.0]])[0].result()
    assert [one.name for one in result.stopped] == ["largest_gap"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_crosses_every_limit(value):
    config = ParityConfig(stop=limits(k3=1.0, drift_effective_share=0.1), min_tokens=1)
    result = look(config, [[value, 0.0]])[0].result()
    assert {one.name for one in result.stopped} >= {"k3"}
    event = parity_event(result, process="trainer", at=1.0, version=6, names=["a"])
    (back,) = events.decode_lines(events.encode_lines([event]))
    assert back.numeric.k3 > 1e300
    assert back.stopped


def test_flips_are_checked_in_the_worst_layer():
    config = ParityConfig(warn=limits(flipped_share=0.2))
    meter, _ = look(config, [[0.0]])
    meter.add_flips(torch.tensor([1, 2]), torch.tensor([10, 10]))
    meter.add_flips(torch.tensor([0, 4]), torch.tensor([10, 10]))
    result = meter.result()
    assert result.flipped_L == pytest.approx((0.05, 0.3))
    assert [one.name for one in result.warnings] == ["flipped_share"]


def test_the_event_names_masked_sequences_and_merges():
    config = ParityConfig(mask=limits(largest_gap=0.5))
    result = look(config, [[0.0], [0.9]])[0].result()
    event = parity_event(result, process="trainer", at=1.0, version=6, names=["w0/3#0", "w0/3#1"])
    state = RunState()
    state.add(events.decode_lines(events.encode_lines([event])))
    assert state.last_parity is not None
    assert state.last_parity.masked == ["w0/3#1"]
    assert state.last_parity.numeric.tokens == 2


def test_limits_come_from_the_configuration_by_name():
    config = parse_config(
        {"name": "x", "parity": {"stop": {"k3": 0.01}, "mask": {"largest_gap": 2}}}, source="s"
    )
    assert config.parity.stop.k3 == 0.01
    assert config.parity.warn.k3 == 1e-3
    with pytest.raises(InputError, match=r"parity\.stop\.k4.*did you mean parity\.stop\.k3"):
        parse_config({"name": "x", "parity": {"stop": {"k4": 0.01}}}, source="s")
    with pytest.raises(InputError, match=r"extreme_ratio"):
        parse_config({"name": "x", "parity": {"extreme_ratio": 0.5}}, source="s")
    mask = RunConfig(name="x").parity.mask
    assert (mask.drift_k3, mask.drift_largest_gap, mask.k3) == (100.0, 10.0, ParityLimits().k3)
