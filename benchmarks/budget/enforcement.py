"""``budget_violations`` and ``forced_tokens_in_loss``: what the embedded engine lets through.

A small random model plays 64 episodes with each of four budgets. Both counts are read from the
stored tokens, not from what an episode says of itself: a turn violates its budget if more tokens
than that were drawn before the first end mark, and a forced token is one that has the role of a
closing sentence or an end mark after the budget was spent. It is in the loss if its mask is 1.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Final

import torch

from benchmarks.training.keys import Measured, Options
from deltawire.chat.text import Text
from deltawire.config import RunConfig, parse_config
from deltawire.engines.transformers import TransformersEngine
from deltawire.envs import open_tasks
from deltawire.rl.rollout.episode import play_tasks
from deltawire.rl.rollout.episode_types import EpisodeLimits
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.wire.rollouts import Trajectory

BUDGETS: Final = (1, 4, 12, 24)
EPISODES: Final = 64
CLOSING: Final = "so"
ANSWER: Final = 6
END: Final = ")"


def run_config() -> RunConfig:
    """The configuration of every episode."""
    return parse_config(
        {
            "name": "enforcement",
            "model": {"build": {"layers": 1, "hidden_size": 32}},
            "task": {"heldout": EPISODES},
            "rollout": {
                "max_tokens": max(BUDGETS) + ANSWER,
                "context": 192,
                "thinking": {
                    "end": END,
                    "budgets": [*BUDGETS],
                    "answer_tokens": ANSWER,
                    "closing": CLOSING,
                },
            },
        },
        source="benchmark",
    )


def count_faults(trajectory: Trajectory, budget: int) -> tuple[int, int, int]:
    """Returns whether a turn thought too long, its forced tokens in the loss, and whether its
    thinking was closed by force, each as a count."""
    tokens, mask = trajectory.tokens_T.tolist(), trajectory.mask_T.tolist()
    end = ord(END)
    closed = tokens.index(end) if end in tokens else len(tokens)
    inserted = [*CLOSING.encode(), end]
    first = closed + 1 - len(inserted)
    forced = closed < len(tokens) and tokens[first : closed + 1] == inserted
    # The model may write the sentence itself; then every token of it was drawn within the budget.
    forced = forced and first >= budget
    thought = first if forced else closed
    in_loss = sum(mask[first : closed + 1]) if forced else 0
    return int(thought > budget), in_loss, int(forced)


def measure(options: Options) -> Measured:
    """Plays the episodes and counts."""
    torch.set_num_threads(1)
    config = run_config()
    model = build_model(config.model.build, seed=options.seed).float().eval()  # type: ignore[arg-type]
    engine = TransformersEngine(model, stop_tokens=[256], slots=64, capacity=192, seed=options.seed)
    tasks, text = open_tasks(config.task, seed=options.seed), Text(byte_tokenizer())
    totals: dict[str, Any] = {}
    for budget in BUDGETS:
        limits = replace(EpisodeLimits.of(config.rollout), budget=budget)
        episodes = asyncio.run(
            play_tasks(
                engine,
                tasks,
                text,
                tasks.heldout(),
                temperature=1.0,
                limits=limits,
                concurrent=64,
            )
        )
        counts = [count_faults(one, budget) for e in episodes for one in e.trajectories]
        violations, in_loss, forced = (sum(column) for column in zip(*counts, strict=True))
        totals[str(budget)] = {
            "episodes": len(counts),
            "closed by force": forced,
            "violations": violations,
            "in loss": in_loss,
        }
    values = {
        "budget_violations": float(sum(one["violations"] for one in totals.values())),
        "forced_tokens_in_loss": float(sum(one["in loss"] for one in totals.values())),
    }
    return Measured(values, {"budgets": totals})
