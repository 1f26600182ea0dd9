"""``largest_user_influence``: the largest share of one user in a gradient, over ``live.user_cap``.

The learner's own code makes a group in which one user's answer is up to `LENGTHS` times as long as
the others' and has a reward that hardly anyone else gave. The trainer's own loss is differentiated
by the log-probability of each token; the share of a user is that of the sum of absolute values,
which bounds the share of the gradient's norm. The worst length, seed and aggregation counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.live.bandit import BEGAN, store_rows
from benchmarks.training.keys import Measured, Options
from deltawire.config import parse_config
from deltawire.live.learning.grouping import GroupMaker
from deltawire.live.learning.records import LiveRecords
from deltawire.store import open_bucket
from deltawire.train.loss import LossInputs, Totals, policy_loss
from deltawire.wire.captures import Capture, Feedback

SEEDS = 5
USERS, TOKENS, CAP = 32, 50, 0.05
LENGTHS = (1, 4, 20, 80)
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "dr_grpo")


def largest_share(seed: int, length: int, aggregation: str, *, capped: bool = True) -> float:
    """Returns the largest share of one user; not ``capped``, with all weights 1."""
    chance = np.random.default_rng((seed, 37))
    bucket, lengths = open_bucket("memory://"), np.full(USERS, TOKENS)
    lengths[0] = TOKENS * length
    rows, reports = [], []
    for user in range(USERS):
        names: dict[str, Any] = {
            "answer": f"{user:032x}", "conversation": "c" * 32, "user": f"{user:032x}",
            "arm": "serving",
        }  # fmt: skip
        tokens = int(lengths[user])
        rows.append(Capture(
            **names, turn=0, propensity=1.0, at=BEGAN, receipt="r", finish="stop",
            prompt=np.array([0], "<i4").tobytes(), tokens=np.zeros(tokens, "<i4").tobytes(),
            logprobs=np.full(tokens, -1.0, "<f4").tobytes(), spans=[(0, tokens)],
        ))  # fmt: skip
        liked = user > 0 and chance.random() < 0.9
        reports.append(Feedback(
            **names, id=f"r{user}", kind="accept" if liked else "reject", value=1.0,
            at=BEGAN + 1, received=BEGAN + 1, served_at=BEGAN,
        ))  # fmt: skip
    store_rows(bucket, 0, rows, reports)
    config = parse_config({
        "name": "influence", "trust": {"rescore_share": 0.0}, "live": {"user_cap": CAP},
        "rollout": {
            "group_size": USERS, "max_tokens": TOKENS * max(LENGTHS), "context": 8192,
        },
        "train": {"loss": {"advantage": "given", "aggregation": aggregation}},
    }, source="influence")  # fmt: skip
    records = LiveRecords(bucket)
    records.poll()
    answers = GroupMaker(config, records).prepare(BEGAN + 100, USERS)
    assert answers is not None
    lengths_N = lengths[[int(one.user, 16) for one in answers]]
    mask_NC = torch.tensor(np.arange(lengths.max()) < lengths_N[:, None], dtype=torch.float64)
    logprobs_NC = (-mask_NC).requires_grad_()
    weights = [one.weight if capped else 1.0 for one in answers]
    inputs = LossInputs(
        logprobs_NC,
        logprobs_NC.detach(),
        torch.tensor([one.advantage * w for one, w in zip(answers, weights, strict=True)]),
        mask_NC,
        torch.arange(USERS),
    )
    totals = Totals(tokens=float(lengths.sum()), sequences=USERS, horizon=1000)
    policy_loss(config.train.loss, inputs, totals).loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs_NC.grad is not None
    moved_N = (logprobs_NC.grad.abs() * mask_NC).sum(1)
    return float(moved_N.max() / moved_N.sum())


def measure(options: Options) -> Measured:
    """Measures the key."""
    seeds = range(options.seed, options.seed + SEEDS)
    details: dict[str, Any] = {}
    for name, capped in (("capped", True), ("weights_1", False)):
        for aggregation in AGGREGATIONS:
            details[f"{name}_{aggregation}"] = {
                str(length): max(
                    largest_share(seed, length, aggregation, capped=capped) for seed in seeds
                )
                for length in LENGTHS
            }
    worst = max(max(details[f"capped_{one}"].values()) for one in AGGREGATIONS)
    return Measured({"largest_user_influence": worst / CAP}, details)
