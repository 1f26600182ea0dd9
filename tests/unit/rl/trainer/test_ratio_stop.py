"""A live run stops once importance ratios explode in three of 32 steps, and not before."""

import math
from dataclasses import replace

import pytest

from deltawire.config import parse_config
from deltawire.errors import StoppedError
from deltawire.parity.divergence import NO_DIVERGENCE
from deltawire.rl.trainer.ratio_stop import STEPS, WINDOW, RatioStop


def stop_of(*, share=None, **loss):
    live = {} if share is None else {"stop_effective_share": share}
    values = {
        "name": "t", "live": live, "train": {"loss": {"advantage": "given", **loss}},
        "trust": {"rescore_share": 0.0},
    }  # fmt: skip
    return RatioStop(parse_config(values, source="test"))


def add(stop, *shares, tokens=100):
    for version, share in enumerate(shares, 1):
        drift = replace(NO_DIVERGENCE, effective_share=share, ratio_max=533.0, tokens=tokens)
        stop.step(drift, run="memory://", version=version)


@pytest.mark.parametrize("low", [0.09, 0.0, math.nan])
def test_the_third_step_stops_the_run(low):
    stop = stop_of()
    add(stop, *[low] * (STEPS - 1))
    with pytest.raises(StoppedError, match=r"below 0.1 of the tokens in 3 of 32 steps.*533"):
        add(stop, low)


def test_steps_count_within_the_window():
    fine = [0.3] * (WINDOW - 3)
    with pytest.raises(StoppedError):
        add(stop_of(), 0.05, 0.05, *fine, 0.05)
    add(stop_of(), 0.05, 0.05, *fine, 0.3, 0.05)


@pytest.mark.parametrize(
    "loss",
    [
        {"advantage": "leave_one_out"},
        {"policy_coefficient": 0.0, "preference": {"kind": "dpo"}},
    ],
)
def test_other_runs_are_not_judged(loss):
    """Advantages that are not given have a sampler that follows; pairs have no ratios."""
    add(stop_of(**loss), *[0.01] * 9)


def test_it_can_be_turned_off_and_few_tokens_do_not_count():
    add(stop_of(share=0.0), *[0.01] * 9)
    add(stop_of(), *[0.01] * 9, tokens=31)
    with pytest.raises(StoppedError):
        add(stop_of(share=0.5), *[0.4] * 3)
