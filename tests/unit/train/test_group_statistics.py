"""Figures of a step's groups, and the masking of episodes that were cut off."""

from dataclasses import replace
from statistics import stdev

import numpy as np
import pytest
import torch

from deltawire.config import LossConfig, parse_config
from deltawire.train.batch import collate
from deltawire.train.statistics import GroupStatistics, pairs_of
from deltawire.train.step import advantages_of, batch_loss, totals_of
from deltawire.wire.rollouts import BetterAnswer, Group, Reuse, Thinking, Trajectory


def trajectory(tokens, reward, finish="stop", *, episode=-1, cause=""):
    mask = np.ones(tokens, np.uint8)
    mask[0] = tokens == 1  # the environment wrote the first token
    return Trajectory(
        np.arange(tokens, dtype=np.int32),
        np.full(tokens, -1.0, np.float32),
        np.zeros(tokens, np.int32),
        mask,
        reward,
        finish,
        episode=episode,
        cause=cause,
    )


def group(*trajectories):
    return Group("w", "n", "t", 1.0, np.array([1, 2], np.int32), list(trajectories))


def test_figures_count_episodes_and_groups():
    groups = [
        group(
            trajectory(5, 1.0, "length", episode=0),
            trajectory(3, 1.0, "stop", episode=0),
            trajectory(3, 0.0, "stop", episode=1),
            trajectory(9, 7.0, "context", episode=2, cause="it failed"),
        ),
        group(trajectory(3, 2.0), trajectory(3, 2.0, "turns")),
    ]
    found = GroupStatistics.of(groups)
    assert found.completion_length == pytest.approx((6 + 2 + 2 + 2) / 4)
    assert found.truncated == pytest.approx(1 / 4)
    assert found.reward_spread == pytest.approx(stdev([1.0, 0.0]) / 2)
    assert found.zero_advantage == pytest.approx(1 / 2)
    assert GroupStatistics.of([]) == GroupStatistics()


def test_episodes_that_were_cut_off_are_masked_in_all_their_segments():
    groups = [
        group(
            trajectory(3, 1.0, "stop", episode=0),
            trajectory(3, 1.0, "context", episode=0),
            trajectory(3, 0.0, "stop", episode=1),
        )
    ]
    batch = collate(groups)
    assert batch.overlong_N.tolist() == [1, 1, 0]
    logprobs = torch.full((3, 3), -1.0, requires_grad=True)

    def gradient(masked):
        loss = LossConfig(mask_overlong=masked)
        config = parse_config({"name": "x"}, source="s")
        config = _with_loss(config, loss)
        totals, advantages = totals_of(groups, config), advantages_of(groups, config)
        part = batch_loss(config, batch, logprobs, totals, advantages)
        (found,) = torch.autograd.grad(part.loss, logprobs)
        return found

    free, masked = gradient(False), gradient(True)
    assert float(free[:2].abs().sum()) > 0
    assert float(masked[:2].abs().sum()) == 0
    # The baseline and the denominators stay: the other episode keeps its gradient to the bit.
    assert torch.equal(free[2], masked[2])


def _with_loss(config, loss):
    import msgspec

    train = msgspec.structs.replace(config.train, loss=loss)
    return msgspec.structs.replace(config, train=train)


def test_thinking_and_reused_tokens_are_counted():
    """Per turn the thinking, per episode what another drew; neither without budgets and reuse."""

    def one(count, *, thought, ended, reuse=None):
        mask_T = np.ones(count, np.uint8)
        mask_T[: reuse.count if reuse else 0] = 0
        return Trajectory(
            np.full(count, 65, np.int32), np.full(count, -1, np.float32),
            np.zeros(count, np.int32), mask_T, 1.0, "stop",
            thinking=Thinking(4, ((thought, ended),)), reuse=reuse,
        )  # fmt: skip

    rows = [
        one(6, thought=4, ended="answered"),
        one(5, thought=2, ended="forced", reuse=Reuse(0, 2)),
        one(5, thought=3, ended="forced", reuse=Reuse(0, 3)),
    ]
    found = GroupStatistics.of([Group("w0", "n", "t", 1.0, np.array([66], np.int32), rows)])
    assert found.thinking_length == pytest.approx(3)
    assert found.forced_share == pytest.approx(2 / 3)
    assert found.reused_length == pytest.approx(5 / 3)
    assert found.completion_length == pytest.approx((6 + 3 + 2) / 3)
    assert GroupStatistics().thinking_length is None


def test_pairs_are_counted_where_a_run_trains_on_them():
    better = BetterAnswer(np.array([1], np.int32), 1.0)
    rows = [
        replace(trajectory(3, 1.0, episode=0), better=better),
        trajectory(3, 0.0, episode=1),
        replace(trajectory(3, 0.0, episode=2, cause="it failed"), better=better),
    ]
    for kind, expected in (("dpo", 1), ("none", None)):
        loss = {"advantage": "given", "preference": {"kind": kind}}
        config = parse_config({"name": "t", "train": {"loss": loss}}, source="test")
        assert pairs_of([group(*rows)], config) == expected
