"""Gathers fp32 master shards rounded to the published dtype, for computation in float32.

FSDP2 gathers a parameter as it is, or in the dtype that the policy computes in. Trainers on CPUs
compute in float32 over weights of the published bits: rounded to bf16, then widened, which is
exact. This shard does so with FSDP2's hooks for tensor subclasses: ranks exchange bf16, and the
layer sees float32::

    master shard, fp32 ──round──▶ bf16 ──all-gather──▶ bf16, whole ──widen──▶ fp32 parameter
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_KEEPS_CLASS = frozenset(
    {
        _aten.new_zeros.default,
        _aten.view.default,
        _aten.as_strided.default,
        _aten.slice.Tensor,
        _aten.split.Tensor,
        _aten.clone.default,
        _aten.detach.default,
        _aten.alias.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten._pin_memory.default,
    }
)
"""Operations by which FSDP2 cuts a shard out of a parameter, or moves one. All others compute on
the fp32 values, and return plain tensors."""


class RoundedShard(torch.Tensor):
    """fp32 values ``values32`` that FSDP2 gathers rounded to ``through``.

    In-place operations change the values; results of others are plain tensors.
    """

    values32: Tensor
    through: torch.dtype

    @staticmethod
    def __new__(cls, values32: Tensor, through: torch.dtype) -> RoundedShard:
        """Wraps a plain tensor, which is not copied."""
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            values32.size(),
            strides=values32.stride(),
            storage_offset=values32.storage_offset(),
            dtype=values32.dtype,
            layout=values32.layout,
            device=values32.device,
            requires_grad=values32.requires_grad,
        )
        made.values32, made.through = values32, through
        shard: RoundedShard = made
        return shard

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Name the wrapped tensor."""
        return f"RoundedShard({self.values32!r}, {self.through})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs an operation on the fp32 values."""
        through: list[torch.dtype] = []

        def unwrap(one: RoundedShard) -> Tensor:
            through.append(one.through)
            return one.values32

        bare_args, bare_kwargs = tree_map_only(RoundedShard, unwrap, (args, kwargs or {}))
        result = func(*bare_args, **bare_kwargs)
        if func in _KEEPS_CLASS:
            return tree_map_only(Tensor, lambda one: _rewrap(one, through[0]), result)
        if func._schema.is_mutable and args and isinstance(args[0], RoundedShard):
            return args[0]  # In-place operations return what they were called on.
        return result

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """FSDP2 calls this before a gather: the rounded values, padded to the largest shard."""
        del outer_stride, module, mp_policy
        rounded = self.values32.to(self.through)
        rows = -(-outer_size[0] // mesh.size())
        if len(rounded) < rows:
            padded = rounded.new_zeros(rows, *outer_size[1:])
            padded[: len(rounded)] = rounded
            rounded = padded
        return (rounded.contiguous(),), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """FSDP2 calls this after a gather: the widened parameter, in ``out`` from the second time
        on, which the backward pass has saved and must not see as changed."""
        del metadata
        (rounded,) = all_gather_outputs
        if out is None:
            wide = rounded.to(param_dtype)
            return wide, (wide,)
        whole: Any = getattr(out, "_local_tensor", out)
        whole.data.copy_(rounded[: len(whole)])
        return None


def _rewrap(tensor: Tensor, through: torch.dtype) -> Tensor:
    return RoundedShard(tensor, through) if tensor.is_floating_point() else tensor
