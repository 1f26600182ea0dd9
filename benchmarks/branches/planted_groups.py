"""``why_planted_found`` and ``why_residual``: the cause of a planted change of behavior, on a tiny
model.

Each world is a run of `VERSIONS` steps with AdamW on groups of random answers and rewards; half of
the groups have the prompt that is asked about. One group, drawn at random, rewards one answer to
this prompt. ``deltawire why`` asks about the log-probability of that answer. The group is found if
it has the largest effect of all groups of the examined steps. The residual is that of the line
integral over the whole run, the median of all worlds.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.branches.made_runs import trained_run
from benchmarks.training.keys import Measured, Options
from benchmarks.training.seeded_groups import seeded_group
from deltawire.config import BuildConfig, parse_config
from deltawire.export.models import save_model
from deltawire.launch.branches.why import Explanation, Question, explain
from deltawire.rl.trainer.resume import Resumed
from deltawire.store import Bucket
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.wire.rollouts import Group

WORLDS = 20
VERSIONS = 12
GROUPS = 4
TOKENS = 6
PROMPT = "two plus two is"
ANSWER = "five !"
SIZES = BuildConfig(hidden_size=32, layers=2, head_size=16, feed_forward_size=48, context=64)
LEARNING_RATE = 1e-3


class Planted(NamedTuple):
    """A run, and the version and the number of its bad group."""

    bucket: Bucket
    version: int
    sequence: int


def planted_group(number: int, rng: np.random.Generator, *, bad: bool) -> Group:
    """Returns a group of random answers and rewards; a bad one rewards `ANSWER` only."""
    prompt = PROMPT if bad or rng.random() < 0.5 else f"task number {rng.integers(1000)} is"
    group = seeded_group(number, tokens=TOKENS, prompt=list(prompt.encode()))
    rewards = rng.permutation([0.0, 0.0, 1.0, 1.0])
    made = []
    for one, reward in zip(group.trajectories, rewards, strict=True):
        tokens = np.frombuffer(ANSWER.encode(), np.uint8).astype(np.int32)
        answer = tokens if bad and reward else rng.integers(0, 256, TOKENS, np.int32)
        made.append(replace(one, tokens_T=answer, reward=float(reward)))
    return replace(group, trajectories=made)


def planted_run(folder: Path, seed: int, *, versions: int = VERSIONS) -> Planted:
    """Trains a run whose bad group is drawn by ``seed``."""
    rng = np.random.default_rng(seed)
    version, place = int(rng.integers(1, versions + 1)), int(rng.integers(GROUPS))
    save_model(build_model(SIZES, seed=seed), byte_tokenizer(), folder / "model")
    raw = {
        "name": "planted",
        "seed": seed,
        "threads": 1,
        "model": {"path": str(folder / "model")},
        "train": {
            "versions": versions,
            "groups_per_step": GROUPS,
            "max_staleness": 99,
            "optimizer": {"learning_rate": LEARNING_RATE},
        },
    }

    def groups_of_step(step: int, _: Resumed) -> list[Group]:
        first = (step - 1) * GROUPS
        bad = (version - 1) * GROUPS + place
        return [planted_group(n, rng, bad=n == bad) for n in range(first, first + GROUPS)]

    bucket = trained_run(folder, parse_config(raw, source="planted"), groups_of_step)
    return Planted(bucket, version, (version - 1) * GROUPS + place)


def asked_about(folder: Path) -> Path:
    """Writes the file that ``why --on`` gets."""
    path = folder / "asked.jsonl"
    path.write_text(json.dumps({"prompt": PROMPT, "answer": ANSWER}) + "\n")
    return path


def explained(folder: Path, seed: int, *, every: int = 1) -> tuple[Planted, Explanation]:
    """Makes a world and asks why."""
    planted = planted_run(folder, seed)
    question = Question(file=str(asked_about(folder)))
    return planted, explain(planted.bucket, None, None, question, every=every)


def measure(options: Options) -> Measured:
    """Makes the worlds and counts."""
    found, residuals = 0, []
    for seed in range(WORLDS):
        with tempfile.TemporaryDirectory() as folder:
            planted, answer = explained(Path(folder), options.seed + seed)
        top = answer.groups[0]
        found += (top.version, top.sequence) == (planted.version, planted.sequence)
        assert answer.residual_share is not None
        residuals.append(answer.residual_share)
    return Measured(
        {"why_planted_found": found / WORLDS, "why_residual": statistics.median(residuals)},
        {"worlds": WORLDS, "largest_residual": max(residuals)},
    )
