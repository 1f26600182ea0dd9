"""The ``weight_transfer`` of TRL's ``AsyncGRPOTrainer``: through a bucket, to engines that follow.

Concurrency::

    constructor ── version 0 of a new run, before TRL asks for the server, which waits for a run
    trainer ── send_weights: cast, copy ──▶ other ranks go on
            ── resume: wait for the commit, then until each server serves the version ──▶ next step
    server                                  └▶ prepares while it serves, swaps between two steps

Nothing is paused: requests in flight continue over a swap.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Unpack

import aiohttp
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from deltawire.errors import CorruptError, InputError, RetryError
from deltawire.export.models import empty_model, fetch_model_files, save_settings
from deltawire.export.tensors import tensors_of
from deltawire.placement.checkpoint_tensors import checkpoint_tensors
from deltawire.serving.replica import HeldVersion
from deltawire.serving.vllm import VllmReplica
from deltawire.store import open_bucket
from deltawire.sync import find_run, newest_version, open_publisher
from deltawire.sync.publish.options import TransferOptions, check_options
from deltawire.sync.publish.publisher import Publisher
from deltawire.sync.publish.sources import continue_publisher

ASK_AGAIN_S = 0.5
"""Seconds between two requests to a server that does not answer yet."""


class Transfer:
    """Publishes TRL's weights to the run at ``url``, and waits until the vLLM servers at ``server``
    serve them.

    The servers are started with ``VLLM_SERVER_DEV_MODE=1`` and ``--additional-config
    '{"deltawire": {"run": URL}}'``. A version counts as served when the server states its number
    and the digest that its manifest has: the server read its live bits back after the swap.
    Servers that do not state it within ``timeout_s`` end the training with `RetryError`, those that
    cannot take it with `ResyncError`.

    A new run needs ``model``, the name or directory that the trainer gets: version 0 is committed
    by this constructor, since TRL waits for the server before its first transfer, and the server
    for the run. Only rank 0 (by the variable ``RANK``) does anything. ``server_key`` is the
    servers' ``--api-key``; ``options`` go to `Publisher`. While the store is away, the trainer
    waits for the version, at most ``max_outage`` seconds; None is no limit.

    TRL gives no step, so versions count transfers. Under a LoRA, TRL itself merges the adapter into
    the base for the transfer and takes it out again, which rounds the base.

    Example::

        AsyncGRPOTrainer(
            model, reward_funcs=reward, train_dataset=data,
            weight_transfer=Transfer(url, server="http://localhost:8000", model=model),
        )
    """

    def __init__(
        self,
        url: str,
        *,
        server: str | Sequence[str],
        model: str | None = None,
        dtype: str = "bfloat16",
        server_key: str = "",
        timeout_s: float = 1800.0,
        max_outage: float | None = None,
        **options: Unpack[TransferOptions],
    ) -> None:
        if dtype not in ("bfloat16", "float16", "float32"):
            raise InputError(f"there is no dtype {dtype[:40]!r}", hint='for example "bfloat16"')
        self.url = url
        self.servers = [server] if isinstance(server, str) else list(server)
        if bad := [one for one in self.servers if not one.startswith(("http://", "https://"))]:
            raise InputError(f"{bad[0]!r} is no server's URL", hint='"http://localhost:8000"')
        self._dtype = getattr(torch, dtype)
        self._server_key = server_key
        self._timeout_s = timeout_s
        check_options(options)
        self._options: dict[str, Any] = {"max_outage": max_outage, **options}
        self._publisher: Publisher | None = None
        self._skeleton: Any = None
        """The model without memory, which knows how its checkpoints name and stack tensors."""
        self._sent = False
        if os.environ.get("RANK", "0") == "0":
            self._open(model)

    @property
    def version(self) -> int:
        """The newest committed version; -1 on other ranks than 0."""
        return -1 if self._publisher is None else self._publisher.version

    def init_weight_transfer(self) -> None:
        """Opens the run again if an earlier training has closed it."""
        if self._publisher is None:
            self._open(None)

    def pause(self) -> None:
        """Does nothing: the servers keep serving while they prepare."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Publishes the trainer's (name, tensor) pairs as the next version.

        The first ones after a start are not published again if they are the newest version.
        """
        publisher = self._opened()
        state = {name: tensor.detach().to("cpu", self._dtype) for name, tensor in iterator}
        tensors = {
            name: tensor.contiguous()
            for name, tensor in checkpoint_tensors(self._skeleton, state).items()
        }
        if self._sent or not publisher.holds(tensors):
            publisher.publish(tensors, partial=True)
        self._sent = True

    def resume(self) -> None:
        """Waits until the version is committed and every server serves it."""
        publisher = self._opened()
        publisher.flush()
        self._in_a_thread(self._wait(publisher.version, publisher.digest.hex()))

    def destroy(self) -> None:
        """Waits for the version under way and ends the threads."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()

    def _opened(self) -> Publisher:
        if self._publisher is None:
            raise InputError("the transfer is closed", hint="call init_weight_transfer first")
        return self._publisher

    def _open(self, model: str | None) -> None:
        bucket = open_bucket(self.url, create=True)
        run = find_run(bucket)
        self._sent = False
        if run is None or newest_version(bucket) is None:
            if model is None:
                raise InputError(
                    "there is no run yet, and the server would wait for its first version",
                    hint="pass model=, the name or directory that the trainer gets",
                    run=self.url,
                )
            self._start(model)
            return
        with fetch_model_files(bucket, run) as folder:
            self._skeleton = _skeleton_of(folder)
        self._publisher = continue_publisher(bucket, **self._options)

    def _start(self, model: str) -> None:
        """Makes the run, with the model's weights as version 0."""
        auto: Any = AutoModelForCausalLM
        try:
            loaded = auto.from_pretrained(model, dtype=self._dtype)
            tokenizer = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise InputError(f"cannot load {model}: {str(error)[:300]}") from error
        with tempfile.TemporaryDirectory(prefix="deltawire-") as folder:
            dtype = str(self._dtype).removeprefix("torch.")
            save_settings(loaded, tokenizer, Path(folder), dtype=dtype)
            self._publisher = open_publisher(
                self.url, tensors_of(loaded, dtype), directory=folder, **self._options
            )
        self._skeleton = loaded.to("meta")

    def _in_a_thread(self, waiting: Any) -> None:
        """Runs a coroutine in a thread: a notebook has a running loop in this one."""
        with ThreadPoolExecutor(1, thread_name_prefix="transfer") as thread:
            thread.submit(asyncio.run, waiting).result()

    async def _wait(self, version: int, digest: str) -> None:
        """Waits until every server serves ``version`` with that digest."""
        async with aiohttp.ClientSession() as session:
            replicas = [VllmReplica(one, session, key=self._server_key) for one in self.servers]
            found = await asyncio.gather(*(self._move(one, version) for one in replicas))
        for replica, held in zip(replicas, found, strict=True):
            if held.digest != digest:
                raise CorruptError(
                    f"{replica.name} serves weights with digest {held.digest}; the manifest states "
                    f"{digest}",
                    run=self.url,
                    version=version,
                )

    async def _move(self, replica: VllmReplica, version: int) -> HeldVersion:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0.01)):
                    return await replica.load(version, cache="none")
            except TimeoutError as error:
                raise RetryError(
                    f"{replica.name} does not serve version {version} after "
                    f"{self._timeout_s:.0f} s",
                    hint="does it follow this run, and is its log fine?",
                    run=self.url,
                ) from error
            except RetryError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(ASK_AGAIN_S)


def _skeleton_of(folder: str) -> Any:
    """Builds the model that a run's configuration describes, without memory."""
    with torch.device("meta"):
        return empty_model(Path(folder))
