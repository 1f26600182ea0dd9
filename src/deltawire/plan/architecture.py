"""Describes a transformer from its config.json: every matrix, with no weights and no torch.

A `Model` is a list of layers; a layer is a list of matrices (`Matrix`), a count of other
parameters and what its activations depend on. Parameter counts, LoRA sizes, optimizer states and
FLOPs all follow from that list. `deltawire.plan.families` builds it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Part = Literal["attention", "dense_mlp", "experts", "shared_experts", "router"]
AttentionKind = Literal["grouped", "latent", "linear", "compressed"]


@dataclass(frozen=True)
class Matrix:
    """``copies`` weight matrices of shape (outputs, inputs), each with ``bias`` more values."""

    part: Part
    inputs: int
    outputs: int
    copies: int = 1
    bias: int = 0
    adaptable: bool = True
    """LoRA on all linear layers gives it an adapter; routers and indexers get none."""
    columns: bool = field(default=False, repr=False)
    """A rank of a tensor-parallel engine serves columns of it: an output projection."""

    @property
    def parameters(self) -> int:
        """Values in all copies."""
        return self.copies * (self.inputs * self.outputs + self.bias)


@dataclass(frozen=True)
class Attention:
    """The dimensions that set an attention block's activations, in values per token."""

    kind: AttentionKind
    heads: int
    queries: int
    """Heads times the head's width."""
    keys: int
    values: int
    outputs: int
    """Input width of the output projection."""
    query_rank: int = 0
    key_value_rank: int = 0
    normed: bool = False
    """Queries and keys pass an RMSNorm."""
    gated: bool = False
    state: int = 0
    """Linear attention: values of one recurrent state, heads times keys' times values' width."""

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values that tensor parallelism divides: fewer than `heads` where
        several query heads share one."""
        return self.keys * self.heads // self.queries if self.kind == "grouped" else self.heads


@dataclass(frozen=True)
class FeedForward:
    """The dimensions that set a feed-forward block's activations."""

    intermediate: int = 0
    """The width of the dense MLP; 0 where experts replace it."""
    experts: int = 0
    chosen: int = 0
    """Experts per token."""
    expert_intermediate: int = 0
    expert_hidden: int = 0
    """Input width of an expert: the hidden size, or less where tokens are projected down."""
    shared_intermediate: int = 0
    scores_fp32: bool = False
    """The router computes its logits in fp32, from an fp32 copy of its input."""


@dataclass(frozen=True)
class DecoderLayer:
    """One decoder layer."""

    matrices: tuple[Matrix, ...]
    others: int
    """Parameters of norms, convolutions and other small tensors."""
    attention: Attention
    feed_forward: FeedForward
    streams: int = 1
    """Residual streams, more than one with hyper-connections."""

    def part(self, name: Part) -> int:
        """Parameters of one part."""
        return sum(matrix.parameters for matrix in self.matrices if matrix.part == name)

    @cached_property
    def parameters(self) -> int:
        """Parameters of the layer."""
        return self.others + sum(matrix.parameters for matrix in self.matrices)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token passes through: the chosen experts, not all."""
        experts = self.part("experts")
        chosen = experts * self.feed_forward.chosen // max(1, self.feed_forward.experts)
        return self.parameters - experts + chosen

    def adapter_parameters(self, rank: int, *, experts: bool) -> int:
        """Parameters of LoRA of this rank: r·(inputs + outputs) for each adapted matrix.

        ``experts`` adds an adapter for each expert's matrices. Source: Hu et al.,
        arXiv 2106.09685, section 4.1.
        """
        return sum(
            rank * (matrix.inputs + matrix.outputs) * matrix.copies
            for matrix in self.matrices
            if matrix.adaptable and (experts or matrix.part != "experts")
        )


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer. Equal layers are the same object."""

    name: str
    family: str
    hidden: int
    vocabulary: int
    tied: bool
    layers: tuple[DecoderLayer, ...]
    outside: int
    """Parameters outside layers besides embedding and head: the final norm and its like."""
    context: int
    """Longest context of the configuration, 0 where it states none."""

    @property
    def embedding(self) -> int:
        """Parameters of the embedding."""
        return self.vocabulary * self.hidden

    @property
    def head(self) -> int:
        """Parameters of the output head, 0 where it is the embedding."""
        return 0 if self.tied else self.vocabulary * self.hidden

    @cached_property
    def kinds(self) -> tuple[tuple[DecoderLayer, int], ...]:
        """The different layers and how many there are of each."""
        counts: dict[int, int] = {}
        first: dict[int, DecoderLayer] = {}
        for layer in self.layers:
            first.setdefault(id(layer), layer)
            counts[id(layer)] = counts.get(id(layer), 0) + 1
        return tuple((first[key], count) for key, count in counts.items())

    @cached_property
    def parameters(self) -> int:
        """Parameters of the model."""
        inner = sum(layer.parameters for layer in self.layers)
        return self.embedding + self.head + self.outside + inner

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token passes through, embedding row excluded, head included."""
        inner = sum(layer.active_parameters for layer in self.layers)
        return self.vocabulary * self.hidden + self.outside + inner

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of routed experts."""
        return sum(count * layer.part("experts") for layer, count in self.kinds)

    @cached_property
    def matrices(self) -> tuple[int, int]:
        """The number of matrices of routed experts, and of all others, in all layers."""
        found = [0, 0]
        for layer, count in self.kinds:
            for matrix in layer.matrices:
                found[matrix.part != "experts"] += count * matrix.copies
        return found[0], found[1]

    @cached_property
    def column_parameters(self) -> tuple[int, int]:
        """Parameters that tensor-parallel engines divide by columns: those of routed experts, and
        the others."""
        found = [0, 0]
        for layer, count in self.kinds:
            for matrix in layer.matrices:
                if matrix.columns:
                    found[matrix.part != "experts"] += count * matrix.parameters
        return found[0], found[1]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that decides sizes: all but the name and the longest context."""
        kinds = [layer for layer, _ in self.kinds]
        order = [kinds.index(layer) for layer in self.layers]
        sizes = (self.family, self.hidden, self.vocabulary, self.tied, self.outside, kinds, order)
        return hashlib.blake2b(repr(sizes).encode(), digest_size=8).hexdigest()

    def parts(self) -> dict[str, int]:
        """Parameters by part; they add up to all."""
        named: dict[str, int] = {"embedding": self.embedding, "head": self.head}
        for name in ("attention", "dense_mlp", "router", "experts", "shared_experts"):
            named[name] = sum(layer.part(name) for layer in self.layers)
        named["norms_and_other"] = self.outside + sum(layer.others for layer in self.layers)
        return named
