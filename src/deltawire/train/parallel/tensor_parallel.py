"""Divides a model's layers over the ranks that compute one micro-batch together.

transformers states for each family which linear layers are divided by columns and which by rows
(``tp_plan``); torch's parallel styles carry it out. A rank computes some of the attention heads and
some columns of each feed-forward layer, and one all-reduce after each adds up the parts::

    x ──▶ q, k, v (columns) ──▶ attention, own heads ──▶ o (rows) ──▶ sum
    x ──▶ gate, up (columns) ──▶ activation ───────────▶ down (rows) ──▶ sum

Embedding and head are divided by vocabulary entries; the head in chunks never gathers logits
(`deltawire.train.head`). A vocabulary that does not divide stays whole on every rank. Experts are
not cut: each rank computes some of them whole (`deltawire.train.parallel.expert_parallel`).
Everything else, such as norms and routers, every rank holds and computes alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

from deltawire.errors import InputError
from deltawire.quantization.linear import PackedLinear
from deltawire.train.parallel.local_parts import compute_on_parts

_COLUMNS: Final[dict[str, Callable[[], ParallelStyle]]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
}
_ROWS: Final[dict[str, Callable[[], ParallelStyle]]] = {
    "rowwise": RowwiseParallel,
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
}
_OWN_HEADS: Final = "replicated_with_grad_allreduce"
"""A norm of single heads: all ranks hold it, and each computes with it for its own heads."""
_ELSEWHERE: Final = frozenset({"embedding_rowwise", "moe_tp_experts"})
"""Embeddings are divided here without the plan; experts in another module."""


def divide_layers(model: Any, mesh: DeviceMesh) -> None:
    """Replaces parameters by DTensors that are divided over ``mesh``, in place.

    Raises `InputError` for a model without a plan, and for sizes that do not divide.
    """
    planned = list(_planned(model))
    if not any(style in _COLUMNS or style in _ROWS for _, _, style in planned):
        raise InputError(
            f"tensor_parallel = {mesh.size()}: transformers has no plan to divide the layers of "
            f"{type(model).__name__}",
            hint="set train.tensor_parallel = 1; FSDP shards every layer's weights over all ranks",
        )
    _check_heads(model, planned, mesh.size())
    for name, module, style in planned:
        _divide(name, module, style, mesh)
    _divide_vocabulary(model, mesh)


def _planned(model: Any) -> Iterator[tuple[str, nn.Module, str]]:
    """Returns the modules that the plan names, without embedding and head: name, module, style.

    Raises `InputError` for a style that is not known here.
    """
    plan = {
        re.compile(re.escape(pattern).replace(r"\*", "[^.]+")): style
        for pattern, style in (getattr(model, "tp_plan", None) or {}).items()
    }
    outside = {model.get_input_embeddings(), model.get_output_embeddings()}
    for name, module in model.named_modules():
        style = next((plan[one] for one in plan if one.fullmatch(name)), None)
        if style is None or style in _ELSEWHERE or module in outside:
            continue
        if style not in _COLUMNS and style not in _ROWS and style != _OWN_HEADS:
            raise InputError(
                f"transformers' plan divides {name} of {type(model).__name__} as {style[:40]!r}, "
                "which the trainer cannot do",
                hint="set train.tensor_parallel = 1",
            )
        yield name, module, style


def _check_heads(model: Any, planned: list[tuple[str, nn.Module, str]], ranks: int) -> None:
    """Raises `InputError` unless whole heads are divided."""
    if not any("attn" in name and style == "colwise" for name, _, style in planned):
        return
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    for count, kind in ((heads, "attention heads"), (shared, "key/value heads")):
        if count % ranks:
            fitting = [n for n in range(2, ranks) if not heads % n and not shared % n]
            raise InputError(
                f"tensor_parallel = {ranks} does not divide the {count} {kind} of "
                f"{type(model).__name__}",
                hint="set train.tensor_parallel to " + " or ".join(map(str, [1, *fitting])),
            )


def _divide(name: str, module: Any, style: str, mesh: DeviceMesh) -> None:
    if style == _OWN_HEADS:
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, _placed(parameter, mesh, None))
        compute_on_parts(module, [Partial()])
        return
    columns = style in _COLUMNS
    base = getattr(module, "base_layer", module)
    if isinstance(base, PackedLinear):
        raise InputError(
            f"tensor_parallel = {mesh.size()} cannot divide {name}, which is packed",
            hint="leave it out of train.adapter.packed_layers, or set train.tensor_parallel = 1",
        )
    length = base.weight.shape[0 if columns else 1]
    if length % mesh.size():
        raise InputError(
            f"tensor_parallel = {mesh.size()} does not divide the {length} "
            f"{'outputs' if columns else 'inputs'} of {name}",
            hint="use a divisor of it for train.tensor_parallel",
        )
    styles = _COLUMNS if columns else _ROWS
    # Of an adapter's pair, the matrix on the divided side is divided as the layer is.
    adapters = getattr(module, "lora_B" if columns else "lora_A", {})
    for one in [base, *adapters.values()]:
        parallelize_module(one, mesh, styles[style](), src_data_rank=None)


def _divide_vocabulary(model: Any, mesh: DeviceMesh) -> None:
    """Divides embedding and head by vocabulary entries; leaves both whole if it does not divide."""
    embedding = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    if isinstance(embedding, nn.Embedding) and not embedding.num_embeddings % mesh.size():
        style = RowwiseParallel(input_layouts=Replicate())
        parallelize_module(embedding, mesh, style, src_data_rank=None)
    elif tied:
        return
    if not isinstance(head, nn.Linear) or len(head.weight) % mesh.size():
        return
    for name, parameter in list(head.named_parameters(recurse=False)):
        shared = tied and name == "weight"
        head.register_parameter(name, embedding.weight if shared else _placed(parameter, mesh, 0))
    head.forward = _whole_logits(head, mesh)  # type: ignore[method-assign, assignment]


def _whole_logits(head: Any, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """Returns a head's forward where its result is wanted whole, as by a probe of the model."""

    def forward(hidden: Tensor) -> Tensor:
        shared = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
        parts: Any = functional.linear(shared, head.weight, head.bias)
        logits: Tensor = parts.full_tensor()
        return logits

    return forward


def _placed(parameter: nn.Parameter, mesh: DeviceMesh, dim: int | None) -> nn.Parameter:
    """Returns the parameter divided along a dimension, or held by all ranks; every rank has it
    already.
    """
    placement = Replicate() if dim is None else Shard(dim)
    placed = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(placed, requires_grad=parameter.requires_grad)
