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

A LoRA adapter of the head is computed in the same chunks: hidden states pass its A, and each chunk
of results its B, in the order of PEFT's layer, so that sampler and trainer compute the same sums.

Shapes: T tokens, H hidden, R rank of the head's adapter, V vocabulary, or a rank's range of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


class HeadAdapter(NamedTuple):
    """A LoRA adapter of the head: logits gain scale · low · upᵀ, where ``low`` [T, R] is what A
    makes of the hidden states, and ``up`` is B, [V, R]."""

    low_TR: Tensor
    up_VR: Tensor
    scale: float


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
    adapter: HeadAdapter | None = None,
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
        adapter.scale if adapter else 0.0,
    )
    low, up = (adapter.low_TR, adapter.up_VR) if adapter else (None, None)
    logprobs, entropies = _ChunkedTerms.apply(  # type: ignore[no-untyped-call]
        hidden_TH, weight_VH, bias_V, low, up, targets_T, settings
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
    adapter_scale: float = 0.0

    def cast(self, *weights: Tensor | None) -> list[Any]:
        """Returns the head's weights in the dtype that its product is computed in."""
        return [None if one is None else one.to(self.dtype) for one in weights]

    def logits(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low: Tensor | None,
        up: Tensor | None,
    ) -> Tensor:
        """Logits of one chunk before the temperature, float32 and owned by the caller."""
        product = F.linear(hidden.to(self.dtype), weight, bias)
        if low is not None and up is not None:
            product = product + F.linear(low.to(self.dtype), up) * self.adapter_scale
        z = product.float()
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
        low: Tensor | None,
        up: Tensor | None,
        targets: Tensor,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor]:
        cast, cast_bias, cast_up = settings.cast(weight, bias, up)
        logprobs, norms, entropies = (
            torch.empty(len(hidden), device=hidden.device) for _ in range(3)
        )
        for start in range(0, len(hidden), settings.chunk):
            rows = slice(start, start + settings.chunk)
            part = None if low is None else low[rows]
            z = settings.logits(hidden[rows], cast, cast_bias, part, cast_up)
            z.div_(settings.temperature)
            if settings.part is not None:
                picked, norm, entropies[rows] = settings.part.terms(z, targets[rows])
            else:
                norm = torch.logsumexp(z, 1)
                picked = z.gather(1, targets[rows, None])[:, 0]
                p = (z - norm[:, None]).exp_()
                entropies[rows] = norm - p.mul_(z).sum(1)
            norms[rows], logprobs[rows] = norm, picked - norm
        ctx.save_for_backward(hidden, weight, bias, low, up, targets, norms, entropies)
        ctx.settings = settings
        if not settings.entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        settings: _Settings = ctx.settings
        hidden, weight, bias, low, up, targets, norms, entropies = ctx.saved_tensors
        cast, cast_bias, cast_up = settings.cast(weight, bias, up)
        sums = _HeadGradients(ctx.needs_input_grad, hidden, weight, bias, low, up)
        for start in range(0, len(hidden), settings.chunk):
            rows = slice(start, start + settings.chunk)
            part = None if low is None else low[rows]
            z = settings.logits(hidden[rows], cast, cast_bias, part, cast_up)
            d_z = _logit_gradient(
                z,
                targets[rows],
                norms[rows, None],
                entropies[rows, None],
                grads[0][rows, None],
                grads[1][rows, None],
                settings,
            ).to(settings.dtype)
            sums.add(rows, d_z, cast, cast_up, settings)
            del z, d_z
        if sums.hidden is not None and settings.part is not None:
            dist.all_reduce(sums.hidden, group=settings.part.group)
        return (*sums.found(), None, None)


class _HeadGradients:
    """Gradients of the head's inputs, added up chunk by chunk; None for those that are not wanted.

    Gradients of weights add up in float32.
    """

    def __init__(
        self,
        wanted: Sequence[bool],
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low: Tensor | None,
        up: Tensor | None,
    ) -> None:
        def sums(number: int, like: Tensor | None) -> Tensor | None:
            if like is None or not wanted[number]:
                return None
            return torch.zeros_like(like, dtype=torch.float32)

        self._given = (hidden, weight, bias, low, up)
        self.hidden = torch.empty_like(hidden) if wanted[0] else None
        self.low = torch.empty_like(low) if low is not None and wanted[3] else None
        self.weight, self.bias, self.up = sums(1, weight), sums(2, bias), sums(4, up)

    def add(
        self, rows: slice, d_z: Tensor, weight: Tensor, up: Tensor | None, settings: _Settings
    ) -> None:
        """Adds the gradients of one chunk, whose logits have the gradient ``d_z``."""
        hidden, _, _, low, _ = self._given
        if self.hidden is not None:
            self.hidden[rows] = d_z @ weight
        if self.weight is not None:
            _add_product(self.weight, d_z, hidden[rows].to(settings.dtype))
        if self.bias is not None:
            self.bias += d_z.sum(0, dtype=torch.float32)
        if up is None or low is None:
            return
        d_z = d_z * settings.adapter_scale
        if self.low is not None:
            self.low[rows] = (d_z @ up).to(self.low.dtype)
        if self.up is not None:
            _add_product(self.up, d_z, low[rows].to(settings.dtype))

    def found(self) -> list[Tensor | None]:
        """Returns the gradients in the order and the dtypes of the inputs."""
        all_of = (self.hidden, self.weight, self.bias, self.low, self.up)
        return [
            None if one is None or like is None else one.to(like.dtype)
            for one, like in zip(all_of, self._given, strict=True)
        ]


def _add_product(total: Tensor, d_z: Tensor, x: Tensor) -> None:
    """Adds d_zᵀ · x, in float32 if both are."""
    if x.dtype == torch.float32:
        total.addmm_(d_z.T, x)
    else:
        total += d_z.T @ x


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
    """A causal LM's output layer and what the model does to its result.

    ``module`` is the layer that the model calls, ``linear`` the linear layer that is computed now:
    the base of an adapter, a trained copy, or ``module`` itself. ``lora`` is an active adapter.
    """

    module: nn.Module
    linear: Any
    transform: LogitTransform
    lora: Any = None

    def adapter(self, hidden_TH: Tensor) -> HeadAdapter | None:
        """Returns the head's active LoRA adapter on these hidden states; None without one."""
        if self.lora is None:
            return None
        name = self.lora.active_adapters[0]
        down, up = self.lora.lora_A[name], self.lora.lora_B[name]
        low = down(self.lora.lora_dropout[name](hidden_TH.to(down.weight.dtype)))
        return HeadAdapter(low, up.weight, self.lora.scaling[name])


_found: WeakKeyDictionary[nn.Module, LogitTransform] = WeakKeyDictionary()


def head_of(model: Any) -> OutputHead:
    """Returns the model's head; takes a forward pass over one token for the first time.

    Raises `InputError` for a head that is not one linear layer, with PEFT's LoRA or as PEFT's
    trained copy, or whose output the model changes in a way that is not a scale and a cap.
    """
    module = model.get_output_embeddings()
    linear, lora = _linear_of(module)
    # A sharded layer's class is a subclass of the original one.
    if not isinstance(linear, nn.Linear) or hasattr(linear, "base_layer"):
        raise InputError(
            f"{type(model).__name__}: its head is a {type(module).__name__}; a linear layer can be "
            "trained",
            hint="leave the head out of the adapter's target modules",
        )
    if model not in _found:
        _found[model] = _probed(model, module, linear)
    return OutputHead(module, linear, _found[model], lora)


def _linear_of(module: Any) -> tuple[Any, Any]:
    """Returns the layer that a head computes with now, and its active LoRA layer or None."""
    off = getattr(module, "_disable_adapters", False)
    if hasattr(module, "original_module"):  # PEFT's ModulesToSaveWrapper.
        copies = module.modules_to_save
        return module.original_module if off else copies[module.active_adapters[0]], None
    if hasattr(module, "base_layer") and hasattr(module, "lora_A"):
        return module.base_layer, None if off else module
    return module, None


def _probed(model: Any, module: nn.Module, linear: nn.Linear) -> LogitTransform:
    values = torch.tensor(_PROBE, dtype=torch.float64)

    def known(hidden: Tensor) -> Tensor:
        return values.to(hidden.device).expand(*hidden.shape[:-1], len(values))

    ids = torch.zeros(1, 1, dtype=torch.long, device=linear.weight.device)
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
