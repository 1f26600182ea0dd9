"""The warm-start process: trains on the task's own answers and writes a model directory."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deltawire.chat.requests import text_of
from deltawire.chat.text import Text
from deltawire.config import RunConfig
from deltawire.engines.transformers import TransformersEngine
from deltawire.envs import Task, TaskSource, open_tasks
from deltawire.envs.base import TasksWithAnswers
from deltawire.errors import InputError
from deltawire.events import WarmStep, known
from deltawire.export.models import load_model, load_tokenizer, save_model, stop_tokens
from deltawire.placement.device import resolve_device
from deltawire.rl.rollout.episode import play_all, run_episode
from deltawire.rl.rollout.episode_types import Episode, EpisodeLimits
from deltawire.runtime.process import Process, StopAskedError
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.train.warm_start import Pair, WarmStartProgress, warm_start

VALIDATION = 100
"""Problems for validation, which are neither trained on nor held out."""

MOST_EMPTY_BATCHES = 100
"""Batches that may hold problems for validation only, before a warm start gives up."""


def run_warm_start(
    process: Process,
    config: RunConfig,
    out: Path,
    *,
    watch: Callable[[WarmStartProgress], None] = lambda _: None,
) -> bool:
    """Build or load the model, train it, and write it to ``out``, atomically, replacing any
    previous one; returns False if the process was asked to stop before.

    ``watch`` is called after every step.
    """
    started = time.time()
    process.record_life("started")
    process.heartbeat.faults = config.faults
    torch.set_num_threads(max(config.threads, _processors()))
    try:
        with process.interruptible():
            tasks = open_tasks(config.task, seed=config.seed)
            model, tokenizer = origin(config)
            model.to(resolve_device(config.device_of("trainer")))
            mark = process.events.span("start", started)
            if config.warm_start.max_steps:
                _warm(process, config, tasks, model, tokenizer, watch, mark)
            if process.stopping:  # Its supervisor is gone, which sends no signal.
                raise StopAskedError
    except StopAskedError:
        process.record_life("stopped", "interrupted")
        return False
    unfinished = out.with_name(f"{out.name}.{process.nonce}")
    save_model(model, tokenizer, unfinished)
    if out.exists():
        shutil.rmtree(out)
    unfinished.rename(out)
    process.record_life("stopped", str(out))
    return True


def _processors() -> int:
    """The number of processors that this process may use, which may be pinned to some."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def origin(config: RunConfig) -> tuple[Any, Any]:
    """The model and tokenizer that the configuration names, before any warm start."""
    if config.model.path:
        return load_model(Path(config.model.path)), load_tokenizer(Path(config.model.path))
    assert config.model.build is not None
    return build_model(config.model.build, seed=config.seed), byte_tokenizer()


def _warm(
    process: Process,
    config: RunConfig,
    tasks: TaskSource,
    model: Any,
    tokenizer: Any,
    watch: Callable[[WarmStartProgress], None],
    mark: float,
) -> None:
    if not isinstance(tasks, TasksWithAnswers):
        raise InputError(
            f"environment {config.task.environment} has no answers for a warm start",
            hint="set warm_start.max_steps to 0",
        )
    answered: TasksWithAnswers = tasks
    text = text_of(config, tokenizer, bucket="")
    stops = stop_tokens(model, tokenizer)
    end = answer_end(text, stops)
    validation = _validation(answered)
    reserved = {answered.question(task) for task in validation}
    batch = config.warm_start.batch

    def pair(task: Task) -> Pair:
        return text.prompt(answered.prompt(task)), [*text.encode(answered.answer(task)), end]

    def draw(step: int) -> list[Pair]:
        # A batch that validation takes whole gives way to one from beyond the last step.
        for attempt in range(MOST_EMPTY_BATCHES):
            first = (step + attempt * config.warm_start.max_steps) * batch
            drawn = (tasks.draw("warm-start", first + i) for i in range(batch))
            if kept := [one for one in drawn if answered.question(one) not in reserved]:
                return [pair(task) for task in kept]
        raise InputError(
            f"the task draws no problem but the {len(reserved)} that a warm start validates with",
            hint="give the task more problems, or set warm_start.max_steps to 0",
        )

    def report(progress: WarmStartProgress) -> None:
        nonlocal mark
        process.heartbeat.progress("train")
        watch(progress)
        mark = process.events.span("train", mark)
        process.events.record(
            WarmStep(
                process=process.name,
                at=time.time(),
                step=progress.step,
                loss=known(progress.loss),
                accuracy=progress.accuracy,
            )
        )

    def check() -> float:
        with process.heartbeat.long_task("evaluate"):
            return asyncio.run(_greedy_accuracy(config, tasks, validation, model, text, stops))

    model.train()
    warm_start(
        model,
        config.warm_start,
        draw=draw,
        check=check,
        report=report,
        stopping=lambda: process.stopping,
    )


def answer_end(text: Text, stops: Sequence[int]) -> int:
    """The token that ends an answer: the chat template's own, if generation stops at it."""
    return text.end if text.end is not None and text.end in stops else stops[0]


def _validation(tasks: TasksWithAnswers) -> list[Task]:
    """Draws the problems for validation.

    A task of few problems gives up to a fifth of them, so that enough are left to train on.
    """
    drawn = [tasks.draw("validation", index) for index in range(VALIDATION)]
    distinct = {tasks.question(task): task for task in drawn}
    seen = (tasks.draw("warm-start", index) for index in range(VALIDATION))
    left = sum(tasks.question(task) not in distinct for task in seen)
    if left > VALIDATION // 2:
        return drawn
    return list(distinct.values())[: max(len(distinct) // 5, 1)]


async def _greedy_accuracy(
    config: RunConfig,
    tasks: TaskSource,
    problems: list[Task],
    model: Any,
    text: Text,
    stops: list[int],
) -> float:
    rollout = config.rollout
    engine = TransformersEngine(
        model, stop_tokens=stops, slots=len(problems), capacity=rollout.context
    )
    limits = EpisodeLimits.of(rollout)

    def play(task: Task) -> Awaitable[Episode]:
        return run_episode(engine, tasks.open(task), text, temperature=0.0, limits=limits)

    plays = [partial(play, task) for task in problems]
    episodes = await play_all(engine, plays, concurrent=engine.slots)
    model.train()
    return sum(episode.solved for episode in episodes) / len(problems)
