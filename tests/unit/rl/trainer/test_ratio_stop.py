"""A live run stops once importance ratios explode in three of 32 steps, and not before."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from granted_groups import start_with_groups

from benchmarks.training.seeded_groups import seeded_group
from deltawire.config import parse_config
from deltawire.errors import StoppedError
from deltawire.export.models import empty_model, fetch_model_files
from deltawire.parity.divergence import NO_DIVERGENCE
from deltawire.rl.trainer.ratio_stop import STEPS, WINDOW, RatioStop
from deltawire.rl.trainer.trainer import Trainer
from deltawire.runtime.fleet import read_trainer
from deltawire.runtime.process import Process, open_run
from deltawire.sync import newest_version


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


def exploded_group(number):
    """From the third on, one token of 64 was nearly impossible for its sampler, so that it has all
    of the weight."""
    group = seeded_group(number, tokens=16)
    if number >= 2:
        group.trajectories[0].logprobs_T[3] = -40.0
    return group


@pytest.mark.parametrize("share", [0.1, 0.0])
def test_a_trainer_stops_and_publishes_nothing_more(tmp_path, share):
    train = {"versions": 7, "groups_per_step": 1, "max_staleness": 100}
    loss = {"advantage": "given", "ratio_base": "rollout"}
    bucket = start_with_groups(
        tmp_path, groups=7, group=exploded_group, train={**train, "loss": loss},
        live={"stop_effective_share": share},
    )  # fmt: skip
    run, config = open_run(bucket)
    with fetch_model_files(bucket, run) as folder:
        policy = empty_model(Path(folder))
    process = Process(bucket, "trainer", "trainer", supervised=False)
    trainer = Trainer(process, run, config, policy)
    if not share:
        trainer.loop()
        assert newest_version(bucket) == 7
        return
    with pytest.raises(StoppedError, match="importance ratios explode") as caught:
        trainer.loop()
    assert caught.value.exit_code == 7
    # Versions 1 and 2 are of ordinary groups, 3 and 4 of the first two that exploded.
    assert newest_version(bucket) == 4
    status = read_trainer(bucket)
    assert (status.phase, status.version) == ("stopped", 4)
