"""Measures the peak memory of a training step that allocates nothing, to check the memory model.

The step is a plain FSDP2 one over a transformers model: fp32 masters, bf16 compute, AdamW (fused),
log-probabilities through the head in chunks. torch's `FSDPMemTracker` counts every tensor's bytes
under `FakeTensorMode`, with a fake process group in place of the other ranks. `deltawire.plan`
never calls this; it is the other half of the comparison.

Traps, each found by hand: the tracker's device is the CPU (a CPU build of torch has no other), the
mesh is built outside fake mode, and the peak is read from the second step, because a fused or
foreach AdamW reports its states too large when it creates them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

GROUP = 32
"""Weights that share a scale in the packed experts: int4 with a bf16 scale, 4.5 bits a weight."""
KEPT_BY_SELECTIVE = {
    torch.ops.aten.mm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""Results that selective checkpointing keeps: of matrix products and of attention."""


@dataclass(frozen=True)
class Case:
    """One training step to measure. ``config`` is a transformers configuration, as a dict."""

    config: dict[str, Any]
    ranks: int = 8
    replicate: int = 1
    sequences: int = 1
    context: int = 1024
    mode: str = "full"
    """full, lora or reference."""
    checkpointing: str = "none"
    """none, selective, full or offloaded."""
    chunk: int = 1024
    """Tokens that pass the head at once; 0 for all."""
    lora_rank: int = 0
    expert: int = 1
    """Ranks that experts are spread over, with tokens sent to them and back."""
    packed: bool = False
    """Routed experts are frozen and held as int4."""


class Adapted(nn.Module):
    """A frozen linear layer with LoRA."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = linear
        self.down = nn.Parameter(torch.empty(rank, linear.in_features))
        self.up = nn.Parameter(torch.empty(linear.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds the adapter's product to the frozen one."""
        out: torch.Tensor = self.base(x) + F.linear(F.linear(x, self.down), self.up)
        return out


def _unpack(packed: torch.Tensor, scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Dequantizes int4 groups into one bf16 tensor, in place as far as possible."""
    out = torch.empty(shape, dtype=torch.bfloat16)
    halves = out.view(*packed.shape, 2)
    halves[..., 0].copy_(packed & 15)
    halves[..., 1].copy_(packed >> 4)
    out.sub_(8)
    out.view(*scales.shape, GROUP).mul_(scales.unsqueeze(-1))
    return out


class _PackedProduct(torch.autograd.Function):
    """A grouped product with frozen packed weights, dequantized again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        packed: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor,
        shape: torch.Size,
    ) -> torch.Tensor:
        ctx.save_for_backward(packed, scales, offsets)
        ctx.shape = shape
        weight = _unpack(packed, scales, shape)
        return torch._grouped_mm(x, weight.transpose(-2, -1), offs=offsets)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        packed, scales, offsets = ctx.saved_tensors
        weight = _unpack(packed, scales, ctx.shape)
        return torch._grouped_mm(grads[0], weight, offs=offsets), None, None, None, None


class PackedExperts(nn.Module):
    """Stands in for the fused experts of a transformers MoE, with int4 weights."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.shapes: dict[str, torch.Size] = {}
        self.num_experts: int = experts.gate_up_proj.shape[0]
        for name in ("gate_up_proj", "down_proj"):
            count, outputs, inputs = (shape := getattr(experts, name).shape)
            packed = torch.empty(count, outputs, inputs // 2, dtype=torch.uint8)
            scales = torch.empty(count, outputs, inputs // GROUP, dtype=torch.bfloat16)
            setattr(self, f"{name}_packed", nn.Parameter(packed, requires_grad=False))
            setattr(self, f"{name}_scales", nn.Parameter(scales, requires_grad=False))
            self.shapes[name] = shape

    def forward(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Computes as transformers' grouped_mm experts do, from packed weights."""
        chosen = index.size(-1)
        order, permutation = torch.sort(index.reshape(-1))
        counts = torch.histc(order.float(), bins=self.num_experts, min=0, max=self.num_experts - 1)
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        x = hidden[permutation // chosen]
        gate, up = self._product(x, "gate_up_proj", offsets).chunk(2, dim=-1)
        out = self._product(F.silu(gate) * up, "down_proj", offsets)
        out = out * weights.reshape(-1)[permutation].unsqueeze(-1)
        inverse = torch.empty_like(permutation)
        inverse[permutation] = torch.arange(permutation.size(0))
        return out[inverse].view(hidden.size(0), chosen, -1).sum(dim=1)

    def _product(self, x: torch.Tensor, name: str, offsets: torch.Tensor) -> torch.Tensor:
        packed = getattr(self, f"{name}_packed")
        scales = getattr(self, f"{name}_scales")
        product: torch.Tensor = _PackedProduct.apply(  # type: ignore[no-untyped-call]
            x, packed, scales, offsets, self.shapes[name]
        )
        return product


class SpreadExperts(nn.Module):
    """One rank's share of the experts under expert parallelism, with balanced routes."""

    def __init__(self, experts: Any, ranks: int, group: Any) -> None:
        super().__init__()
        self.ranks = ranks
        self.group = group
        self.local = experts.gate_up_proj.shape[0] // ranks
        self.gate_up = nn.Parameter(torch.empty(self.local, *experts.gate_up_proj.shape[1:]))
        self.down = nn.Parameter(torch.empty(self.local, *experts.down_proj.shape[1:]))

    def forward(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Sends every token's copies to their experts, computes, and brings the results back."""
        chosen = index.size(-1)
        _, permutation = torch.sort(index.reshape(-1))
        slots = permutation.numel()
        x = self._exchange(hidden[permutation // chosen])
        offsets = torch.arange(1, self.local + 1, dtype=torch.int32) * (slots // self.local)
        both = torch._grouped_mm(x, self.gate_up.transpose(-2, -1), offs=offsets)
        gate, up = both.chunk(2, dim=-1)
        out = torch._grouped_mm(F.silu(gate) * up, self.down.transpose(-2, -1), offs=offsets)
        out = self._exchange(out) * weights.reshape(-1)[permutation].unsqueeze(-1)
        inverse = torch.empty_like(permutation)
        inverse[permutation] = torch.arange(slots)
        return out[inverse].view(hidden.size(0), chosen, -1).sum(dim=1).to(hidden.dtype)

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        shares = [x.shape[0] // self.ranks] * self.ranks
        received: torch.Tensor = all_to_all_single_autograd(x, shares, shares, self.group)
        return received


class Step(nn.Module):
    """A model and its loss: the mean negative log-probability of the targets."""

    def __init__(self, model: Any, chunk: int, checkpointed: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.chunk = chunk
        self.checkpointed = checkpointed

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Runs the layers under the checkpointing policy, then the head in chunks."""
        inner: Any = self.model.model
        hidden = inner.embed_tokens(ids)
        positions = torch.arange(ids.shape[1]).unsqueeze(0)
        rotary = inner.rotary_emb(hidden, positions)
        for layer in inner.layers:
            call = functools.partial(
                layer, attention_mask=None, position_embeddings=rotary, position_ids=positions
            )
            hidden = self.checkpointed(call, hidden)
        hidden = inner.norm(hidden)
        flat, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        size = self.chunk or flat.shape[0]
        parts = zip(torch.split(flat, size), torch.split(wanted, size), strict=True)
        if not self.chunk or not torch.is_grad_enabled():
            return -torch.cat([self._logprobs(x, y) for x, y in parts]).mean()
        chunks = [checkpoint(self._logprobs, x, y, use_reentrant=False) for x, y in parts]
        return -torch.cat(chunks).mean()

    def _logprobs(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = F.linear(x, self.model.lm_head.weight).float()
        return torch.gather(logits, 1, y[:, None])[:, 0] - torch.logsumexp(logits, -1)


def _policy(name: str) -> Callable[..., Any]:
    """How one layer is called under a checkpointing policy."""
    if name == "none" or not torch.is_grad_enabled():
        return lambda call, x: call(x)
    if name == "selective":
        contexts = functools.partial(
            create_selective_checkpoint_contexts,
            lambda _ctx, op, *_args, **_kwargs: (
                CheckpointPolicy.MUST_SAVE
                if op in KEPT_BY_SELECTIVE
                else CheckpointPolicy.PREFER_RECOMPUTE
            ),
        )
        return lambda call, x: checkpoint(call, x, use_reentrant=False, context_fn=contexts)
    if name == "offloaded":

        def offloaded(call: Callable[..., Any], x: torch.Tensor) -> Any:
            with _on_host():
                return checkpoint(call, x, use_reentrant=False)

        return offloaded
    return lambda call, x: checkpoint(call, x, use_reentrant=False)


@contextmanager
def _on_host() -> Iterator[None]:
    """Saved tensors leave the device: values do not matter under fake mode, so they are dropped."""

    def drop(tensor: torch.Tensor) -> Any:
        return (tuple(tensor.shape), tensor.dtype) if tensor.dtype == torch.bfloat16 else tensor

    def fetch(kept: Any) -> torch.Tensor:
        return kept if isinstance(kept, torch.Tensor) else torch.empty(kept[0], dtype=kept[1])

    with saved_tensors_hooks(drop, fetch):
        yield


def _prepare(case: Case, config: Any) -> Any:
    """Builds the model in the dtypes that the trainer keeps it in."""
    from transformers import AutoModelForCausalLM

    frozen = case.mode != "full"
    dtype = torch.bfloat16 if frozen else torch.float32
    model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=dtype
    )
    if frozen:
        model.requires_grad_(requires_grad=False)
    for layer in model.model.layers:
        if case.packed and hasattr(layer.mlp, "experts"):
            layer.mlp.experts = PackedExperts(layer.mlp.experts)
        if case.mode == "lora":
            for name, module in list(layer.named_modules()):
                if isinstance(module, nn.Linear):
                    parent = layer.get_submodule(name.rpartition(".")[0])
                    setattr(parent, name.rpartition(".")[2], Adapted(module, case.lora_rank))
    return model.train()


def measure(case: Case) -> dict[str, int]:
    """Runs two steps of one rank and returns the peak of the second, in bytes, by kind of
    tensor."""
    from transformers import AutoConfig

    if dist.is_initialized():
        raise RuntimeError("a process group exists; measure in a separate process")
    dist.init_process_group("fake", rank=0, world_size=case.ranks, store=FakeStore())
    try:
        if case.replicate > 1:
            shape = (case.replicate, case.ranks // case.replicate)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh("cpu", (case.ranks,))
        experts = None
        if case.expert > 1:
            shape = (case.ranks // case.expert, case.expert)
            experts = init_device_mesh("cpu", shape, mesh_dim_names=("shard", "expert"))
        config = AutoConfig.for_model(**case.config)
        config._attn_implementation = "sdpa"
        grad = torch.no_grad() if case.mode == "reference" else torch.enable_grad()
        with FakeTensorMode(), grad:
            return _measure(case, config, mesh, experts)
    finally:
        dist.destroy_process_group()


def measure_real(case: Case) -> int:
    """Runs the same two steps with real tensors on one rank, and returns the growth of the process.

    Peak resident memory less what was resident before: it includes what operations allocate
    inside, which the tracker does not see. Run it in a separate process.
    """
    from transformers import AutoConfig

    if case.ranks != 1 or case.mode == "reference":
        raise ValueError("real allocations are measured for training on one rank")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        mesh = init_device_mesh("cpu", (1,))
        config = AutoConfig.for_model(**case.config)
        config._attn_implementation = "sdpa"
        _train(*_build(case, config, mesh), _small(case), steps=1)
        before = _resident("VmRSS")
        step, optimizer = _build(case, config, mesh)
        Path("/proc/self/clear_refs").write_text("5")
        _train(step, optimizer, case, steps=2)
        return _resident("VmHWM") - before
    finally:
        dist.destroy_process_group()


def _small(case: Case) -> Case:
    """A case of a few tokens, which loads libraries and starts threads."""
    return dataclasses.replace(case, context=8, sequences=1)


def _resident(field: str) -> int:
    """Reads one size from this process's status, in bytes."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if field in line]
    return int(line.split()[1]) * 1024


def _build(
    case: Case, config: Any, mesh: Any, experts: Any = None
) -> tuple[Step, torch.optim.Optimizer | None]:
    """Shard the model and make its optimizer."""
    model = _prepare(case, config)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        if experts is not None and hasattr(layer.mlp, "experts"):
            group = experts["expert"].get_group()
            layer.mlp.experts = SpreadExperts(layer.mlp.experts, case.expert, group)
            # Routing weights stay in the router's dtype, as without expert parallelism.
            uncast = dataclasses.replace(precision, cast_forward_inputs=False)
            fully_shard(layer.mlp.experts, mesh=experts["shard"], mp_policy=uncast)
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    step = Step(model, case.chunk, _policy(case.checkpointing))
    fully_shard(step, mesh=mesh, mp_policy=precision)
    trained = [parameter for parameter in step.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True) if trained else None
    return step, optimizer


def _inputs(case: Case) -> list[torch.Tensor]:
    return [torch.zeros((case.sequences, case.context), dtype=torch.int64) for _ in range(2)]


def _train(step: Step, optimizer: torch.optim.Optimizer | None, case: Case, *, steps: int) -> None:
    """Runs whole steps."""
    for _ in range(steps):
        loss = step(*_inputs(case))
        if optimizer is not None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def _measure(case: Case, config: Any, mesh: Any, experts: Any) -> dict[str, int]:
    step, optimizer = _build(case, config, mesh, experts)
    ids, targets = _inputs(case)
    tracker = FSDPMemTracker(step, optimizer)
    tracker.track_inputs((ids, targets))
    with tracker:
        for _ in range(2):
            tracker.reset_mod_stats()
            tracker._peak_mem.clear()
            tracker._peak_mem_snap.clear()
            loss = step(ids, targets)
            if optimizer is not None:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            del loss
    (peak,) = [snap for snap in tracker.get_tracker_snapshot("peak").values() if snap["Total"]]
    return {str(getattr(key, "value", key)): size for key, size in peak.items() if size}
