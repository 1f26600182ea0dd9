"""A decoder as a serving engine holds it, at any tensor- and expert-parallel size.

Its ``load_weights`` takes names and tensors of a checkpoint, as vLLM's models do.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from deltawire.wire.run import TensorSpec


class Sharded(torch.nn.Module):
    """A decoder as an engine holds it: fused, sliced, stacked, padded."""

    HIDDEN, HEADS, KV_HEADS, HEAD, INTER, VOCAB, EXPERTS = 16, 4, 2, 4, 24, 37, 4

    def __init__(
        self,
        rank: int,
        ranks: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        experts: bool = False,
        tied: bool = True,
        ep: bool = False,
    ) -> None:
        super().__init__()
        self.rank, self.ranks, self.with_experts, self.ep = rank, ranks, experts, ep
        hidden, head = self.HIDDEN, self.HEAD
        self.heads = self.HEADS // ranks
        self.kv_heads = max(1, self.KV_HEADS // ranks)
        self.inter = self.INTER // ranks
        self.padded = -(-self.VOCAB // (8 * ranks)) * 8 * ranks
        self.rows = self.padded // ranks

        def tensor(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape).to(dtype), requires_grad=False)

        self.embed = tensor(self.rows, hidden)
        self.head = self.embed if tied else tensor(self.rows, hidden)
        self.qkv = tensor((self.heads + 2 * self.kv_heads) * head, hidden)
        self.qkv_bias = tensor((self.heads + 2 * self.kv_heads) * head)
        self.out = tensor(hidden, self.heads * head)
        self.norm = tensor(hidden)
        if experts:
            self.local = self.EXPERTS // ranks if ep else self.EXPERTS
            inter = self.INTER if ep else self.inter
            self.router = tensor(self.EXPERTS, hidden)
            self.w13 = tensor(self.local, 2 * inter, hidden)
            self.w2 = tensor(self.local, hidden, inter)
        else:
            self.gate_up = tensor(2 * self.inter, hidden)
            self.down = tensor(hidden, self.inter)
        self.register_buffer("frequencies", torch.randn(4))

    @classmethod
    def table(
        cls, *, experts: bool = False, tied: bool = True, dtype: str = "BF16"
    ) -> list[TensorSpec]:
        """Returns the tensors of the checkpoint."""
        hidden, head = cls.HIDDEN, cls.HEAD
        shapes: dict[str, tuple[int, ...]] = {
            "embed": (cls.VOCAB, hidden),
            "q": (cls.HEADS * head, hidden),
            "k": (cls.KV_HEADS * head, hidden),
            "v": (cls.KV_HEADS * head, hidden),
            "q_bias": (cls.HEADS * head,),
            "k_bias": (cls.KV_HEADS * head,),
            "v_bias": (cls.KV_HEADS * head,),
            "out": (hidden, cls.HEADS * head),
            "norm": (hidden,),
        }
        if not tied:
            shapes["head"] = (cls.VOCAB, hidden)
        if experts:
            shapes["router"] = (cls.EXPERTS, hidden)
            for expert in range(cls.EXPERTS):
                shapes[f"experts.{expert}.gate"] = (cls.INTER, hidden)
                shapes[f"experts.{expert}.up"] = (cls.INTER, hidden)
                shapes[f"experts.{expert}.down"] = (hidden, cls.INTER)
        else:
            shapes |= {"gate": (cls.INTER, hidden), "up": (cls.INTER, hidden)}
            shapes["down"] = (hidden, cls.INTER)
        return [TensorSpec(name, shapes[name], dtype) for name in sorted(shapes)]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copies the parts of this rank."""
        loaded = set()
        for name, weight in weights:
            base, _, last = name.rpartition(".")
            if base:
                self._load_expert(int(base.split(".")[1]), last, weight)
            elif name in ("embed", "head"):
                self._load_vocabulary(getattr(self, name), weight)
            elif name[0] in "qkv" and name != "qkv":
                self._load_qkv(name, weight)
            elif name in ("gate", "up"):
                at = self.inter * (name == "up")
                slot = self.gate_up.data.narrow(0, at, self.inter)
                slot.copy_(weight.narrow(0, self.rank * self.inter, self.inter))
            elif name in ("out", "down"):
                param = getattr(self, name)
                width = param.shape[1]
                param.data.copy_(weight.narrow(1, self.rank * width, width))
            else:
                getattr(self, name).data.copy_(weight)
            loaded.add(name)
        return loaded

    def _load_vocabulary(self, param: Tensor, weight: Tensor) -> None:
        first = min(self.rank * self.rows, self.VOCAB)
        mine = weight.narrow(0, first, min(self.rows, self.VOCAB - first))
        param[: mine.shape[0]].data.copy_(mine)
        param[mine.shape[0] :].data.fill_(0)

    def _load_qkv(self, name: str, weight: Tensor) -> None:
        param = self.qkv_bias if name.endswith("_bias") else self.qkv
        head = self.HEAD
        if name[0] == "q":
            at, size, first = 0, self.heads * head, self.rank * self.heads * head
        else:
            size = self.kv_heads * head
            at = self.heads * head + size * (name[0] == "v")
            replicas = max(1, self.ranks // self.KV_HEADS)
            first = self.rank // replicas * size
        param.data.narrow(0, at, size).copy_(weight.narrow(0, first, size))

    def _load_expert(self, expert: int, part: str, weight: Tensor) -> None:
        if self.ep:
            if expert // self.local != self.rank:
                return
            expert %= self.local
        inter = self.w2.shape[2]
        first = 0 if self.ep else self.rank * inter
        if part == "down":
            self.w2.data[expert].copy_(weight.narrow(1, first, inter))
        else:
            slot = self.w13.data[expert].narrow(0, inter * (part == "up"), inter)
            slot.copy_(weight[first : first + inter])
