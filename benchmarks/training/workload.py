"""The model, the groups and the clock of the benchmarks of training steps."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from deltawire.config import BuildConfig, LossConfig, RunConfig, ScheduleConfig, TrainConfig
from deltawire.train.batch import collate
from deltawire.train.build import build_model
from deltawire.train.policy import TrainedPolicy
from deltawire.wire.rollouts import Group, Trajectory

MEDIAN, P95, LONGEST = 256, 1024, 2048
"""Lengths of completions: log-normal, and cut."""
SPREAD = math.log(P95 / MEDIAN) / 1.6449
GROUP = 4
BUDGET = 8192


def small_model() -> Any:
    """A dense model whose step takes about a second on one core, float32, without dropout."""
    sizes = BuildConfig(
        hidden_size=128,
        layers=4,
        head_size=32,
        feed_forward_size=384,
        vocabulary=4096,
        context=4096,
    )
    return build_model(sizes, seed=0).eval()


def run_config(**train: Any) -> RunConfig:
    """PPO on the sampler's log-probabilities, AdamW on float32 weights."""
    return RunConfig(
        name="bench",
        train=TrainConfig(
            exporter="f32",
            schedule=ScheduleConfig(warmup_steps=0),
            max_tokens_per_batch=BUDGET,
            loss=LossConfig(ratio_base="rollout"),
            **train,
        ),
    )


def log_normal(count: int, seed: int) -> list[int]:
    """Seeded lengths with the median 256 and the 95th percentile 1,024."""
    drawn = np.random.default_rng(seed).normal(math.log(MEDIAN), SPREAD, count)
    return [int(min(max(round(math.exp(x)), 2), LONGEST)) for x in drawn]


def make_groups(
    lengths: Sequence[int], *, model: Any, prompt: int, shared: bool, seed: int
) -> list[Group]:
    """Groups of `GROUP` completions with random tokens, and log-probabilities near the model's.

    Prompts are of ``prompt`` tokens, one for each group, or one for each completion if they are not
    ``shared``.
    """
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> Any:
        return rng.integers(0, 256, count).astype(np.int32)

    groups = []
    for start in range(0, len(lengths), GROUP):
        trajectories = [
            Trajectory(
                tokens(length),
                np.zeros(length, np.float32),
                np.zeros(length, np.int32),
                np.ones(length, np.uint8),
                float(rng.integers(0, 2)),
                "stop",
                prompt=None if shared else tokens(prompt),
            )
            for length in lengths[start : start + GROUP]
        ]
        groups.append(Group("w", "n", str(start), 1.0, tokens(prompt), trajectories))
    for group in groups:
        with torch.no_grad(), TrainedPolicy(model).terms(collate([group])) as terms:
            for trajectory, row in zip(group.trajectories, terms.logprobs, strict=True):
                count = len(trajectory.tokens_T)
                noise = rng.normal(0, 0.05, count).astype(np.float32)
                trajectory.logprobs_T[:] = np.minimum(row[:count].numpy() + noise, 0)
    return groups


def seconds(steps: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The median processor time of each step on one thread; they take turns.

    Processor time does not count what other programs of a shared machine take.
    """
    torch.set_num_threads(1)
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 1):
        for name, step in steps.items():
            started = time.process_time()
            step()
            if turn:  # The first turn warms up.
                spent[name].append(time.process_time() - started)
    return {name: median(times) for name, times in spent.items()}


def copy_of(model: Any) -> Any:
    """A copy to train."""
    return copy.deepcopy(model)
