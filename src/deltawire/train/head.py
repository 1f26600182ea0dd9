"""Log-probabilities and entropies through the LM head, in chunks of tokens.

A model's logits are tokens × vocabulary: at 8,192 tokens and 151,936 entries 5 GB in float32, and
several times that while gradients are computed. Here only one chunk of tokens passes through the
head at a time, forward and again in the backward pass, and no array of that size is kept.

Families transform the head's output: Gemma caps it, Cohere, Granite and Falcon-H1 scale it. All of
these are z ↦ cap · tanh(scale · z / cap). Both numbers are measured, once for each model, by a
forward pass whose head returns known values; a model with any other transform is refused by name.

With tensor parallelism each rank has the head's rows for a range of the vocabulary, and computes
these logits only. Logits are never gathered: each token's sums over the vocabulary are added up
over ranks, three numbers and a maximum.

Shapes: T tokens, H hidden, V vocabulary, or a rank's range of it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from deltawire.engines.routers import replaced_forward
from deltawire.errors import InputError

CHUNK_ELEMENTS = 1 << 26
"""Logits that exist at a time: 256 MiB in float32."""
_LEAST, _MOST = 256, 4096
_PROBE = (-1e6, -30.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 30.0, 1e6)
"""Values that a probed head returns: the last finds a cap, 1e-3 a scale, the others check both."""
_SMALL = 5


class LogitTransform(NamedTuple):
    """The transform that a model applies to its head's output z: cap · tanh(scale · z / cap); cap 0
    means no cap."""

    scale: float = 1.0
    cap: float = 0.0

    def __call__(self, z: Tensor) -> Tensor:
        """Transforms logits, out of place."""
        z = z * self.scale
        return torch.tanh(z / self.cap) * self.cap if self.cap else z


class TokenTerms(NamedTuple):
    """The head's result for each token: log π of the one that was drawn, and the entropy of the
    distribution that it was drawn from, in nats. float32 tensors of one shape."""

    logprobs: Tensor
    entropies: Tensor


def chunk_tokens(vocabulary: int) -> int:
    """Returns how many tokens pass a head of this vocabulary at a time."""
    return max(_LEAST, min(_MOST, CHUNK_ELEMENTS // vocabulary // 64 * 64))


def head_terms(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    *,
    bias_V: Tensor | None = None,
    transform: LogitTransform = LogitTransform(),  # noqa: B008 - immutable
    temperature: float = 1.0,
    fp32: bool = False,
    entropy_gradient: bool = False,
    chunk: int = 0,
) -> TokenTerms:
    """log softmax(transform(hidden · weightᵀ + bias) / temperature) at the targets, and entropies.

    ``fp32`` computes the product in float32 even if the weights are bf16. The entropies have a
    gradient only if ``entropy_gradient`` asks for it. ``chunk`` tokens are computed at a time, 0
    for a number that follows from the vocabulary. Gradients of the weight add up in float32. A
    weight that is a DTensor, divided over ranks by rows, gives the same results on all of them.

    Example::

        terms = head_terms(hidden, model.lm_head.weight, targets, temperature=0.7)
        (-terms.logprobs).mean().backward()
    """
    part = None
    if isinstance(weight_VH, DTensor):
        part = _VocabularyPart.of(weight_VH)
        weight_VH = weight_VH.to_local()
        bias_V = bias_V.to_local() if isinstance(bias_V, DTensor) else bias_V
    settings = _Settings(
        transform,
        temperature,
        torch.float32 if fp32 else weight_VH.dtype,
        entropy_gradient,
        chunk or chunk_tokens(len(weight_VH)),
        part,
    )
    logprobs, entropies = _ChunkedTerms.apply(  # type: ignore[no-untyped-call]
        hidden_TH, weight_VH, bias_V, targets_T, settings
    )
    return TokenTerms(logprobs, entropies if entropy_gradient else entropies.detach())


class _VocabularyPart(NamedTuple):
    """This rank's entries of a vocabulary, from ``first`` on, that a group of ranks divides."""

    group: Any
    first: int

    @classmethod
    def of(cls, weight_VH: DTensor) -> _VocabularyPart:
        """Returns the part of a weight that is divided evenly by rows."""
        mesh = weight_VH.device_mesh
        return cls(mesh.get_group(), mesh.get_local_rank() * len(weight_VH.to_local()))

    def own(self, targets_T: Tensor, entries: int) -> tuple[Tensor, Tensor]:
        """Returns the targets' positions among this rank's ``entries``, and a mask of those that
        are on this rank.
        """
        places = targets_T - self.first
        inside = (places >= 0) & (places < entries)
        return places.clamp(0, entries - 1), inside

    def terms(self, z: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each token's target logit, log-sum-exp and entropy over the whole vocabulary."""
        places, inside = self.own(targets, z.shape[1])
        largest = z.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        p = (z - largest[:, None]).exp_()
        picked = torch.where(inside, z.gather(1, places[:, None])[:, 0], 0.0)
        sums = torch.stack([picked, p.sum(1), p.mul_(z).sum(1)])
        dist.all_reduce(sums, group=self.group)
        norm = largest + sums[1].log()
        return sums[0], norm, norm - sums[2] / sums[1]


class _Settings(NamedTuple):
    transform: LogitTransform
    temperature: float
    dtype: torch.dtype
    entropy_gradient: bool
    chunk: int
    part: _VocabularyPart | None = None

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Logits of one chunk before the temperature, float32 and owned by the caller."""
        z = F.linear(hidden.to(self.dtype), weight, bias).float()
        if self.transform.scale != 1.0:
            z.mul_(self.transform.scale)
        if self.transform.cap:
            z.div_(self.transform.cap).tanh_().mul_(self.transform.cap)
        return z


class _ChunkedTerms(torch.autograd.Function):
    """Both passes of `head_terms`. Keeps hidden states, weight and two numbers for each token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor]:
        cast = weight.to(settings.dtype)
        cast_bias = None if bias is None else bias.to(settings.dtype)
        logprobs, norms, entropies = (
            torch.empty(len(hidden), device=hidden.device) for _ in range(3)
        )
        for start in range(0, len(hidden), settings.chunk):
            rows = slice(start, start + settings.chunk)
            z = settings.logits(hidden[rows], cast, cast_bias).div_(settings.temperature)
            if settings.part is not None:
                picked, norm, entropies[rows] = settings.part.terms(z, targets[rows])
            else:
                norm = torch.logsumexp(z, 1)
                picked = z.gather(1, targets[rows, None])[:, 0]
                p = (z - norm[:, None]).exp_()
                entropies[rows] = norm - p.mul_(z).sum(1)
            norms[rows], logprobs[rows] = norm, picked - norm
        ctx.save_for_backward(hidden, weight, bias, targets, norms, entropies)
        ctx.settings = settings
        if not settings.entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        settings: _Settings = ctx.settings
        hidden, weight, bias, targets, norms, entropies = ctx.saved_tensors
        cast = weight.to(settings.dtype)
        cast_bias = None if bias is None else bias.to(settings.dtype)
        wanted = ctx.needs_input_grad
        d_hidden = torch.empty_like(hidden) if wanted[0] else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if wanted[2] else None
        for start in range(0, len(hidden), settings.chunk):
            rows = slice(start, start + settings.chunk)
            z = settings.logits(hidden[rows], cast, cast_bias)
            d_z = _logit_gradient(
                z,
                targets[rows],
                norms[rows, None],
                entropies[rows, None],
                grads[0][rows, None],
                grads[1][rows, None],
                settings,
            ).to(settings.dtype)
            if d_hidden is not None:
                d_hidden[rows] = d_z @ cast
            if d_weight is not None:
                x = hidden[rows].to(settings.dtype)
                if settings.dtype == torch.float32:
                    d_weight.addmm_(d_z.T, x)
                else:
                    d_weight += d_z.T @ x
            if d_bias is not None:
                d_bias += d_z.sum(0, dtype=torch.float32)
            del z, d_z
        if d_hidden is not None and settings.part is not None:
            dist.all_reduce(d_hidden, group=settings.part.group)
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            None,
            None,
        )


def _logit_gradient(
    z: Tensor,
    targets: Tensor,
    norms: Tensor,
    entropies: Tensor,
    of_logprob: Tensor,
    of_entropy: Tensor,
    settings: _Settings,
) -> Tensor:
    """Returns the gradient of one chunk's head output; reuses ``z``, the logits before the
    temperature.

    With y = z / temperature and p = softmax(y): ∂ log p_t / ∂y = onehot(t) − p, and
    ∂ entropy / ∂y = −p · (log p + entropy).
    """
    cap, scale = settings.transform.cap, settings.transform.scale
    slope = (1 - (z / cap).square_()) if cap else None
    logp = z.div_(settings.temperature).sub_(norms)
    p = logp.exp()
    if settings.entropy_gradient:
        grad = p.mul_(logp.add_(entropies).mul_(of_entropy).add_(of_logprob)).neg_()
    else:
        grad = p.mul_(-of_logprob)
    if settings.part is not None:
        targets, inside = settings.part.own(targets, z.shape[1])
        of_logprob = of_logprob * inside[:, None]
    grad.scatter_add_(1, targets[:, None], of_logprob)
    if slope is not None:
        grad.mul_(slope)
    return grad.mul_(scale / settings.temperature)


class OutputHead(NamedTuple):
    """A causal LM's output layer and what the model does to its result."""

    module: nn.Linear
    transform: LogitTransform


_found: WeakKeyDictionary[nn.Module, LogitTransform] = WeakKeyDictionary()


def head_of(model: Any) -> OutputHead:
    """Returns the model's head; takes a forward pass over one token for the first time.

    Raises `InputError` for a head that is not one linear layer, or whose output the model changes
    in a way that is not a scale and a cap.
    """
    module = model.get_output_embeddings()
    name = type(model).__name__
    # A sharded layer's class is a subclass of the original one.
    if not isinstance(module, nn.Linear) or hasattr(module, "base_layer"):
        raise InputError(
            f"{name}: its head is a {type(module).__name__}; a linear layer can be trained",
            hint="leave the head out of the adapter's target modules",
        )
    if model not in _found:
        _found[model] = _probed(model, module)
    return OutputHead(module, _found[model])


def _probed(model: Any, module: nn.Linear) -> LogitTransform:
    values = torch.tensor(_PROBE, dtype=torch.float64)

    def known(hidden: Tensor) -> Tensor:
        return values.to(hidden.device).expand(*hidden.shape[:-1], len(values))

    ids = torch.zeros(1, 1, dtype=torch.long, device=module.weight.device)
    training = [one for one in model.modules() if one.training]
    with torch.no_grad(), replaced_forward(module, known):
        # Without dropout, the pass draws no random numbers from the step's.
        seen = model.eval()(input_ids=ids, use_cache=False).logits.reshape(-1).double().cpu()
    for one in training:
        one.training = True
    found = _fitted(seen, values)
    if found is None:
        raise InputError(
            f"{type(model).__name__} changes the output of its head in an unknown way",
            hint="a scale and a tanh cap are known; please report the model",
        )
    return found


def _fitted(seen: Tensor, values: Tensor) -> LogitTransform | None:
    """Returns the transform that gives ``seen`` for ``values``; None if there is none."""
    if seen.shape != values.shape:
        return None
    scale = float(seen[_SMALL] / values[_SMALL])
    scale = 1.0 if math.isclose(scale, 1.0, rel_tol=1e-6) else scale
    largest = float(seen[-1])
    cap = largest if largest < 0.01 * scale * float(values[-1]) else 0.0
    found = LogitTransform(scale, cap)
    return found if torch.allclose(found(values), seen, rtol=1e-5, atol=1e-9) else None
