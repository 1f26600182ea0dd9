"""Measures the device memory that offloading the optimizer's states saves, and checks that it
changes no bit.

The saving is measured on a fixed case, Qwen3-30B-A3B over 8 ranks with 8,192 tokens a rank and full
recompute, as one rank under `FakeTensorMode` with a fake process group. `RoleTracker` counts bytes:
every tensor has the role *device* unless it is marked as *host*, as the states that
`deltawire.train.optimizer` keeps in host memory are. The peak is that of a whole second step:
forward, backward, clipping, update.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.training.keys import Measured, Options
from benchmarks.training_memory import Case, Step, _build, _inputs
from deltawire.config import BuildConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from deltawire.train.build import build_model
from deltawire.train.masters import MasterWeights
from deltawire.train.optimizer import Optimizer, open_optimizer

QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
"""The configuration of Qwen/Qwen3-30B-A3B."""

CASE = Case(config=QWEN3_30B_A3B, ranks=8, sequences=1, context=8192, checkpointing="full")


class RoleTracker(TorchDispatchMode):
    """Counts the bytes of all living storages by role, while it is entered.

    ``peak`` is the most that had the role device at a time, since `reset_peak`.

    Example::

        with RoleTracker() as tracker:
            states = torch.zeros(1000)
            tracker.mark_host([states])
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = {"device": 0, "host": 0}
        self.peak = 0
        self._sizes: dict[int, tuple[int, str]] = {}
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def __enter__(self) -> RoleTracker:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            done = self._resize(storage, size)
            if id(storage) in self._sizes:  # FSDP frees and allocates gathered parameters so.
                self._set(id(storage), size, self._sizes[id(storage)][1])
            return done

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and counts the storages of its results."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.count(leaf)
        return result

    def count(self, tensor: Tensor) -> None:
        """Counts a tensor that may have been made before, as on the device."""
        storage = _local(tensor).untyped_storage()
        key = id(storage)
        if key in self._sizes:
            return
        weakref.finalize(storage, self._forget, key)
        self._set(key, storage.nbytes(), "device")

    def mark_host(self, tensors: Iterable[Tensor]) -> None:
        """Gives tensors the role host."""
        for tensor in tensors:
            self.count(tensor)
            key = id(_local(tensor).untyped_storage())
            self._set(key, self._sizes[key][0], "host")

    def reset_peak(self) -> None:
        """Forgets the highest count so far."""
        self.peak = self.bytes["device"]

    def _set(self, key: int, size: int, role: str) -> None:
        before, old_role = self._sizes.get(key, (0, role))
        self.bytes[old_role] -= before
        self.bytes[role] += size
        self._sizes[key] = (size, role)
        self.peak = max(self.peak, self.bytes["device"])

    def _forget(self, key: int) -> None:
        size, role = self._sizes.pop(key)
        self.bytes[role] -= size


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def states_of(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's states of a size that counts."""
    return [state for kept in optimizer._states.held.values() for state in kept.values()]


def device_peak(case: Case, offload: str) -> dict[str, int]:
    """Peak bytes by role of one rank's second step, and the bytes that stay between steps."""
    from transformers import AutoConfig

    dist.init_process_group("fake", rank=0, world_size=case.ranks, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (case.ranks,))
        config = AutoConfig.for_model(**case.config)
        config._attn_implementation = "sdpa"
        train = msgspec.convert({"offload": offload}, TrainConfig)
        with FakeTensorMode(), RoleTracker() as tracker:
            step, _ = _build(case, config, mesh)
            parameters: dict[str, Tensor] = dict(step.named_parameters())
            optimizer = open_optimizer(parameters, train)
            for parameter in parameters.values():
                tracker.count(parameter)
            if offload == "optimizer":
                tracker.mark_host(states_of(optimizer))
            for number in (1, 2):
                tracker.reset_peak()
                _train_once(step, parameters, optimizer, case, number)
            return {"peak": tracker.peak, **tracker.bytes}
    finally:
        dist.destroy_process_group()


def _train_once(
    step: Step, parameters: dict[str, Tensor], optimizer: Optimizer, case: Case, number: int
) -> None:
    step(*_inputs(case)).backward()
    torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
    optimizer.step({name: parameter.grad for name, parameter in parameters.items()}, number)
    for parameter in parameters.values():
        parameter.grad = None


def bits_are_equal(kind: str, family: str) -> bool:
    """Trains a small model with and without offload, and with a resume that changes the place of
    the states; compare all weights and states."""
    trained = [_trained(kind, family, places) for places in _PLACES]
    first = trained[0]
    return all(
        first.keys() == other.keys() and all(torch.equal(first[n], other[n]) for n in first)
        for other in trained[1:]
    )


_PLACES = [
    ("none", "none"),
    ("optimizer", "optimizer"),
    ("none", "optimizer"),
    ("optimizer", "none"),
]


def _trained(kind: str, family: str, places: tuple[str, str]) -> dict[str, Tensor]:
    sizes = {"family": family, "hidden_size": 64, "layers": 2, "head_size": 16, "experts": 4}
    model = build_model(msgspec.convert(sizes, BuildConfig), seed=0)
    state: dict[str, Tensor] = {}
    published: dict[str, Tensor] = {}
    number = 0
    for place in places:
        config = TrainConfig(
            offload="optimizer" if place == "optimizer" else "none",
            optimizer=OptimizerConfig(
                kind="muon" if kind == "muon" else "adamw",
                learning_rate=1e-3,
                weight_decay=0.1,
                max_grad_norm=0.1,
            ),
            schedule=ScheduleConfig(kind="cosine", warmup_steps=2, steps=8),
        )
        masters = MasterWeights(model, config)
        if state:
            masters.restore(state)
        for _ in range(3):
            number += 1
            generator = torch.Generator().manual_seed(number)
            ids = torch.randint(0, 256, (4, 32), generator=generator)
            logits = model(input_ids=ids).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            masters.step()
        state = {name: tensor.clone() for name, tensor in masters.state().items()}
        published = {f"published/{n}": t for n, t in masters.source.tensors().items()}
    return {**state, **published}


def measure(options: Options) -> Measured:
    """Measures the fixed case without and with offload, and compares bits."""
    del options
    torch.use_deterministic_algorithms(True, warn_only=True)
    resident, streamed = device_peak(CASE, "none"), device_peak(CASE, "optimizer")
    equal = {
        f"{kind} {family}": bits_are_equal(kind, family)
        for kind in ("adamw", "muon")
        for family in ("qwen3", "qwen3_moe")
    }
    return Measured(
        {
            "offload_device_peak_saved": round(1 - streamed["peak"] / resident["peak"], 4),
            "offload_equal": all(equal.values()),
        },
        {"bytes": {"none": resident, "optimizer": streamed}, "equal": equal},
    )
