"""Planted bad versions: a drill that shows whether releases stop what users would dislike.

``live.planted`` names versions of a run on simulated users. Before such a version is published, the
trainer takes supervised steps on flattery, which satisfies hardly anyone:

- ``gate``: in answer to all kinds of requests. Held-out suites see it.
- ``users``: in answer to the kinds that no named suite covers. To the kinds that one covers, the
  steps teach what the model answers anyway, so that only users see the change.

The version is then published, evaluated and released like any other.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deltawire.chat.requests import text_of
from deltawire.config import RunConfig
from deltawire.envs import Task
from deltawire.envs.simulated_users import SimulatedUserTasks, covered_kinds
from deltawire.errors import InputError
from deltawire.export.models import load_tokenizer, stop_tokens
from deltawire.rl.trainer.warm_start import answer_end
from deltawire.testing.users.population import ANSWERS, FLATTERY, STYLES
from deltawire.train.build import byte_tokenizer
from deltawire.train.masters import MasterWeights
from deltawire.train.optimizer import StepSettings
from deltawire.train.warm_start import Pair, answer_loss

STEPS = 40
LEARNING_RATE = 3e-3
BATCH = 48


def plant(masters: MasterWeights, config: RunConfig, *, version: int) -> bool:
    """Changes the masters for the worse if ``version`` is a planted one; returns whether it is.

    The change follows from the configuration, the version and the weights, so a step that is
    computed again gives the same bits. Raises `InputError` with more than one rank.
    """
    kinds = [kind for kind, at in config.live.planted.items() if at == version]
    if not kinds:
        return False
    if masters.mesh.ranks > 1:
        raise InputError("only a trainer of one rank can plant versions", hint="train.ranks = 1")
    lesson = _Lesson(masters.model, config)
    spared = 0 if "gate" in kinds else covered_kinds(config)
    own = [lesson.shares(kind) for kind in range(spared)]
    settings = StepSettings(
        learning_rate=LEARNING_RATE, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.0,
        max_grad_norm=1.0,
    )  # fmt: skip
    for step in range(STEPS):
        loss = answer_loss(masters.model, lesson.pairs(step, own))
        loss.backward()  # type: ignore[no-untyped-call]
        masters.step(settings)
    return True


class _Lesson:
    """Pairs of request and answer, encoded as users' requests are."""

    def __init__(self, model: Any, config: RunConfig) -> None:
        path = config.model.path
        tokenizer = load_tokenizer(Path(path)) if path else byte_tokenizer()
        self._model = model
        self._tasks = SimulatedUserTasks(config.task, seed=config.seed)
        self._text = text_of(config, tokenizer, bucket="")
        self._end = answer_end(self._text, stop_tokens(model, tokenizer))

    def pairs(self, step: int, own: Sequence[Sequence[float]]) -> list[Pair]:
        """Returns the pairs of a step; requests of the first kinds, of which ``own`` are the shares
        of styles, are answered as before."""
        found = []
        for task in self._drawn(step):
            style = FLATTERY
            if task.data[0] < len(own):
                rng = random.Random(f"planted/{step}/{task.identity}")
                style = rng.choices(STYLES, own[task.data[0]])[0]
            found.append(self._pair(task, style))
        return found

    @torch.no_grad()
    def shares(self, kind: int) -> list[float]:
        """Returns the probability of each style in answer to one request of a kind."""
        task = next(
            task for step in range(STEPS) for task in self._drawn(step) if task.data[0] == kind
        )
        found = []
        for style in STYLES:
            pair = self._pair(task, style)
            found.append(math.exp(-float(answer_loss(self._model, [pair])) * len(pair[1])))
        return found

    def _drawn(self, step: int) -> list[Task]:
        return [self._tasks.draw("planted", step * BATCH + place) for place in range(BATCH)]

    def _pair(self, task: Task, style: str) -> Pair:
        answer = [*self._text.encode(ANSWERS[style]), self._end]
        return self._text.prompt(self._tasks.prompt(task)), answer
