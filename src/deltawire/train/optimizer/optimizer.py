"""Runs one optimizer step over named parameters, bucket by bucket."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from deltawire.config import TrainConfig
from deltawire.errors import CorruptError
from deltawire.export.shards import local_part, placed_like
from deltawire.train.optimizer.groups import Rule, rules_of
from deltawire.train.optimizer.muon import muon_step
from deltawire.train.optimizer.residence import DeviceStates, HostStates, States
from deltawire.train.optimizer.schedule import rate_factor

_STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum",)}
_PREFIX = {"adamw": "adam", "muon": "muon"}
_LAYER = re.compile(r"^(.*?\.\d+)\.")


class StepSettings(NamedTuple):
    """Settings of one step, for every parameter, in place of the configuration's.

    ``max_grad_norm`` is the caller's to apply; 0 does not clip.

    Example::

        settings = StepSettings(
            learning_rate=1e-4,
            beta1=0.9,
            beta2=0.95,
            epsilon=1e-8,
            weight_decay=0.0,
            max_grad_norm=1.0,
        )
        optimizer.step(gradients, number, settings=settings)
    """

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    max_grad_norm: float


def open_optimizer(
    parameters: Mapping[str, Tensor],
    config: TrainConfig,
    *,
    not_matrices: AbstractSet[str] = frozenset(),
) -> Optimizer:
    """Opens the optimizer that ``config`` names on float32 parameters, plain or DTensors.

    ``not_matrices`` are names of embeddings and of the head, which Muon does not take. Raises
    `InputError` if parameter groups and parameters do not fit.
    """
    rules = rules_of(parameters, config.optimizer, not_matrices=not_matrices)
    return Optimizer(parameters, rules, config)


class Optimizer:
    """AdamW and Muon on named float32 parameters, each by its rule.

    States are made as zeros at once, so their names never change. With ``train.offload =
    "optimizer"`` they lie in host memory, and the device holds those of three buckets at a time.

    Example::

        optimizer = open_optimizer(dict(model.named_parameters()), config.train)
        loss.backward()
        optimizer.step({name: p.grad for name, p in model.named_parameters()}, 1)
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], rules: Mapping[str, Rule], config: TrainConfig
    ) -> None:
        self._parameters = dict(parameters)
        self._rules = dict(rules)
        self._config = config
        self._buckets = list(_buckets(self._parameters))
        self._states = HostStates() if config.offload == "optimizer" else DeviceStates()
        self._steps: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            local = local_part(parameter)
            for key in _STATES[self._rules[name].kind]:
                self._states.add(name, key, local)
            if self._rules[name].kind == "adamw":
                self._steps[name] = torch.zeros((), device=local.device)

    @torch.no_grad()
    def step(
        self,
        gradients: Mapping[str, Tensor | None],
        number: int,
        *,
        settings: StepSettings | None = None,
    ) -> None:
        """Makes the ``number``-th step, counted from 1; parameters without a gradient do not
        change.

        Gradients are expected to be clipped already. ``settings`` replace the configuration's
        rates, decay and Adam's constants, and the schedule, for this step.
        """
        factor = 1.0 if settings else rate_factor(self._config.schedule, number)
        present = {name for name, gradient in gradients.items() if gradient is not None}
        buckets = [[name for name in names if name in present] for names in self._buckets]
        buckets = [names for names in buckets if names]
        for names, states in zip(buckets, self._states.over(buckets), strict=True):
            self._update(names, states, gradients, factor, settings)

    def _update(
        self,
        names: list[str],
        states: States,
        gradients: Mapping[str, Tensor | None],
        factor: float,
        settings: StepSettings | None,
    ) -> None:
        config = self._config.optimizer
        adam = settings or config
        for name in names:
            parameter, gradient, rule = self._parameters[name], gradients[name], self._rules[name]
            if settings is not None:
                rule = Rule(rule.kind, settings.learning_rate, settings.weight_decay)
            assert gradient is not None
            gradient = gradient.to(parameter.dtype)
            if rule.kind == "muon":
                muon_step(
                    parameter,
                    gradient,
                    states[name]["momentum"],
                    rate=rule.learning_rate * factor,
                    weight_decay=rule.weight_decay,
                    beta=config.momentum,
                    scale=config.muon_scale,
                )
                continue
            adamw(
                [local_part(parameter)],
                [local_part(gradient)],
                [states[name]["exp_avg"]],
                [states[name]["exp_avg_sq"]],
                [],
                [self._steps[name]],
                fused=True,
                amsgrad=False,
                beta1=adam.beta1,
                beta2=adam.beta2,
                lr=rule.learning_rate * factor,
                weight_decay=rule.weight_decay,
                eps=adam.epsilon,
                maximize=False,
            )

    def state(self) -> dict[str, Tensor]:
        """Returns the states themselves, by stable names: ``adam/exp_avg/NAME`` and the like.

        States of DTensors are DTensors of the same placements.
        """
        found = {f"adam/step/{name}": step for name, step in self._steps.items()}
        for name, kept in self._states.held.items():
            for key, state in kept.items():
                label = f"{_PREFIX[self._rules[name].kind]}/{key}/{name}"
                found[label] = _placed(self._parameters[name], state)
        return found

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Copies a `state` into this one; raises `CorruptError` if it does not fit."""
        for label, own in self.state().items():
            saved = state.get(label)
            if saved is None or saved.shape != own.shape:
                raise CorruptError(f"the checkpoint does not fit the optimizer at {label}")
            local_part(own).copy_(local_part(saved))


def _buckets(parameters: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names in order, those of one layer together; a layer is everything up to a number."""
    names: list[str] = []
    current: str | None = None
    for name in parameters:
        found = _LAYER.match(name)
        layer = found[1] if found else None
        if names and (layer is None or layer != current):
            yield names
            names = []
        names.append(name)
        current = layer
    if names:
        yield names


def _placed(parameter: Tensor, state: Tensor) -> Tensor:
    """Returns the state as the parameter is placed."""
    return placed_like(parameter, state) if isinstance(parameter, DTensor) else state
