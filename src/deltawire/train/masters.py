"""Keeps fp32 master weights for a model that computes with the published, rounded ones.

The model's parameters always hold exactly the bits that are published, so trainer and sampler
compute with the same weights; small steps add up in the masters until they move a published bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltawire.config import TrainConfig
from deltawire.errors import CorruptError
from deltawire.export.source import WeightSource, open_source
from deltawire.placement.live import saved_buffers


class MasterWeights:
    """AdamW on float32 copies of a model's parameters.

    ``source`` is what is published of the model; by default ``config.exporter`` decides. The
    masters start as the model's parameters are, and those are rounded at once to the source's
    compute dtype. Saved buffers take no optimizer steps: they are published, and kept with the
    state, as the model sets them.
    """

    def __init__(
        self, model: Any, config: TrainConfig, *, source: WeightSource | None = None
    ) -> None:
        self.model = model
        self.source = source or open_source(config.exporter, model)
        self.steps = 0
        self._config = config
        self._parameters: dict[str, Tensor] = dict(model.named_parameters())
        self._masters = {
            name: parameter.detach().float().clone() for name, parameter in self._parameters.items()
        }
        self._optimizer = torch.optim.AdamW(
            self._masters.values(),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.weight_decay,
        )
        self._round()

    @torch.no_grad()
    def step(self) -> float:
        """Take a step on the model's gradients and clear them; returns their norm before clipping.

        If the norm is not finite, only the count of steps changes."""
        norm = float(
            torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._config.max_grad_norm)
        )
        self.steps += 1
        if torch.isfinite(torch.tensor(norm)):
            for name, master in self._masters.items():
                master.grad = self._parameters[name].grad
            warm = min(1.0, self.steps / max(self._config.warmup_steps, 1))
            for group in self._optimizer.param_groups:
                group["lr"] = self._config.learning_rate * warm
            self._optimizer.step()
            self._round()
        for name, parameter in self._parameters.items():
            parameter.grad = None
            self._masters[name].grad = None
        return norm

    def state(self) -> dict[str, Tensor]:
        """Everything that a later process needs to continue exactly."""
        state = {"steps": torch.tensor(self.steps)}
        for name, master in self._masters.items():
            state[f"master/{name}"] = master
            for key, value in self._optimizer.state.get(master, {}).items():
                state[f"adam/{key}/{name}"] = torch.as_tensor(value)
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
            kept = {
                key: state[f"adam/{key}/{name}"].clone()
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"adam/{key}/{name}" in state
            }
            if kept:
                self._optimizer.state[master] = kept
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
