"""States in which precision a run's sampler computes, and over which weights.

The published weights are those that the trainer computes with, unless its exporter rounds them once
more. Parity is then judged with that gap: the sampler's distribution is not the trainer's, even
where both compute exactly.
"""

from __future__ import annotations

import msgspec

from deltawire.config.exporters import is_exact, scheme_of
from deltawire.config.sections import ParityConfig, RunConfig, TrainConfig, WarnLimits

ROUNDED_K3 = 1e-2
"""The default of ``parity.warn.k3`` where the sampler's weights are rounded once more."""


class ServedPrecision(msgspec.Struct, frozen=True, kw_only=True):
    """The precision of trainer and sampler, and the weights that the sampler serves.

    ``trainer`` and ``sampler`` are the dtypes of their arithmetic. ``weights`` is ``same`` if both
    hold the same bits, else the exporter that rounds the sampler's, and ``packed`` the format that
    its frozen weights are packed in. ``warn_k3`` is the limit of k3 that batches are judged by.

    Example::

        found = served_precision(config)
        if found.differs:
            print(found.words)    # "the sampler computes in bfloat16, the trainer in float32"
    """

    trainer: str
    sampler: str
    weights: str = "same"
    packed: str = "none"
    warn_k3: float

    @property
    def differs(self) -> bool:
        """Returns whether the sampler serves another precision than the trainer computes in."""
        return self.weights != "same" or self.trainer != self.sampler

    @property
    def words(self) -> str:
        """Says in a few words what the sampler serves."""
        parts = []
        if self.weights != "same":
            packed = "" if self.packed == "none" else f" in {self.packed}"
            parts.append(f"the sampler's weights are {self.weights}{packed}, rounded once more")
        if self.trainer != self.sampler:
            parts.append(f"the sampler computes in {self.sampler}, the trainer in {self.trainer}")
        parts = parts or [f"sampler and trainer hold the same bits and compute in {self.trainer}"]
        return "; ".join(parts)


def published(train: TrainConfig) -> list[str]:
    """Returns the exporters by which each version is published; ``train.exporter`` is first."""
    return [train.exporter, *train.also_publish]


def served_exporter(config: RunConfig) -> str:
    """Returns the exporter of the weights that workers sample from."""
    return config.rollout.weights or config.train.exporter


def samples_quantized(config: RunConfig) -> bool:
    """Returns whether workers compute with quantized weights, which the trainer does not."""
    return scheme_of(served_exporter(config)) is not None


def served_precision(config: RunConfig) -> ServedPrecision:
    """Returns what a run's sampler serves, by its configuration."""
    exporter = served_exporter(config)
    same = is_exact(exporter)
    return ServedPrecision(
        trainer=config.train.compute,
        sampler=config.rollout.precision,
        weights="same" if same else exporter,
        packed=config.train.base_adapter.packed,
        warn_k3=judged_parity(config).warn.k3,
    )


def judged_parity(config: RunConfig) -> ParityConfig:
    """Returns the limits that batches are judged by: those of ``[parity]``, and `ROUNDED_K3` for a
    ``warn.k3`` that is the default if the sampler's weights are rounded once more.

    A quantized sampler is compared with the values that it holds, so its limits stay: tokens are
    scored again with those, and the trainer's own scores count as drift.
    """
    warn, exact = config.parity.warn, is_exact(served_exporter(config))
    if exact or samples_quantized(config) or warn.k3 != WarnLimits().k3:
        return config.parity
    loose = msgspec.structs.replace(warn, k3=ROUNDED_K3)
    return msgspec.structs.replace(config.parity, warn=loose)
