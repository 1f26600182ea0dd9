"""Divides the change of a behavior over the steps of a run: the line integral of its gradient.

Between versions a and b, the behavior changes by ∫ ∇B · dθ. Along the published versions, the
trapezoid takes a step's part as ½ (∇B(θₖ₋₁) + ∇B(θₖ)) · (θₖ − θₖ₋₁). The parts add up to the whole
change up to a residual, which is shown, and each is also a sum over layers. A part that misses
the change at its ends by much, as that of a very large step does, is integrated again along the
straight line between both versions: by Boole's rule on one panel of five points, then on twice as
many panels, until the error is within tolerance or `MAX_PANELS` are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import msgspec
import torch

from deltawire.launch.branches.behavior import Behavior
from deltawire.launch.branches.versioned_model import VersionedModel
from deltawire.watch.weights import layer_and_part

Progress = Callable[[str, int, int], None]

MISSED = 0.01
"""The share of the whole change by which a part may miss the change at its ends."""
BOOLE = ((0, 7 / 90), (1, 32 / 90), (2, 12 / 90), (3, 32 / 90), (4, 7 / 90))
"""The points of a panel, in fourths of its length, and their weights."""
MAX_PANELS = 16
"""65 gradients for one step. One at a hundred times the learning rate missed 24 % of the change
with one panel."""


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
    by_layer: list[dict[str, float]] = []
    values: list[float] = []
    held: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for number, version in enumerate(versions):
        progress("gradients", number, len(versions))
        model.move_to(version)
        values.append(behavior.measure(model.module, gradient=True))
        parts = _part(model, held)
        if number:
            by_layer.append(parts)
            steps.append(
                StepPart(
                    base=versions[number - 1],
                    version=version,
                    part=sum(parts.values()),
                    change=values[-1] - values[-2],
                )
            )
    progress("gradients", len(versions), len(versions))
    held.clear()
    # Steps may cancel each other, so that the whole change is nothing.
    allowed = MISSED * max(abs(one) for one in (values[-1] - values[0], *(s.change for s in steps)))
    for place, step in enumerate(steps):
        if abs(step.change - step.part) > allowed:
            by_layer[place] = _along_line(model, behavior, step, allowed)
            steps[place] = msgspec.structs.replace(step, part=sum(by_layer[place].values()))
    layers: dict[str, float] = {}
    for parts in by_layer:
        for name, part in parts.items():
            layers[name] = layers.get(name, 0.0) + part
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
) -> dict[str, float]:
    """Returns the part of the step from the weights and gradients in ``held``, by layer, and holds
    those of now. Gradients are taken from the parameters."""
    layers: dict[str, float] = {}
    for name, parameter in model.trained().items():
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        if name in held:
            weights, before = held[name]
            moved = (parameter - weights).reshape(-1).double()
            part = float(torch.dot((before + gradient).reshape(-1).double(), moved)) / 2
            where = _layer_of(name)
            layers[where] = layers.get(where, 0.0) + part
            weights.copy_(parameter)
            held[name] = weights, gradient
        else:
            held[name] = parameter.detach().clone(), gradient
    return layers


def _layer_of(name: str) -> str:
    layer, rest = layer_and_part(name)
    return rest if layer is None else f"layer {layer}"


def _along_line(
    model: VersionedModel, behavior: Behavior, step: StepPart, allowed: float
) -> dict[str, float]:
    """Returns the part of a step by layer, from gradients on the line between its versions; from
    more of them while it misses the step's change by more than ``allowed``."""
    model.move_to(step.base)
    trained = model.trained()
    start = {name: one.detach().clone() for name, one in trained.items()}
    model.move_to(step.version)
    moved = {name: one.detach() - start[name] for name, one in trained.items()}

    @cache  # Twice as many panels have all points of the ones before.
    def derivatives_at(place: float) -> dict[str, float]:
        """Returns the gradient at a place of the line times the step, by layer."""
        with torch.no_grad():
            for name, one in trained.items():
                one.copy_(start[name] + place * moved[name])
        behavior.measure(model.module, gradient=True)
        slopes: dict[str, float] = {}
        for name, one in trained.items():
            gradient, one.grad = one.grad, None
            if gradient is not None:
                slope = torch.dot(gradient.reshape(-1).double(), moved[name].reshape(-1).double())
                where = _layer_of(name)
                slopes[where] = slopes.get(where, 0.0) + float(slope)
        return slopes

    panels, layers = 1, _composite_boole(derivatives_at, 1)
    while panels < MAX_PANELS and abs(step.change - sum(layers.values())) > allowed:
        panels *= 2
        layers = _composite_boole(derivatives_at, panels)
    model.forget()
    return layers


def _composite_boole(
    derivatives_at: Callable[[float], dict[str, float]], panels: int
) -> dict[str, float]:
    """Returns Boole's rule on panels of equal length, by layer."""
    layers: dict[str, float] = {}
    for panel in range(panels):
        for point, weight in BOOLE:
            for where, slope in derivatives_at((panel + point / 4) / panels).items():
                layers[where] = layers.get(where, 0.0) + weight / panels * slope
    return layers
