"""Computes losses and log-probabilities of sequences, on one rank's share of the data."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
import torch
from torch import Tensor

from deltawire.engines.routers import replaced_forward
from deltawire.train.budget import divide_sequences
from deltawire.train.client.losses import LOSSES
from deltawire.train.client.operations import (
    Evaluate,
    Evaluation,
    PreparedDatum,
    check_tokens,
    tensor_from,
)
from deltawire.train.head import chunk_tokens, head_of
from deltawire.train.parallel import TrainerMesh
from deltawire.train.policy import TrainedPolicy
from deltawire.train.step import deterministic


def score_tokens(model: Any, tokens: Sequence[int]) -> Tensor:
    """Returns log π(token t | tokens before t) for t ≥ 1, float32[L − 1] on the CPU."""
    ids = torch.tensor(tokens)
    check_tokens(ids, vocabulary_of(model))
    if len(tokens) < 2:
        return torch.zeros(0)
    with TrainedPolicy(model).sequence_terms([ids[:-1]], [ids[1:]]) as terms:
        return terms[0].logprobs.cpu()


def top_tokens(model: Any, tokens: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
    """Returns the ``count`` likeliest tokens at each t ≥ 1 after the tokens before t, and their
    log-probabilities: int64[L − 1, K] and float32[L − 1, K] on the CPU, likeliest first.

    K is ``count``, or the size of a smaller vocabulary.
    """
    ids = torch.tensor(tokens)
    vocabulary = vocabulary_of(model)
    check_tokens(ids, vocabulary)
    count = min(count, vocabulary)
    if len(tokens) < 2:
        return torch.zeros(0, count, dtype=torch.long), torch.zeros(0, count)
    head = head_of(model)
    own_forward = head.module.forward
    found: list[tuple[Tensor, Tensor]] = []

    def through(hidden_RSH: Tensor) -> Tensor:
        for part_TH in torch.split(hidden_RSH[0], chunk_tokens(vocabulary)):
            logits_TV = head.transform(own_forward(part_TH).float())
            best = logits_TV.topk(count)
            logprobs_TK = best.values - logits_TV.logsumexp(-1, keepdim=True)
            found.append((best.indices.cpu(), logprobs_TK.cpu()))
        return hidden_RSH[..., :1]

    with torch.no_grad(), replaced_forward(head.module, through):
        model(input_ids=ids[None, :-1].to(model.device), use_cache=False)
    indices, logprobs = zip(*found, strict=True)
    return torch.cat(indices), torch.cat(logprobs)


def vocabulary_of(model: Any) -> int:
    """Returns the number of the model's token ids."""
    return int(model.get_input_embeddings().num_embeddings)


def evaluate(
    policy: TrainedPolicy, mesh: TrainerMesh, operation: Evaluate, *, budget: int
) -> Evaluation:
    """Carries out ``operation`` on all ranks together; rank 0 gets the results of all data.

    Each rank computes a share of the data, in passes of at most ``budget`` tokens. With
    ``backward``, gradients are left on the model's parameters, summed over ranks.
    """
    data = operation.data
    shares = divide_sequences(
        [len(one.tokens) for one in data],
        budget=budget,
        ranks=mesh.data_ranks,
        packed=policy.packs,
    )
    found: dict[int, Tensor] = {}
    total = 0.0
    with deterministic():
        for indices in shares[mesh.data_rank]:
            chosen = [data[number] for number in indices]
            logprobs, loss = _pass(policy, operation, chosen or [_shortest(data)], idle=not chosen)
            if chosen:
                found |= dict(zip(indices, logprobs, strict=True))
                total += loss
    return _joined(mesh, data, found, total)


def _pass(
    policy: TrainedPolicy, operation: Evaluate, data: Sequence[PreparedDatum], *, idle: bool
) -> tuple[list[Tensor], float]:
    """Makes one pass. An ``idle`` one takes part in the gathering of weights, and adds zeros."""
    quiet: AbstractContextManager[Any] = nullcontext() if operation.backward else torch.no_grad()
    tokens, targets = [one.tokens for one in data], [one.targets for one in data]
    loss = LOSSES[operation.loss]
    with quiet, policy.sequence_terms(tokens, targets) as terms:
        logprobs = [one.logprobs for one in terms]
        if idle:
            total = torch.stack([one.sum() for one in logprobs]).sum() * 0.0
        else:
            losses = [
                loss(one, _on(one.device, datum.inputs), operation.settings)
                for one, datum in zip(logprobs, data, strict=True)
            ]
            total = torch.stack(losses).sum()
        if operation.backward:
            total.backward()  # type: ignore[no-untyped-call]
    return [one.detach().float().cpu() for one in logprobs], float(total.detach())


def _on(device: torch.device, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in inputs.items()}


def _shortest(data: Sequence[PreparedDatum]) -> PreparedDatum:
    return min(data, key=lambda one: len(one.tokens))


def _joined(
    mesh: TrainerMesh, data: Sequence[PreparedDatum], own: dict[int, Tensor], loss: float
) -> Evaluation:
    """Joins what the ranks computed; sums are in the order of ranks."""
    if mesh.ranks == 1:
        return Evaluation(logprobs=[own[number] for number in range(len(data))], loss=loss)
    part = ({number: one.numpy().tobytes() for number, one in own.items()}, loss)
    parts = [
        msgspec.msgpack.decode(one, type=tuple[dict[int, bytes], float])
        for one in mesh.gather_data(msgspec.msgpack.encode(part))
    ]
    values = {number: raw for of_rank, _ in parts for number, raw in of_rank.items()}
    logprobs = [
        tensor_from(values[number], torch.float32, one.targets.shape)
        for number, one in enumerate(data)
    ]
    return Evaluation(logprobs=logprobs, loss=sum(one for _, one in parts))
