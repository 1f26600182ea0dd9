"""Budget curve: held-out accuracy with several thinking budgets, and its area.

For c correct of n answers to a problem, the chance that one of k is correct is estimated without
bias as 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, Evaluating Large Language Models Trained on
Code). The area is that under the line through the points (budget, accuracy), divided by the range
of budgets, so that a model that always answers correctly has area 1; AnytimeReasoner
(arXiv 2505.13438) trains on such an area.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import comb
from statistics import fmean

from deltawire.chat.thinking import limits_of
from deltawire.config import RunConfig
from deltawire.envs import Task, TaskSource
from deltawire.errors import InputError
from deltawire.estimates import BudgetScore
from deltawire.rl.rollout.episode import play_tasks
from deltawire.rl.rollout.episode_types import Episode, EpisodeLimits
from deltawire.rl.rollout.policy_server import ServedPolicy


@dataclass(frozen=True)
class AnsweredProblem:
    """The answers to one problem: the text of each, and whether it is correct."""

    family: str
    answers: tuple[str, ...]
    correct: tuple[bool, ...]


async def measure_budgets(
    served: ServedPolicy,
    config: RunConfig,
    progress: Callable[[str], None] = lambda _: None,
    *,
    tasks: TaskSource | None = None,
) -> list[BudgetScore]:
    """Solves every held-out problem ``evaluate.samples`` times with each of ``evaluate.budgets``.

    Raises `InputError` if every episode of a budget fails.
    """
    thinking = config.rollout.thinking
    if thinking is None:
        return []
    source = served.tasks if tasks is None else tasks
    problems, samples = source.heldout(), config.evaluate.samples
    scores = []
    for budget in config.evaluate.budgets:
        limits = replace(
            EpisodeLimits.of(config.rollout),
            budget=budget,
            max_tokens=budget + thinking.answer_tokens,
        )
        episodes = await play_tasks(
            served.engine,
            source,
            served.text,
            [task for task in problems for _ in range(samples)],
            temperature=config.rollout.temperature,
            limits=limits,
            concurrent=config.rollout.concurrent or served.engine.slots,
            after_step=lambda: progress("evaluate"),
        )
        answered = _answered(served, config, problems, episodes)
        completed = [episode for episode in episodes if not episode.cause]
        if not completed:
            raise InputError(f"every held-out episode failed: {episodes[0].cause}")
        scores.append(score_of(budget, answered, completed))
    return scores


def score_of(
    budget: int, problems: Sequence[AnsweredProblem], episodes: Sequence[Episode]
) -> BudgetScore:
    """Summarizes the answers of one budget; ``episodes`` are those that did not fail."""
    problems = [one for one in problems if one.correct]
    tokens = [int(t.mask_T.sum()) for e in episodes for t in e.trajectories]
    correct = sum(sum(one.correct) for one in problems)
    most = min(len(one.correct) for one in problems)
    powers = [k for k in (1 << shift for shift in range(16)) if k <= most]
    families: dict[str, list[float]] = defaultdict(list)
    for one in problems:
        families[one.family].append(fmean(one.correct))
    forced = [any(t.thinking and t.thinking.forced for t in e.trajectories) for e in episodes]
    return BudgetScore(
        budget=budget,
        accuracy=fmean(value for one in problems for value in one.correct),
        pass_at={
            str(k): fmean(pass_at(k, len(one.correct), sum(one.correct)) for one in problems)
            for k in powers
        },
        majority=fmean(majority_is_correct(one) for one in problems),
        tokens=sum(tokens) / len(episodes),
        tokens_per_correct=sum(tokens) / correct if correct else None,
        forced=fmean(forced),
        families={name: fmean(shares) for name, shares in sorted(families.items())},
    )


def pass_at(k: int, answers: int, correct: int) -> float:
    """The chance that at least one of ``k`` answers is correct, from those that were drawn."""
    return 1.0 - comb(answers - correct, k) / comb(answers, k)


def majority_is_correct(problem: AnsweredProblem) -> bool:
    """Returns whether the most frequent answer is correct; of several, the first that was given."""
    counts = Counter(problem.answers)
    chosen = max(problem.answers, key=lambda answer: counts[answer])
    return problem.correct[problem.answers.index(chosen)]


def area_of(scores: Sequence[BudgetScore]) -> float | None:
    """The area under accuracy over budgets by the trapezoidal rule, as a share of the range; the
    accuracy itself for one budget, None for none."""
    if len(scores) < 2:
        return scores[0].accuracy if scores else None
    parts = [
        (right.budget - left.budget) * (left.accuracy + right.accuracy) / 2
        for left, right in pairwise(scores)
    ]
    return sum(parts) / (scores[-1].budget - scores[0].budget)


def _answered(
    served: ServedPolicy, config: RunConfig, problems: Sequence[Task], episodes: Sequence[Episode]
) -> list[AnsweredProblem]:
    """The answers by problem; failed episodes are left out."""
    assert config.rollout.thinking is not None
    end = limits_of(served.text, config.rollout.thinking, 1).format.end
    samples = len(episodes) // len(problems)
    found = []
    for place, task in enumerate(problems):
        played = [e for e in episodes[place * samples : (place + 1) * samples] if not e.cause]
        last = [e.trajectories[-1].tokens_T.tolist() for e in played]
        texts = tuple(served.text.decode(t[end.place(t) :]).strip() for t in last)
        found.append(AnsweredProblem(task.family, texts, tuple(e.solved for e in played)))
    return found
