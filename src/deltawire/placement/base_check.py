"""Compares the live tensors of a module with the frozen base that a run states."""

from __future__ import annotations

from typing import Any

import torch

from deltawire import codec
from deltawire.placement.layout import TORCH_DTYPES
from deltawire.placement.live import module_tensors
from deltawire.sync.chain.base_statement import BaseStatement, BaseTensor


def check_module(statement: BaseStatement | None, model: Any, *, who: str, run: str = "") -> None:
    """Compares the live tensors of a module with a statement; raises `InputError`.

    Tensors that are computed in a wider dtype are compared as they are published.
    """
    if statement is None:
        return
    live = module_tensors(model)
    found = {}
    for stated in statement.tensors:
        tensor = live.get(stated.name)
        if tensor is None:
            continue
        dtype = TORCH_DTYPES[stated.dtype]
        same = tensor.dtype == dtype or (tensor.dtype, dtype) == (torch.float32, torch.bfloat16)
        shape = tuple(tensor.shape)
        if not same or shape != stated.shape:
            held = BaseTensor(stated.name, shape, str(tensor.dtype), codec.ZERO.hex())
        else:
            values = tensor.detach().to("cpu", dtype).contiguous()
            digest = codec.digest_bits(stated.name, codec.bits_of(values, stated.dtype).reshape(-1))
            held = BaseTensor(stated.name, shape, stated.dtype, digest.hex())
        found[stated.name] = held
    statement.check(found, who=who, run=run)
