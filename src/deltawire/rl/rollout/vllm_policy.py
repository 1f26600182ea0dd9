"""A worker's engine outside: a vLLM server of the worker's own, led from version to version."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from deltawire.chat.text import Text
from deltawire.config import RunConfig
from deltawire.engines.remote import RemoteSampler, RemoteWeights
from deltawire.engines.server import Server
from deltawire.envs import open_tasks
from deltawire.errors import InputError
from deltawire.export.models import empty_model, fetch_model_files, load_tokenizer, stop_tokens
from deltawire.rl.rollout.policy_server import Served
from deltawire.runtime.process import RUN_PATIENCE_S, Process
from deltawire.sync import ManifestFollower, Update
from deltawire.sync.chain.objects import with_retries
from deltawire.wire.run import Run

BLOCK = 128
"""Tokens that a cache is given out by, at most; vLLM's choice on a CPU."""


def serve_outside(
    process: Process, run: Run, config: RunConfig, *, seed: int
) -> tuple[Served, ManifestFollower]:
    """Start a vLLM on the run's model, and have it serve the newest version; waits for version 0.

    Weights are fetched once, by vLLM; this process reads what they must add up to. Raises
    `InputError` if there is no vLLM here or it does not come up, `ResyncError` if it does not get
    to the version, or to other bits than its manifest says.
    """
    bucket, rollout = process.bucket, config.rollout
    announced = ManifestFollower(bucket, run)
    newest = _first(process, announced)  # vLLM ends if there is none yet.
    folder = fetch_model_files(bucket, run)
    with torch.device("meta"):
        model: Any = empty_model(Path(folder.name))
    tokenizer = load_tokenizer(Path(folder.name))
    server = Server(
        Path(folder.name),
        bucket.url,
        slots=rollout.slots,
        capacity=rollout.context,
        cache_bytes=cache_bytes(model.config, slots=rollout.slots, capacity=rollout.context),
        precision=rollout.precision,
        seed=seed,
        threads=config.threads,
    )
    try:
        server.wait_until_up(stopping=process.is_stopping)
        live = RemoteWeights(server.calls)
        live.swap({}, newest.version, newest.digest)
        announced.commit(newest)
    except BaseException:
        server.close()
        folder.cleanup()
        raise
    engine = RemoteSampler(
        server.socket,
        stop_tokens=stop_tokens(model, tokenizer),
        slots=rollout.slots,
        capacity=rollout.context,
        version=newest.version,
    )

    async def close() -> None:
        await engine.close()
        server.close()
        folder.cleanup()

    tasks = open_tasks(config.task, seed=config.seed)
    served = Served(engine, live, Text(tokenizer), tasks, close, outside=True)
    return served, announced


def _first(process: Process, announced: ManifestFollower) -> Update:
    deadline = time.monotonic() + RUN_PATIENCE_S
    while (update := with_retries(announced.prepare)) is None:
        if process.stopping or time.monotonic() > deadline:
            raise InputError("the run has no version 0", run=process.bucket.url)
        process.wait(process.bucket.poll_s)
    return update


def cache_bytes(config: Any, *, slots: int, capacity: int) -> int:
    """Enough for ``slots`` full sequences' keys and values, at float32, and a quarter more."""
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    size = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    shared = int(getattr(text, "num_key_value_heads", None) or heads)
    tokens = slots * -(-capacity // BLOCK) * BLOCK
    needed = 2 * 4 * int(text.num_hidden_layers) * shared * size * tokens
    return needed + needed // 4 + (16 << 20)
