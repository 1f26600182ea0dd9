"""A checkpoint engine for verl that moves weights through a run.

Configuration of verl::

    actor_rollout_ref.rollout.checkpoint_engine.backend=deltawire
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=deltawire.verl
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.deltawire.run=s3://bucket/run

Concurrency, at each update::

    all workers: prepare ─▶ build_topology ─▶ init_process_group(version)
    trainer, rank 0: send_weights: cast, encode, commit ──▶ bucket ──▶ rollout workers:
    trainer, others: take part in the gathering              receive_weights: wait for `version`,
                                                             fetch what changed, yield all tensors

Importing this module registers the engine; it needs verl.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import torch
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from deltawire.errors import InputError, RetryError
from deltawire.placement.layout import TORCH_DTYPES
from deltawire.store import Bucket, open_bucket
from deltawire.sync import find_run, load_mirror, newest_version, open_publisher, read_run
from deltawire.sync.follow.mirror import Mirror, rows_of
from deltawire.sync.publish.commit import STEP_RECORD
from deltawire.sync.publish.publisher import Publisher
from deltawire.sync.publish.sources import continue_publisher
from deltawire.wire.run import Run


@CheckpointEngineRegistry.register("deltawire")
class BucketCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """One worker's end, of the trainer or of a rollout.

    ``run`` is the run's location, ``directory`` the model's folder, whose configuration and
    tokenizer a new run carries. Floating-point weights are rounded to ``dtype``. ``is_master`` is
    what verl passes to rank 0 of the trainer; ``bucket_size`` is not used. A rollout worker waits
    at most ``timeout_s`` for a version, also while the store is away; the trainer at most
    ``max_outage`` for the store, None is no limit.

    Example::

        engine = BucketCheckpointEngine(run="s3://bucket/run", directory="Qwen3-0.6B")
    """

    def __init__(
        self,
        bucket_size: int = 0,
        *,
        run: str = "",
        directory: str | None = None,
        dtype: str = "bfloat16",
        timeout_s: float = 1800.0,
        max_outage: float | None = None,
        is_master: bool = False,
    ) -> None:
        del bucket_size
        if not run:
            raise InputError(
                "verl's checkpoint engine deltawire needs the run's location",
                hint="set checkpoint_engine.engine_kwargs.deltawire.run",
            )
        self.run = run
        self.is_master = is_master
        self._directory = directory
        self._dtype = getattr(torch, dtype)
        self._timeout_s = timeout_s
        self._max_outage = max_outage
        self._publisher: Publisher | None = None
        self._mirror: Mirror | None = None
        self._version = -1

    def prepare(self) -> dict[str, Any] | None:
        """Returns the number of the version that the master publishes next; None elsewhere."""
        if not self.is_master:
            return None
        if self._publisher is None:
            bucket = open_bucket(self.run, create=True)
            if find_run(bucket) is None or newest_version(bucket) is None:
                return {"version": 0}
            self._publisher = continue_publisher(bucket, max_outage=self._max_outage)
        self._publisher.flush()
        return {"version": self._publisher.next_version}

    @classmethod
    def build_topology(
        cls, trainer_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Tells every worker the version that the master's `prepare` returned."""
        version = metadata[0]["version"]
        return {"version": [version] * trainer_world_size}, {
            "version": [version] * rollout_world_size
        }

    def init_process_group(self, version: int) -> None:
        """Remembers the version that is sent next; there is no process group."""
        self._version = version

    def finalize(self) -> None:
        """Do nothing: weights stay where the next version's delta needs them."""

    async def send_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> None:
        """Publishes the trainer's weights; on other ranks than the master's only gather them."""
        if not self.is_master:
            for _ in weights:
                pass
            return
        tensors = {name: self._rounded(tensor) for name, tensor in weights}
        metadata = {} if global_steps is None else {STEP_RECORD: int(global_steps)}
        await asyncio.to_thread(self._publish, tensors, metadata)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, Tensor]]:
        """Yields all tensors of the version that is being sent, on the CPU, in name order.

        They share memory with this worker's mirror, which the next update changes.
        """
        del global_steps
        run, mirror = await asyncio.to_thread(self._load)
        for spec in run.tensors:
            bits = torch.from_numpy(rows_of(mirror, spec))
            yield spec.name, bits.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)

    def close(self) -> None:
        """Ends the publisher's threads."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()

    def _rounded(self, tensor: Tensor) -> Tensor:
        wanted = self._dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to("cpu", wanted, copy=True).contiguous()

    def _publish(self, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
        if self._publisher is None:
            self._publisher = open_publisher(
                self.run,
                tensors,
                directory=self._directory,
                metadata=metadata,
                max_outage=self._max_outage,
            )
        else:
            self._publisher.publish(tensors, metadata=metadata)
            self._publisher.flush()

    def _load(self) -> tuple[Run, Mirror]:
        """Returns the run, and the mirror at the version that is being sent; waits for it."""
        deadline = time.monotonic() + self._timeout_s
        bucket: Bucket = open_bucket(self.run, create=True)
        while True:
            try:
                return self._load_from(bucket, deadline)
            except RetryError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(bucket.poll_s)

    def _load_from(self, bucket: Bucket, deadline: float) -> tuple[Run, Mirror]:
        while (newest := newest_version(bucket)) is None or newest < self._version:
            if time.monotonic() > deadline:
                raise RetryError(
                    f"version {self._version} did not come within {self._timeout_s:.0f} s",
                    hint="has the trainer failed?",
                    run=self.run,
                )
            time.sleep(bucket.poll_s)
        run = read_run(bucket)
        mirror = load_mirror(bucket, run, at=self._version, into=self._mirror)
        self._mirror = mirror
        return run, mirror
