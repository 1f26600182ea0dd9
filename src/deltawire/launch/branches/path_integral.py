"""Divides the change of a behavior over the steps of a run: the line integral of its gradient.

Between versions a and b, the behavior changes by ∫ ∇B · dθ. Along the published versions, the
trapezoid takes a step's part as ½ (∇B(θₖ₋₁) + ∇B(θₖ)) · (θₖ − θₖ₋₁). The parts add up to the whole
change up to a residual, which is shown, and each is also a sum over layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch

from deltawire.launch.branches.behavior import Behavior
from deltawire.launch.branches.versioned_model import VersionedModel
from deltawire.watch.weights import layer_and_part

Progress = Callable[[str, int, int], None]


class StepPart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the versions from ``base`` (exclusive) to ``version`` in the change: ``part`` by
    the integral, ``change`` as measured at both ends. ``fresh`` is what the part has more than the
    optimizer's momentum carries on from the step before, None for a part of several versions."""

    base: int
    version: int
    part: float
    change: float
    fresh: float | None = None


class PathIntegral(msgspec.Struct, frozen=True, kw_only=True):
    """The behavior at both ends, and its change divided over the steps in their order, and over
    layers, the largest first."""

    before: float
    after: float
    steps: list[StepPart]
    layers: dict[str, float]

    @property
    def change(self) -> float:
        """Returns the whole change."""
        return self.after - self.before

    @property
    def residual(self) -> float:
        """Returns the whole change less the sum of the parts."""
        return self.change - sum(step.part for step in self.steps)


def without_momentum(steps: Sequence[StepPart], momentum: float) -> list[StepPart]:
    """Returns the steps with `StepPart.fresh`.

    A step moves along m̂ₖ = mₖ / (1 − βᵏ), where mₖ = β mₖ₋₁ + (1 − β) gₖ. So the gradient of a
    group goes on to move the behavior in later steps, and the step in which it entered is the one
    whose part exceeds β (1 − βᵏ⁻¹) / (1 − βᵏ) times the part before. Steps are taken to be counted
    like versions.
    """
    found: list[StepPart] = []
    for step in steps:
        if step.base != step.version - 1:
            found.append(step)
            continue
        carried = 0.0
        if found and found[-1].version == step.base and found[-1].fresh is not None:
            share = (1 - momentum ** (step.version - 1)) / (1 - momentum**step.version)
            carried = momentum * share * found[-1].part
        found.append(msgspec.structs.replace(step, fresh=step.part - carried))
    return found


def integrate(
    model: VersionedModel,
    behavior: Behavior,
    versions: Sequence[int],
    *,
    progress: Progress = lambda *_: None,
) -> PathIntegral:
    """Measures the behavior and its gradient at each of ``versions``, in ascending order."""
    steps: list[StepPart] = []
    layers: dict[str, float] = {}
    values: list[float] = []
    held: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for number, version in enumerate(versions):
        progress("gradients", number, len(versions))
        model.move_to(version)
        values.append(behavior.measure(model.module, gradient=True))
        parts = _part(model, held, layers)
        if number:
            steps.append(
                StepPart(
                    base=versions[number - 1],
                    version=version,
                    part=parts,
                    change=values[-1] - values[-2],
                )
            )
    progress("gradients", len(versions), len(versions))
    order = sorted(layers, key=lambda name: -abs(layers[name]))
    return PathIntegral(
        before=values[0],
        after=values[-1],
        steps=steps,
        layers={name: layers[name] for name in order},
    )


@torch.no_grad()
def _part(
    model: VersionedModel,
    held: dict[str, tuple[torch.Tensor, torch.Tensor]],
    layers: dict[str, float],
) -> float:
    """Returns the part of the step from the weights and gradients in ``held``, adds it to
    ``layers``, and holds those of now. Gradients are taken from the parameters."""
    total = 0.0
    for name, parameter in model.trained().items():
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        if name in held:
            weights, before = held[name]
            moved = (parameter - weights).reshape(-1).double()
            part = float(torch.dot((before + gradient).reshape(-1).double(), moved)) / 2
            layer, rest = layer_and_part(name)
            where = rest if layer is None else f"layer {layer}"
            layers[where] = layers.get(where, 0.0) + part
            total += part
            weights.copy_(parameter)
            held[name] = weights, gradient
        else:
            held[name] = parameter.detach().clone(), gradient
    return total
