"""Small engines whose weights are attested as vLLM's are: by their own loader, rank by rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from benchmarks.attest.sharded import Sharded
from deltawire.attest import digests
from deltawire.attest.engine import compare_engine
from deltawire.attest.sides import Side
from deltawire.attest.verdicts import WeightReport, compare
from deltawire.codec import Bits
from deltawire.engines.live_digests import answer_of
from deltawire.engines.live_parts import AttestRequest
from deltawire.placement.elements import CARRIER, array_of

Weights = dict[str, Tensor]


def drawn(
    seed: int, *, experts: bool = False, tied: bool = True, more: Mapping[str, Sequence[int]] = {}
) -> Weights:
    """Draws a checkpoint of `Sharded`, with ``more`` tensors of these shapes, in bf16."""
    generator = torch.Generator().manual_seed(seed)
    table = Sharded.table(experts=experts, tied=tied)
    shapes = {**{tensor.name: tensor.shape for tensor in table}, **more}
    return {
        name: torch.randn(tuple(shape), generator=generator).bfloat16()
        for name, shape in sorted(shapes.items())
    }


def stepped(weights: Weights, seed: int) -> Weights:
    """Returns the weights after a step that changes all tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (held.float() + 0.05 * torch.randn(held.shape, generator=generator)).to(held.dtype)
        for name, held in weights.items()
    }


def side(weights: Weights, name: str, aliases: Mapping[str, str] | None = None) -> Side:
    """Returns a trainer's weights as a side of a comparison."""
    stated = digests(weights)
    if aliases:
        stated = msgspec.structs.replace(stated, aliases=dict(aliases))
    return Side(name, stated, lambda tensor: _bits(weights[tensor]))


def _bits(tensor: Tensor) -> Bits:
    return array_of(tensor.contiguous().view(-1).view(CARRIER[tensor.element_size()]))


def fleet(ranks: int, weights: Weights, *, tied: bool = True, ep: bool = False) -> list[Sharded]:
    """Returns the ranks of an engine that loaded these weights."""
    experts = any(name.startswith("experts.") for name in weights)
    modules = [Sharded(rank, ranks, experts=experts, tied=tied, ep=ep) for rank in range(ranks)]
    for module in modules:
        load(module, weights)
    return modules


def load(module: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Loads weights as an engine does: by its own loader, and with its post-processing observed,
    which changes nothing here."""
    loader: object = getattr(module, "load_weights")  # noqa: B009 - a module may have no loader
    assert callable(loader)
    loader((name, held.clone()) for name, held in weights.items())
    module.__dict__["_deltawire_changes"] = {}


def attest_engine(
    modules: Iterable[torch.nn.Module],
    reference: Side,
    *others: Side,
    draft: torch.nn.Module | None = None,
) -> WeightReport:
    """Asks each rank as ``deltawire attest`` asks vLLM's, and compares."""
    asked = AttestRequest(
        [tensor.spec for tensor in reference.digests.tensors], reference.digests.aliases
    )
    request = msgspec.json.encode(asked).decode()
    answers = [
        answer_of(module, request, rank, draft=draft, one_checkpoint=draft is not None)
        for rank, module in enumerate(modules)
    ]
    assert not [answer.failure for answer in answers if answer.failure]
    return compare_engine("the engine", answers, reference, lambda: others)


def attest_tensors(found: Weights, reference: Side, *others: Side) -> WeightReport:
    """Compares tensors that an engine holds under the names of their files, such as an adapter."""
    return compare(side(found, "the engine"), reference, lambda: others)
