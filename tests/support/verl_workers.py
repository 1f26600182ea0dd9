"""Workers of verl for its own manager of checkpoint engines: they import verl, and run in Ray."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

BACKEND = "deltawire"
MODULE = "deltawire.verl"


def weights(step: int) -> dict[str, torch.Tensor]:
    """Returns the weights that the trainer holds after ``step`` steps."""
    generator = torch.Generator().manual_seed(0)
    found = {
        "model.embed_tokens.weight": torch.randn(12, 8, generator=generator),
        "model.norm.weight": torch.ones(8),
    }
    found["model.norm.weight"] += step
    return found


class Trainer(Worker):  # type: ignore[misc]
    """A rank of the trainer, as verl's own workers with an engine are."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        import deltawire.verl  # noqa: F401 - registers the engine

        self.checkpoint_engine = CheckpointEngineRegistry.new(
            BACKEND, bucket_size=1 << 20, is_master=self.rank == 0, **options
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, mode: str) -> None:
        """Sends the weights of this step."""
        assert mode == BACKEND
        await self.checkpoint_engine.send_weights(iter(weights(global_steps).items()), global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """As verl's workers have it."""
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class Adapter:
    """The server of a rollout: writes what it receives to a file for each step."""

    replica_rank = 0
    is_leader_rank = True

    def __init__(self, folder: str) -> None:
        self.folder = folder

    async def update_weights(self, received: Any, *, global_steps: int, wire_format: str) -> None:
        """Stores the weights of a step."""
        assert wire_format == "named_tensors"
        found = {name: tensor.clone() async for name, tensor in received}
        torch.save(found, Path(self.folder) / f"{global_steps}.pt")


class Replica:
    """A replica, as far as the manager asks for more than its workers."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def call(**options: Any) -> None:
            del options
            self.calls.append(name)

        return call


def trainers(count: int, options: dict[str, Any]) -> RayWorkerGroup:
    """A group of trainer ranks on CPUs."""
    return _group(count, RayClassWithInitArgs(cls=ray.remote(Trainer), options=options))


def rollouts(count: int, options: dict[str, Any], folder: str) -> RayWorkerGroup:
    """A group of verl's own rollout workers, each with an `Adapter`."""
    engine = SimpleNamespace(
        backend=BACKEND,
        custom_backend_module=MODULE,
        update_weights_bucket_megabytes=1,
        engine_kwargs={BACKEND: options},
    )
    config = SimpleNamespace(checkpoint_engine=engine, name="vllm", mode="async")
    made = RayClassWithInitArgs(
        cls=ray.remote(CheckpointEngineWorker),
        rollout_config=config,
        model_config=None,
        server_adapter=Adapter(folder),
    )
    return _group(count, made)


def _group(count: int, made: RayClassWithInitArgs) -> RayWorkerGroup:
    pool = RayResourcePool([count], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")
