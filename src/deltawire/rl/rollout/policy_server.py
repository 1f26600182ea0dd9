"""Serves a policy to a worker: an engine of the registry, the text and the tasks around it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deltawire.chat.requests import RequestSettings, text_of
from deltawire.chat.text import Text
from deltawire.chat.thinking import limits_of
from deltawire.config import RunConfig
from deltawire.engines.base import EngineRequest, Sampler, Weights, nothing_to_close
from deltawire.engines.registry import open_engine
from deltawire.envs import TaskSource, open_tasks
from deltawire.errors import InputError
from deltawire.events import Swapped
from deltawire.export.lines import open_policy
from deltawire.export.models import (
    fetch_model_files,
    load_tokenizer,
    move_to,
    serve_as,
    stop_tokens,
)
from deltawire.export.quantized import serve_quantized
from deltawire.placement.device import resolve_device
from deltawire.runtime.lines import publication_bucket
from deltawire.runtime.memory import release_heap
from deltawire.runtime.process import RUN_PATIENCE_S, Process, open_run
from deltawire.store import Bucket
from deltawire.sync import Follower, Steps, Update, newest_version
from deltawire.wire.run import Run


@dataclass
class ServedPolicy:
    """The model being served and everything that samples from it."""

    engine: Sampler
    live: Weights
    text: Text
    tasks: TaskSource
    close: Callable[[], Awaitable[None]] = nothing_to_close
    external: bool = False
    """True if the engine runs in another process, which keeps decoding during a swap."""


def serve_policy(
    process: Process,
    run: Run,
    config: RunConfig,
    *,
    engine: str,
    seed: int,
    slots: int | None = None,
    at: int | None = None,
    stepwise: bool = False,
    record_routes: bool = False,
    weights: str = "",
) -> tuple[ServedPolicy, Steps]:
    """Opens ``engine`` on the run's model, at version ``at`` (None: the newest).

    ``weights`` is the exporter of the versions to serve, one that the run publishes; by default
    ``train.exporter``. Waits for version 0 if nothing is committed yet. Raises `InputError` if the
    engine is unknown, cannot run here or does not come up.
    """
    rollout, device = config.rollout, _device_of(process, config)
    torch.set_num_threads(config.threads)
    bucket, exporter = process.bucket, weights or config.train.exporter
    if exporter != config.train.exporter:
        bucket, run = _open_line(process, exporter)
    folder = fetch_model_files(bucket, run)
    try:
        tokenizer = load_tokenizer(Path(folder.name))
        text = _open_text(config, tokenizer, process.bucket.url)
        _await_version(process, bucket)

        def build() -> Any:
            place = Path(folder.name)
            adapter = config.train.served_adapter
            model = open_policy(process.bucket, config, place, adapter=adapter, device=device)
            return serve_quantized(model, exporter)

        opened = open_engine(
            engine,
            EngineRequest(
                bucket=bucket,
                run=run,
                folder=Path(folder.name),
                build_model=lambda: move_to(serve_as(build(), rollout.precision), device),
                stop_tokens=lambda model: stop_tokens(model, tokenizer),
                slots=slots or rollout.slots,
                capacity=rollout.context,
                precision=rollout.precision,
                seed=seed,
                threads=config.threads,
                version=at,
                stepwise=stepwise,
                record_routes=record_routes,
                truncation=RequestSettings.of(rollout).truncation,
                temperature=rollout.temperature,
                is_stopping=process.is_stopping,
            ),
        )
    except BaseException:
        folder.cleanup()
        raise
    if not opened.external:
        folder.cleanup()

    async def close() -> None:
        await opened.close()
        folder.cleanup()

    tasks = open_tasks(config.task, seed=config.seed)
    policy = ServedPolicy(opened.sampler, opened.weights, text, tasks, close, opened.external)
    return policy, opened.steps


def _device_of(process: Process, config: RunConfig) -> torch.device:
    return resolve_device(
        config.device_of("evaluator" if process.role == "evaluator" else "worker")
    )


def _open_text(config: RunConfig, tokenizer: Any, bucket: str) -> Text:
    text, thinking = text_of(config, tokenizer, bucket=bucket), config.rollout.thinking
    if thinking is not None:  # A model without marks is refused before it is loaded.
        limits_of(text, thinking, thinking.largest)
    return text


def _open_line(process: Process, exporter: str) -> tuple[Bucket, Run]:
    """Opens the line of a run's versions by another exporter; raises `InputError` if the run does
    not publish them."""
    bucket = publication_bucket(process.bucket, exporter)
    run, _ = open_run(bucket, role="worker", wait_s=RUN_PATIENCE_S, stopping=process.is_stopping)
    return bucket, run


def _await_version(process: Process, bucket: Bucket) -> None:
    """Waits until the run has a version; raises `InputError` if none appears."""
    deadline = time.monotonic() + RUN_PATIENCE_S
    while newest_version(bucket) is None:
        if process.stopping or time.monotonic() > deadline:
            raise InputError("the run has no version 0", run=bucket.url)
        process.wait(bucket.poll_s)


def follow(steps: Steps, served: ServedPolicy) -> Follower:
    """A follower that stages each update for the weights being served."""
    release_heap()  # Of the first version's bits, which were copied into the model.

    def stage(update: Update) -> None:
        served.live.stage(update.patches, update.version, update.digest)

    return Follower(steps, stage=stage)


def swap(served: ServedPolicy, follower: Follower, process: Process) -> None:
    """Swaps to the prepared version, if there is one: between two steps, attested, or not at
    all."""
    update: Update | None = follower.poll()
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
