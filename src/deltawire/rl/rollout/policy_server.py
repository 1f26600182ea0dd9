"""Serves a policy to a worker: the engine, its live weights and the follower."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deltawire.chat.text import Text
from deltawire.config import RunConfig
from deltawire.engines.base import Sampler, Weights
from deltawire.engines.transformers import TransformersEngine
from deltawire.envs import TaskSource, open_tasks
from deltawire.errors import InputError
from deltawire.events import Swapped
from deltawire.export.models import (
    empty_model,
    fetch_model_files,
    load_tokenizer,
    serve_as,
    stop_tokens,
)
from deltawire.placement.live import LiveWeights
from deltawire.runtime.process import RUN_PATIENCE_S, Process
from deltawire.sync import Follower, Mirror, Steps, Subscriber, Update, load_mirror
from deltawire.wire.run import Run


async def _nothing_to_close() -> None:
    pass


@dataclass
class Served:
    """The model being served and everything that samples from it."""

    engine: Sampler
    live: Weights
    text: Text
    tasks: TaskSource
    close: Callable[[], Awaitable[None]] = _nothing_to_close
    outside: bool = False
    """Whether another process serves it, which goes on while it takes up a version."""


def serve_model(
    process: Process,
    run: Run,
    config: RunConfig,
    *,
    seed: int,
    slots: int | None = None,
    at: int | None = None,
    record_routes: bool = False,
) -> tuple[Served, Subscriber]:
    """Build the run's model, load version ``at`` (the newest if None) and put an engine on it,
    which tells its expert choices if asked to.

    Waits for version 0 if nothing is committed yet.
    """
    bucket = process.bucket
    torch.set_num_threads(config.threads)
    with fetch_model_files(bucket, run) as folder:
        model: Any = serve_as(empty_model(Path(folder)), config.rollout.precision)
        tokenizer = load_tokenizer(Path(folder))
    mirror = await_mirror(process, run, at=at)
    live = LiveWeights(model, run.tensors)
    live.load(mirror)
    engine = TransformersEngine(
        model,
        stop_tokens=stop_tokens(model, tokenizer),
        slots=slots or config.rollout.slots,
        capacity=config.rollout.context,
        seed=seed,
        version=mirror.version,
        record_routes=record_routes,
    )
    tasks = open_tasks(config.task, seed=config.seed)
    return Served(engine, live, Text(tokenizer), tasks), Subscriber(bucket, run, mirror)


def await_mirror(process: Process, run: Run, *, at: int | None = None) -> Mirror:
    """Version ``at``, or the newest if None; waits for version 0 if nothing is committed yet."""
    bucket = process.bucket
    deadline = time.monotonic() + RUN_PATIENCE_S
    while (mirror := load_mirror(bucket, run, at=at)) is None:
        if process.stopping or time.monotonic() > deadline:
            raise InputError("the run has no version 0", run=bucket.url)
        process.wait(bucket.poll_s)
    return mirror


def follow(steps: Steps, served: Served) -> Follower:
    """A follower that stages each update for the weights being served."""

    def stage(update: Update) -> None:
        served.live.stage(update.patches, update.version, update.digest)

    return Follower(steps, stage=stage)


def swap(served: Served, follower: Follower, process: Process) -> None:
    """Take up the prepared version, if there is one: between two steps, attested, or not at all."""
    update: Update | None = follower.take()
    if update is None:
        return
    began = process.events.now()
    started = time.perf_counter()
    served.live.swap(update.patches, update.version, update.digest)
    served.engine.version = update.version
    swap_ms = (time.perf_counter() - started) * 1e3
    follower.commit(update)
    process.events.span("swap", began)
    process.events.record(
        Swapped(
            process=process.name,
            at=time.time(),
            version=update.version,
            running=served.engine.active,
            swap_ms=swap_ms,
            prepare_ms=update.prepare_ms,
        )
    )
