"""Keeps fp32 master weights for a model that computes with the published, rounded ones.

The model's parameters always hold exactly the bits that are published, so trainer and sampler
compute with the same weights; small steps add up in the masters until they move a published bit.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from deltawire.config import TrainConfig
from deltawire.errors import CorruptError
from deltawire.export.source import WeightSource, open_source
from deltawire.placement.live import saved_buffers
from deltawire.train.optimizer import StepSettings, open_optimizer


class MasterWeights:
    """An optimizer on float32 copies of a model's parameters.

    ``source`` is what is published of the model; by default ``config.exporter`` decides. The
    masters start as the model's parameters are, and those are rounded at once to the source's
    compute dtype. Frozen parameters are rounded too, and have no master. Saved buffers take no
    optimizer steps: they are published, and kept with the state, as the model sets them.
    """

    def __init__(
        self, model: Any, config: TrainConfig, *, source: WeightSource | None = None
    ) -> None:
        self.model = model
        self.source = source or open_source(config.exporter, model)
        self.steps = 0
        self._config = config
        self._parameters: dict[str, Tensor] = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._masters = {
            name: parameter.detach().float().clone() for name, parameter in self._parameters.items()
        }
        self._optimizer = open_optimizer(
            self._masters, config, not_matrices=vocabulary_parameters(model)
        )
        self._round()
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.requires_grad:
                    parameter.copy_(parameter.to(self.source.compute_dtype))

    @torch.no_grad()
    def step(self, settings: StepSettings | None = None) -> float:
        """Take a step on the model's gradients and clear them; returns their norm before clipping.

        If the norm is not finite, only the count of steps changes. ``settings`` replace the
        configuration's for this step."""
        limit = (settings or self._config.optimizer).max_grad_norm or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), limit))
        self.steps += 1
        if math.isfinite(norm):
            gradients = {name: parameter.grad for name, parameter in self._parameters.items()}
            self._optimizer.step(gradients, self.steps, settings=settings)
            self._round()
        for parameter in self._parameters.values():
            parameter.grad = None
        return norm

    def state(self) -> dict[str, Tensor]:
        """Everything that a later process needs to continue exactly."""
        state = {"steps": torch.tensor(self.steps)}
        for name, master in self._masters.items():
            state[f"master/{name}"] = master
        state |= self._optimizer.state()
        for name, buffer in saved_buffers(self.model).items():
            state[f"buffer/{name}"] = buffer
        return state

    @torch.no_grad()
    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore a `state`; raises `CorruptError` if it does not fit this model."""
        for name, master in self._masters.items():
            saved = state.get(f"master/{name}")
            if saved is None or saved.shape != master.shape:
                raise CorruptError(f"the checkpoint does not fit the model at {name}")
            master.copy_(saved)
        self._optimizer.restore(state)
        for name, buffer in saved_buffers(self.model).items():
            saved = state.get(f"buffer/{name}")
            if saved is None or (saved.shape, saved.dtype) != (buffer.shape, buffer.dtype):
                raise CorruptError(f"the checkpoint does not fit the model at {name}")
            buffer.copy_(saved)
        if "steps" not in state:
            raise CorruptError("the checkpoint has no count of steps")
        self.steps = int(state["steps"])
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(self._masters[name].to(self.source.compute_dtype))


def vocabulary_parameters(model: Any) -> set[str]:
    """Names of the embeddings' and the head's parameters, whose rows are vectors of tokens."""
    found: set[int] = set()
    for get in ("get_input_embeddings", "get_output_embeddings"):
        module = getattr(model, get)() if hasattr(model, get) else None
        found |= (
            {id(parameter) for parameter in module.parameters()} if module is not None else set()
        )
    return {name for name, parameter in model.named_parameters() if id(parameter) in found}
