"""Losses of the training client: unnormalized sums over tokens.

Each is a function of log-probabilities and of a datum's loss inputs, all of the shape of its
``target_tokens``. With x = logprobs of the trained policy, q = ``logprobs`` of the sampler,
r = exp(x − q), A = ``advantages`` and w = ``weights`` (1 where none are given)::

    cross_entropy        Σ −w·x
    importance_sampling  Σ −w·r·A
    ppo                  Σ −w·min(r·A, clip(r, low, high)·A)
    cispo                Σ −w·stop_gradient(clip(r, low, high))·A·x
    dro                  Σ −w·(x·A − ½·β·(x − q)²)
    gspo                 Σ −w·min(s·A, clip(s, low, high)·A),  s = exp(Σ m·(x − q) / Σ m)

``low`` and ``high`` are bounds of the ratio, 0.8 and 1.2 unless the configuration or the datum
says otherwise (``clip_low_threshold``, ``clip_high_threshold``); m is ``sequence_ratio_mask``, the
weights' support unless given. A sum can be split over any number of calls: gradients add up, and
`deltawire.train.TrainingClient.forward_backward_custom` is exact because cross_entropy with
w = −∂C/∂x has the gradient of C.

Sources: PPO, arXiv:1707.06347; CISPO, arXiv:2506.13585; DRO, arXiv:2405.19107; GSPO,
arXiv:2507.18071. Names and defaults are those of Tinker's SDK.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from deltawire.errors import InputError

CLIP_LOW, CLIP_HIGH, BETA = 0.8, 1.2, 0.05

Inputs = Mapping[str, Tensor]
Settings = Mapping[str, float]


def cross_entropy(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Σ −w·x."""
    del settings
    return -(_weights(logprobs, inputs) * logprobs).sum()


def importance_sampling(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Σ −w·r·A."""
    del settings
    ratio = (logprobs - inputs["logprobs"]).exp()
    return -(_weights(logprobs, inputs) * ratio * inputs["advantages"]).sum()


def ppo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Σ −w·min(r·A, clip(r)·A)."""
    ratio = (logprobs - inputs["logprobs"]).exp()
    return _clipped(ratio, logprobs, inputs, settings)


def cispo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Σ −w·stop_gradient(clip(r))·A·x."""
    low, high = _bounds(inputs, settings)
    ratio = (logprobs - inputs["logprobs"]).exp().clamp(low, high).detach()
    return -(_weights(logprobs, inputs) * ratio * inputs["advantages"] * logprobs).sum()


def dro(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Σ −w·(x·A − ½·β·(x − q)²)."""
    beta = settings.get("beta", BETA)
    gain = logprobs * inputs["advantages"] - beta / 2 * (logprobs - inputs["logprobs"]).square()
    return -(_weights(logprobs, inputs) * gain).sum()


def gspo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Σ −w·min(s·A, clip(s)·A), with one ratio s for the sequence."""
    weights = _weights(logprobs, inputs)
    mask = inputs.get("sequence_ratio_mask", (weights != 0).float())
    gaps = (logprobs - inputs["logprobs"]) * mask
    ratio = (gaps.sum() / mask.sum().clamp(min=1)).exp().expand_as(logprobs)
    return _clipped(ratio, logprobs, inputs, settings)


def _clipped(ratio: Tensor, logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    low, high = _bounds(inputs, settings)
    advantages = inputs["advantages"]
    gain = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    return -(_weights(logprobs, inputs) * gain).sum()


def _weights(logprobs: Tensor, inputs: Inputs) -> Tensor:
    return inputs["weights"] if "weights" in inputs else torch.ones_like(logprobs)


def _bounds(inputs: Inputs, settings: Settings) -> tuple[Tensor, Tensor]:
    low = inputs.get("clip_low_threshold")
    high = inputs.get("clip_high_threshold")
    return (
        torch.tensor(settings.get("clip_low_threshold", CLIP_LOW)) if low is None else low,
        torch.tensor(settings.get("clip_high_threshold", CLIP_HIGH)) if high is None else high,
    )


LOSSES: dict[str, Callable[[Tensor, Inputs, Settings], Tensor]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
"""The losses by name."""

_CLIPS = frozenset({"clip_low_threshold", "clip_high_threshold"})
_SETTINGS: dict[str, frozenset[str]] = {
    "cross_entropy": frozenset(),
    "importance_sampling": frozenset(),
    "ppo": _CLIPS,
    "cispo": _CLIPS,
    "dro": frozenset({"beta"}),
    "gspo": _CLIPS,
}
_OPTIONAL = frozenset({"weights", "sequence_ratio_mask", *_CLIPS})


def check_loss(name: str, settings: Mapping[str, float | str] | None) -> dict[str, float]:
    """Returns the settings of a loss; raises `InputError` for an unknown loss or setting."""
    if name not in LOSSES:
        raise InputError(
            f"unknown loss {name[:80]!r}",
            hint=f"use one of {', '.join(LOSSES)}, or forward_backward_custom",
        )
    settings = settings or {}
    if unknown := sorted(settings.keys() - _SETTINGS[name]):
        known = ", ".join(sorted(_SETTINGS[name])) or "no settings"
        raise InputError(f"the loss {name} has no setting {unknown[0]!r}", hint=f"it has {known}")
    try:
        return {key: float(value) for key, value in settings.items()}
    except ValueError as error:
        raise InputError(f"a setting of the loss {name} is not a number: {error}") from error


def check_inputs(name: str, inputs: Inputs) -> None:
    """Raises `InputError` unless a datum has the inputs of the loss, in the shape of its
    targets."""
    required = ["target_tokens"]
    if name != "cross_entropy":
        required += ["logprobs", "advantages"]
    if missing := [key for key in required if key not in inputs]:
        raise InputError(f"a datum has no {missing[0]!r}", hint=f"the loss {name} needs it")
    if unknown := sorted(inputs.keys() - {*required} - _OPTIONAL):
        raise InputError(f"the loss {name} does not use the input {unknown[0]!r}")
    shape = inputs["target_tokens"].shape
    for key, value in inputs.items():
        if value.shape != shape and not (key in _CLIPS and value.dim() == 0):
            raise InputError(
                f"the loss input {key!r} has shape {list(value.shape)}, target_tokens has "
                f"{list(shape)}",
                hint="give one entry for each target",
            )
        if not bool(torch.isfinite(value).all()):
            raise InputError(f"the loss input {key!r} has entries that are not finite")
