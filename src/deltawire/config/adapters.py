"""Defines the section of the adapter that is trained instead of the whole model."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from deltawire.config.base import Fraction, Positive, Section
from deltawire.config.tasks import TaskConfig
from deltawire.packed_formats import PACKED

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM's adapter slots can have (``--max-lora-rank``)."""

Name = Annotated[str, Meta(min_length=1, max_length=256)]


class AdapterConfig(Section, frozen=True, kw_only=True):
    """The part of the model that is trained: all of it, or a LoRA adapter over the frozen rest.

    Example::

        [train.adapter]
        kind = "lora"
        rank = 32
        targets = ["q_proj", "v_proj"]
    """

    kind: Literal["none", "lora"] = "none"
    rank: Annotated[int, Meta(ge=1, le=4096)] = 16
    alpha: Positive = 32.0
    """The adapter's product is scaled by alpha / rank."""
    targets: list[Name] = msgspec.field(default_factory=lambda: ["all-linear"])
    """Last parts of the names of linear layers and embeddings, such as ``q_proj``; ``all-linear``
    is every linear layer except the head. ``experts`` is every stack of fused experts, and
    ``gate_up_proj`` or ``down_proj`` names one kind."""
    rank_pattern: dict[Name, Annotated[int, Meta(ge=1, le=4096)]] = {}
    """Ranks of some layers. A key is a regular expression for the last part of a layer's name, of
    one part or more, as in PEFT; the first key that matches counts."""
    alpha_pattern: dict[Name, Positive] = {}
    """Alphas of some layers, by keys as in `rank_pattern`."""
    use_rslora: bool = False
    """Scale by alpha / √rank (rank-stabilized LoRA) instead of alpha / rank."""
    modules_to_save: list[Name] = []
    """Modules that are trained whole next to the adapter, such as ``lm_head``, named as in
    `targets`."""
    dropout: Fraction = 0.0
    """Dropout of the adapter's input; needs ``train.dropout``. Adapters of experts have none, as in
    PEFT.
    """
    init: Annotated[str, Meta(max_length=4096)] = ""
    """A directory in PEFT's format that the adapter starts from. Its ranks, alphas and targets have
    to be those that are configured."""
    merge_floor: Fraction = 0.25
    """With ``train.exporter = "merged"``: stop once a checkpoint is due and the merged weights keep
    less of the adapter's change than this share; 0 never stops. 4-bit formats keep at most 1 %
    of a change of 1 % of a weight's norm."""
    packed: Name = "none"
    """The format in which trainer and sampler keep frozen experts: ``int4-g32``, ``int8-row``,
    ``mxfp4``, ``nvfp4`` or ``fp8-block``."""
    packed_layers: list[Name] = []
    """Further linear layers to pack, named as in `targets`."""
    shared_factor: bool = False
    """If true, the experts of a layer share the outer factor: A of ``gate_up_proj``, B of
    ``down_proj``.
    """

    def rank_of(self, name: str) -> int:
        """Returns the rank of the adapter of a layer or stack."""
        return int(_found(self.rank_pattern, name, self.rank))

    def alpha_of(self, name: str) -> float:
        """Returns the alpha of the adapter of a layer or stack."""
        return float(_found(self.alpha_pattern, name, self.alpha))

    def scale_of(self, name: str) -> float:
        """Returns the factor of the adapter's product, of a layer or stack."""
        rank = self.rank_of(name)
        return self.alpha_of(name) / (math.sqrt(rank) if self.use_rslora else rank)

    def vllm_fault(self) -> tuple[str, str] | None:
        """Finds a setting that vLLM's adapter slots do not take: the reason and what to do, or
        None. Layers that only the model names are checked when the run starts."""
        hint = 'set rollout.engine = "transformers", or train.exporter = "merged"'
        where = 'rollout.engine "vllm" does not serve'
        if self.packed != "none":
            reason = f"{where} packed weights (train.adapter.packed)"
            return reason, 'set rollout.engine = "transformers", or train.adapter.packed = "none"'
        if self.modules_to_save:
            return f"{where} modules trained whole (train.adapter.modules_to_save)", hint
        for target in self.targets:
            if target.rpartition(".")[2] in _NOT_IN_VLLM:
                return f"{where} an adapter of {target[:80]!r} (train.adapter.targets)", hint
        largest = max(self.rank, *self.rank_pattern.values(), 0)
        if largest > VLLM_RANKS[-1]:
            limit = VLLM_RANKS[-1]
            reason = f"the adapter's rank {largest} is above rollout.engine vllm's largest, {limit}"
            return reason, f"set a smaller rank, or {hint}"
        return None

    @property
    def loses_merges(self) -> bool:
        """Returns whether a merge into the packed format loses nearly all of an adapter's
        change."""
        return self.packed != "none" and not PACKED[self.packed].keeps_merges

    def contradiction(self, *, merged: bool = False) -> tuple[str, str] | None:
        """Finds settings that contradict each other: the reason and what to do, or None.

        ``merged`` says that the run publishes merged weights.
        """
        if merged and self.kind == "none":
            return "exporter merged needs an adapter", 'set adapter.kind, or exporter = "bf16"'
        if merged and self.init:
            return (
                "exporter merged starts from the base, not from adapter.init",
                "merge that adapter into the base first, as PEFT's merge_and_unload does",
            )
        if self.packed != "none" and self.packed not in PACKED:
            known = ", ".join(PACKED)
            return f"adapter.packed names no format: {self.packed[:80]}", f"use one of {known}"
        if merged and self.loses_merges and self.merge_floor:
            reason = (
                f"exporter merged into {self.packed} loses nearly all of an adapter's change: 4 "
                "bits keep at most 1 % of a change of 1 % of a weight's norm"
            )
            return reason, (
                "set adapter.merge_floor = 0 to do it all the same, serve the adapter unmerged, "
                'or set adapter.packed = "none"'
            )
        if self.kind == "none":
            for key, default in _DEFAULTS.items():
                if getattr(self, key) != default:
                    return f"adapter.{key} has no effect without an adapter", (
                        'set adapter.kind = "lora"'
                    )
        if self.packed == "none" and self.packed_layers:
            return "adapter.packed_layers has no effect", "set adapter.packed to a format"
        for key in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(self, key):
                try:
                    re.compile(pattern)
                except re.error as error:
                    return (
                        f"adapter.{key}: {pattern[:80]!r} is not a regular expression: {error}",
                        "escape the characters that are meant as they are",
                    )
        return None


class AdapterLineConfig(AdapterConfig, frozen=True, kw_only=True):
    """One of several adapters of a run, with separate versions over the run's base.

    Example::

        [[train.adapters]]
        name = "math"
        rank = 8
    """

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}\Z")]
    kind: Literal["none", "lora"] = "lora"
    task: TaskConfig | None = None
    """The line's tasks; None for the run's."""


class LineConfig(Section, frozen=True, kw_only=True):
    """In the configuration of a version line: its name, and the digest of the base that it adapts,
    version 0 of the run that holds the line. Not a key of a file.

    Example::

        line = LineConfig(name="math", base=run.digest)
    """

    name: str
    base: str


def adapters_contradiction(
    adapter: AdapterConfig, lines: list[AdapterLineConfig], *, merged: bool
) -> tuple[str, str] | None:
    """Finds a fault in a run's adapter, or adapters that cannot share one base: the reason and what
    to do, or None.
    """
    if lines and adapter != AdapterConfig():
        return "adapter and adapters exclude each other", "name all in [[train.adapters]]"
    if not lines:
        return adapter.contradiction(merged=merged)
    names = [one.name for one in lines]
    for one in lines:
        where = f"adapters.{one.name}"
        if names.count(one.name) > 1:
            return f"two of adapters are named {one.name}", "give each its own name"
        if one.kind == "none":
            return f"{where}.kind is none", "leave the adapter out"
        for key in ("packed", "packed_layers"):
            if getattr(one, key) != getattr(lines[0], key):
                return (
                    f"{where}.{key} is not that of {names[0]}: all adapters share one base",
                    "set packed and packed_layers to the same in all of them",
                )
        if one.packed_layers:
            return f"{where}.packed_layers is not possible with several adapters", "leave it out"
        if found := one.contradiction():
            return found[0].replace("adapter.", f"{where}.", 1), found[1]
    return None


_NOT_IN_VLLM = ("experts", "gate_up_proj", "kv_b_proj")
"""Targets that no adapter slot takes, in any model."""

_DEFAULTS: dict[str, Any] = {
    "packed": "none",
    "rank_pattern": {},
    "alpha_pattern": {},
    "use_rslora": False,
    "modules_to_save": [],
    "init": "",
}
"""Settings that would silently do nothing without an adapter."""


def matches(pattern: str, name: str) -> bool:
    """Returns whether a pattern names a layer: whole last parts of its name, as PEFT matches."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def _found(patterns: dict[str, Any], name: str, default: Any) -> Any:
    return next((value for key, value in patterns.items() if matches(key, name)), default)
