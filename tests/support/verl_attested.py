"""A trainer and a server for verl's own manager, in Ray, whose weights are compared: they import
verl. Replaced is what computes: the trainer holds made-up weights, and the server a small engine of
two ranks, which the test puts behind vLLM's ``/collective_rpc``."""

from __future__ import annotations

import json
import urllib.request
from types import SimpleNamespace
from typing import Any

import msgspec
import ray
import torch
from safetensors.torch import load_file
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from benchmarks.attest.engines import drawn, fleet, load, stepped
from deltawire.engines.live_digests import answer_of
from deltawire.engines.live_parts import METHOD


class Export:
    """The part of verl's training engines that exports weights."""

    def __init__(self) -> None:
        self.weights = drawn(1)

    def get_per_tensor_param(self, **_: Any) -> tuple[Any, None]:
        """Exports each tensor with its name."""
        return iter(self.weights.items()), None


class Files:
    """The same of a trainer that writes what it exports: ``file`` is the newest checkpoint."""

    def __init__(self) -> None:
        self.file = ""

    def get_per_tensor_param(self, **_: Any) -> tuple[Any, None]:
        """Exports each tensor of the checkpoint."""
        return iter(load_file(self.file).items()), None


class FileTrainer(Worker):  # type: ignore[misc]
    """A rank of a trainer that has ``vllm serve`` at ``url`` load a folder."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.actor = SimpleNamespace(engine=Files())
        self._url, self._sends = url, ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, file: str, sends: str) -> None:
        """Has a new checkpoint, of which the folder ``sends`` reaches the server."""
        self.actor.engine.file, self._sends = file, sends

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def update_weights(self, global_steps: int, mode: str) -> None:
        """Sends the weights of this step."""
        assert mode == "naive"
        if self.rank == 0:
            options = {"weights_path": self._sends, "is_checkpoint_format": True}
            body = json.dumps({"method": "reload_weights", "kwargs": options}).encode()
            request = urllib.request.Request(
                f"{self._url}/collective_rpc", body, {"Content-Type": "application/json"}
            )
            urllib.request.urlopen(request, timeout=120).read()


class Trainer(Worker):  # type: ignore[misc]
    """A rank of the trainer, with the members of verl's ``ActorRolloutRefWorker`` that are used."""

    def __init__(self, server: Any) -> None:
        super().__init__()
        self.actor = SimpleNamespace(engine=Export())
        self._server = server

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def update_weights(self, global_steps: int, mode: str) -> None:
        """Sends the weights of this step."""
        assert mode == "naive"
        if self.rank == 0:
            ray.get(self._server.load.remote(self.actor.engine.weights))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, seed: int) -> None:
        """Makes a step."""
        self.actor.engine.weights = stepped(self.actor.engine.weights, seed)


@ray.remote(num_cpus=0)
class Server:
    """An engine of two ranks; ``drops`` are tensors that its updates leave out."""

    def __init__(self) -> None:
        self.modules = fleet(2, drawn(1))
        self.drops: tuple[str, ...] = ()

    def drop(self, names: tuple[str, ...]) -> None:
        """Leaves tensors out from now on."""
        self.drops = names

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Loads weights."""
        for module in self.modules:
            load(module, {name: one for name, one in weights.items() if name not in self.drops})

    def answers(self, method: str, args: list[str]) -> list[Any]:
        """Answers as vLLM's workers do."""
        assert method == METHOD
        ranks = enumerate(self.modules)
        return [msgspec.to_builtins(answer_of(one, args[0], rank)) for rank, one in ranks]


def trainers(count: int, kind: Any = Trainer, **arguments: Any) -> RayWorkerGroup:
    """A group of trainer ranks on CPUs."""
    made = RayClassWithInitArgs(cls=ray.remote(kind), **arguments)
    pool = RayResourcePool([count], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")
