"""Defines the sections of the optimizer and of its schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from deltawire.config.base import Decay, Fraction, Positive, Section


class ParameterGroup(Section, frozen=True, kw_only=True):
    """Settings for the parameters whose names match a pattern; None keeps the optimizer's
    setting.

    Example::

        [[train.optimizer.groups]]
        names = 'norm\\.weight$'
        weight_decay = 0.0
    """

    names: Annotated[str, Meta(min_length=1, max_length=1024)]
    """A regular expression, searched in names such as ``model.layers.0.mlp.down_proj.weight``."""
    kind: Literal["adamw", "muon"] | None = None
    learning_rate: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    weight_decay: Annotated[float, Meta(ge=0, le=1)] | None = None


class OptimizerConfig(Section, frozen=True, kw_only=True):
    """The optimizer (`deltawire.train.optimizer`).

    ``muon`` updates whole matrices, each expert's separately; AdamW then updates embeddings, the
    head, norms and biases.

    Example::

        [train.optimizer]
        kind = "muon"
        learning_rate = 3e-4
        weight_decay = 0.1
    """

    kind: Literal["adamw", "muon"] = "adamw"
    learning_rate: Positive = 1e-4
    weight_decay: Annotated[float, Meta(ge=0, le=1)] = 0.0
    decay_all: bool = False
    """Apply weight decay to norms and biases too."""
    max_grad_norm: Positive = 1.0
    """Gradients are always clipped to this norm, over all parameters."""
    beta1: Decay = 0.9
    beta2: Decay = 0.99
    epsilon: Positive = 1e-8
    momentum: Decay = 0.95
    """The momentum of Muon."""
    muon_scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """``match_rms_adamw`` makes Muon's updates as large as AdamW's, so that both take one rate."""
    groups: list[ParameterGroup] = []
    """The first group that matches a parameter's name applies."""


class ScheduleConfig(Section, frozen=True, kw_only=True):
    """The learning rate over the steps, as a factor (`deltawire.train.optimizer.schedule`).

    It counts optimizer steps and does not depend on ``train.versions``, which may change while a
    run continues.

    Example::

        [train.schedule]
        kind = "cosine"
        warmup_steps = 50
        steps = 1000
        floor = 0.1
    """

    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_steps: Annotated[int, Meta(ge=0, le=1_000_000)] = 20
    """The number of steps over which the rate rises linearly."""
    steps: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    """The step at which the rate reaches its floor; required for all kinds except ``constant``."""
    decay_steps: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    """The number of last steps of ``wsd``, over which the rate falls; before, it is constant."""
    floor: Fraction = 0.0
    """The last rate, as a share of the highest."""

    def contradiction(self) -> tuple[str, str] | None:
        """Finds settings that contradict each other: the reason and what to do, or None."""
        if self.kind == "constant":
            if self.steps or self.decay_steps or self.floor:
                return "schedule: a constant rate takes no steps", "remove steps, or set a kind"
            return None
        if self.steps <= self.warmup_steps:
            return (
                f"schedule: {self.kind} needs steps above warmup_steps",
                "set steps to the number of optimizer steps",
            )
        if (self.kind == "wsd") != bool(self.decay_steps):
            return "schedule: decay_steps belongs to wsd, which needs it", 'set kind = "wsd"'
        if self.decay_steps > self.steps - self.warmup_steps:
            return "schedule: warm-up and decay overlap", "lower decay_steps or warmup_steps"
        return None
