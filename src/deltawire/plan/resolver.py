"""Resolves a training profile: the fastest layout of a model that fits given accelerators.

Candidates differ in tensor, context and expert parallelism, replication, micro-batch,
checkpointing and offload. They are ranked by estimated throughput, and the first one whose
predicted memory fits the device and the host is taken. The result also states what ruled out a
faster layout, and what fewer or more accelerators would give.

Example::

    model, _ = find_model("qwen3-30b-a3b")
    h200 = shipped_accelerators()["h200"]
    profile = resolve_training_profile(
        model, mode="lora", accelerators=Accelerators(h200, 8), context=32768
    )
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deltawire.errors import InputError
from deltawire.plan.accelerators import Accelerator, shipped_accelerators
from deltawire.plan.architecture import Model
from deltawire.plan.catalogue import catalogue
from deltawire.plan.layout import (
    MODES,
    POLICIES,
    Checkpointing,
    Mode,
    Offload,
    Optimizer,
    Packing,
    TrainingLayout,
)
from deltawire.plan.memory import Breakdown, host_bytes, predict_memory, rescoring_bytes
from deltawire.plan.profile import PROFILE_VERSION, Alternative, LayoutData, Profile
from deltawire.plan.references import price_references
from deltawire.plan.step_time import StepTime, estimate_step

EXPERT_IMBALANCE = 1.25
"""Assumed tokens of the most loaded expert rank over the mean, with expert parallelism."""
SIMPLICITY = 1.03
"""A layout must be estimated this much faster for each axis beyond data that it uses."""
MOST_ACCELERATORS = 4096
DEFAULT_CONTEXT = 32768
DEFAULT_RANK = 32
GIB = 2.0**30

SHAPE = re.compile(
    r"(?P<model>[a-z0-9][a-z0-9._-]{0,63})-(?P<mode>full|lora|reference)"
    r"(?:-(?P<context>[1-9][0-9]{0,4})k)?-(?P<count>[1-9][0-9]{0,3})x(?P<kind>[a-z0-9.-]{1,32})"
)
"""A named shape, such as ``qwen3-30b-a3b-lora-8xh200`` or ``qwen3-8b-full-64k-8xh100``."""


@dataclass(frozen=True)
class Accelerators:
    """A number of accelerators of one kind."""

    kind: Accelerator
    count: int


@dataclass(frozen=True, kw_only=True)
class Wish:
    """Requirements on a layout; None leaves the choice to the resolver."""

    mode: Mode
    context: int
    optimizer: Optimizer = "adamw"
    packing: Packing = "none"
    lora_rank: int = DEFAULT_RANK
    lora_experts: bool = False
    checkpointing: Checkpointing | None = None
    offload: Offload | None = None
    startable: bool = False
    """Only layouts that deltawire's trainer can start."""


@dataclass(frozen=True)
class Candidate:
    """A layout with its estimate; memory is predicted on first use."""

    model: Model
    layout: TrainingLayout
    kind: Accelerator
    time: StepTime

    @property
    def rank(self) -> tuple[float, int]:
        """Sorts the fastest first; among equals the simplest."""
        layout = self.layout
        axes = sum(n > 1 for n in (layout.tensor, layout.context_parallel, layout.expert))
        moved = (layout.offload != "none") + (layout.checkpointing == "offloaded")
        return -self.time.tokens_per_second / SIMPLICITY ** (axes + moved), layout.sequences

    @cached_property
    def peak(self) -> Breakdown:
        """The phase with the largest memory, by what it needs with the allowance."""
        return predict_memory(self.model, self.layout)

    @cached_property
    def host(self) -> float:
        """Host bytes per rank."""
        return host_bytes(self.model, self.layout)

    @property
    def hopeless(self) -> bool:
        """Check cheaply if weights, gradients and moments exceed the device or the host.

        Full training keeps 16 bytes per parameter (fp32 master, gradient and two moments), 8 with
        moments on the host and 2 with all of it there.
        """
        layout = self.layout
        if layout.mode != "full":
            return False
        values = self.model.parameters / (layout.shards * layout.tensor * layout.pipeline)
        moments = 8 if layout.optimizer == "adamw" else 4
        device = {"none": 8 + moments, "optimizer": 8, "all": 2}[layout.offload]
        host = {"none": 0, "optimizer": moments, "all": 8 + moments}[layout.offload]
        return values * device > self.kind.usable_bytes or values * host > self.kind.host_bytes

    def obstacle(self) -> str:
        """Says why it does not fit, or returns an empty string."""
        needed, usable = self.peak.with_allowance, self.kind.usable_bytes
        if needed > usable:
            return (
                f"device memory: {needed / GIB:,.1f} GiB needed ({self.peak.phase}), "
                f"{usable / GIB:,.1f} GiB usable"
            )
        if self.host > self.kind.host_bytes:
            return (
                f"host memory: {self.host / GIB:,.1f} GiB needed per accelerator, "
                f"{self.kind.host_bytes / GIB:,.1f} GiB there"
            )
        return ""


def resolve_training_profile(
    model: Model,
    *,
    mode: Mode,
    accelerators: Accelerators,
    context: int,
    optimizer: Optimizer = "adamw",
    packing: Packing = "none",
    lora_rank: int = DEFAULT_RANK,
    lora_experts: bool = False,
    checkpointing: Checkpointing | None = None,
    offload: Offload | None = None,
    startable: bool = False,
    name: str = "",
    alternatives: bool = True,
) -> Profile:
    """Returns the fastest layout that fits, with its bytes and its alternatives; with ``startable``
    among those that deltawire's trainer can start.

    Raises `InputError` if a value is out of range, or nothing fits: with the reason and the
    smallest number of these accelerators, or of other shipped ones, that would suffice.
    """
    wish = Wish(
        mode=mode,
        context=context,
        optimizer=optimizer,
        packing=packing,
        lora_rank=lora_rank if mode == "lora" else 0,
        lora_experts=lora_experts and mode == "lora",
        checkpointing=checkpointing,
        offload=offload,
        startable=startable,
    )
    _check(model, wish, accelerators)
    best, other = best_layout(model, wish, accelerators)
    if best is None:
        raise _nothing_fits(model, wish, accelerators, other)
    cheaper = faster = None
    if alternatives:
        cheaper = _cheaper(model, wish, accelerators)
        faster = _faster(model, wish, accelerators, best)
    return Profile(
        version=PROFILE_VERSION,
        name=name or shape_name(model.name, mode, context, accelerators),
        model=model.name,
        mode=mode,
        parameters=model.parameters,
        trained_parameters=_trained(model, wish),
        architecture=model.fingerprint,
        accelerator=accelerators.kind.name,
        device=accelerators.kind.device,
        accelerators=accelerators.count,
        layout=_data(best.layout),
        peak_phase=best.peak.phase,
        bytes_per_rank={part: round(size) for part, size in best.peak.parts().items()},
        peak_bytes=round(best.peak.total),
        peak_with_allowance=round(best.peak.with_allowance),
        usable_bytes=round(accelerators.kind.usable_bytes),
        host_bytes_per_rank=round(best.host),
        rescoring_host_bytes=round(rescoring_bytes(model, best.layout)),
        binding=_binding(best, other),
        estimated_seconds_per_step=round(best.time.seconds, 4),
        estimated_tokens_per_second=round(best.time.tokens_per_second, 1),
        cheaper=cheaper,
        faster=faster,
        references=price_references(
            model, best.layout, accelerators.kind, _reference_process(model, wish, accelerators)
        ),
        unsupported=unsupported_parts(best.layout),
    )


def resolve_startable_first(model: Model, **wish: Any) -> Profile:
    """Returns the fastest layout that the trainer can start, or where none fits the fastest one of
    all, whose profile says what the trainer lacks. Arguments and errors are those of
    `resolve_training_profile`.
    """
    with suppress(InputError):  # Other errors than of layouts come again.
        return resolve_training_profile(model, startable=True, **wish)
    return resolve_training_profile(model, startable=False, **wish)


def resolve_shape(name: str) -> Profile:
    """Resolves a named shape such as ``qwen3-30b-a3b-lora-8xh200``, by `resolve_startable_first`.

    Experts are packed as the published checkpoint packs them. Raises `InputError` for a name of
    another form, an unknown model or accelerator, and a shape that does not fit.
    """
    match = SHAPE.fullmatch(name.lower())
    kinds = shipped_accelerators()
    if match is None or match["kind"] not in kinds:
        raise InputError(
            f"{name!r} names no training shape",
            hint="write MODEL-full|lora|reference[-CONTEXTk]-NxACCELERATOR, such as "
            "qwen3-30b-a3b-lora-8xh200; deltawire shapes lists models and accelerators",
        )
    known = catalogue()
    packing: Packing = "none"
    if (entry := known.get(match["model"])) is None:
        raise InputError(
            f"shape {name!r}: no model of the catalogue is called {match['model']!r}",
            hint=f"it has {', '.join(sorted(known))}",
        )
    model = entry.describe()
    if match["mode"] != "full":
        packing = entry.native_packing
    context = int(match["context"]) * 1024 if match["context"] else default_context(model)
    (mode,) = (mode for mode in MODES if mode == match["mode"])
    return resolve_startable_first(
        model,
        mode=mode,
        accelerators=Accelerators(kinds[match["kind"]], int(match["count"])),
        context=context,
        packing=packing,
    )


def default_context(model: Model) -> int:
    """Returns the context to plan for when none is requested."""
    return min(model.context or DEFAULT_CONTEXT, DEFAULT_CONTEXT)


def best_layout(
    model: Model, wish: Wish, accelerators: Accelerators
) -> tuple[Candidate | None, Candidate]:
    """Returns the fastest candidate that fits, and the fastest one regardless of memory.

    If none fits, the second is the one that takes the least device memory instead. Raises
    `InputError` if the accelerators divide no layout.
    """
    least = _least(model, wish, accelerators)
    if least is None:
        startable = " that the trainer can start" if wish.startable else ""
        raise InputError(
            f"{accelerators.count} accelerators divide no layout of {model.name}{startable}",
            hint="use another number, such as a power of two",
        )
    # Times of all candidates are estimated only if one of them can fit.
    if least.peak.with_allowance > accelerators.kind.usable_bytes:
        return None, least
    ordered = sorted(_candidates(model, wish, accelerators), key=lambda candidate: candidate.rank)
    missed = ordered[0]
    for candidate in ordered:
        if not candidate.hopeless and not candidate.obstacle():
            return candidate, missed
    return None, least


def shape_name(model: str, mode: Mode, context: int, accelerators: Accelerators) -> str:
    """Returns the name of a shape."""
    length = f"-{context // 1024}k" if context % 1024 == 0 else f"-{context}t"
    return f"{model}-{mode}{length}-{accelerators.count}x{accelerators.kind.name}"


def smallest_count(model: Model, wish: Wish, kind: Accelerator) -> int | None:
    """Returns the smallest power of two of accelerators that fits, or None up to the limit."""
    for count in _powers(MOST_ACCELERATORS):
        with suppress(InputError):  # They divide no layout of this kind.
            if best_layout(model, wish, Accelerators(kind, count))[0] is not None:
                return count
    return None


def unsupported_parts(layout: TrainingLayout) -> list[str]:
    """Name the parts of a layout that deltawire's trainer, or its reference process, lacks so
    far."""
    named = [
        f"{axis.replace('_', ' ')} {getattr(layout, axis)}"
        for axis in ("pipeline", "context_parallel")
        if getattr(layout, axis) > 1
    ]
    if layout.offload == "all":
        named.append("offload all")
    if layout.packing != "none" and layout.mode != "lora":
        named.append(f"packing {layout.packing}")
    if layout.lora_experts:
        named.append("LoRA on experts")
    return named


def _reference_process(
    model: Model, wish: Wish, accelerators: Accelerators
) -> TrainingLayout | None:
    """Returns the layout of the smallest reference process, None if none fits."""
    if wish.mode == "reference":
        return None
    own = Wish(
        mode="reference", context=wish.context, packing=wish.packing, lora_rank=0,
        startable=wish.startable,
    )  # fmt: skip
    count = smallest_count(model, own, accelerators.kind)
    if count is None:
        return None
    best, _ = best_layout(model, own, Accelerators(accelerators.kind, count))
    return best.layout if best else None


def _check(model: Model, wish: Wish, accelerators: Accelerators) -> None:
    if not 1 <= accelerators.count <= MOST_ACCELERATORS:
        raise InputError(f"{accelerators.count} accelerators; plan for 1 to {MOST_ACCELERATORS}")
    if not 1 <= wish.context <= 1 << 24:
        raise InputError(f"a context of {wish.context} tokens; plan for 1 to {1 << 24}")
    if model.context and wish.context > model.context:
        raise InputError(
            f"{model.name} has a context of {model.context} tokens, not {wish.context}",
            hint="pass a smaller --context",
        )
    if wish.mode == "lora" and not 1 <= wish.lora_rank <= 4096:
        raise InputError(f"a LoRA rank of {wish.lora_rank}; use 1 to 4096")
    if wish.offload not in {None, "none"} and wish.mode != "full":
        raise InputError(f"offload is for full training: mode {wish.mode} has no large state")
    if wish.checkpointing not in {None, "none"} and wish.mode == "reference":
        raise InputError("a reference runs forward only: there is nothing to checkpoint")
    if wish.packing != "none" and wish.mode == "full":
        raise InputError("packing is for frozen experts: full training has none")
    if wish.packing != "none" and not model.expert_parameters:
        raise InputError(f"{model.name} has no experts to pack")


def _powers(limit: int) -> Iterator[int]:
    value = 1
    while value <= limit:
        yield value
        value *= 2


def _layouts(model: Model, wish: Wish, accelerators: Accelerators) -> Iterator[TrainingLayout]:
    """Yields every layout that divides the model and the accelerators."""
    if wish.mode == "reference":
        policies: tuple[Checkpointing, ...] = ("none",)
        offloads: tuple[Offload, ...] = ("none",)
    else:
        policies = (wish.checkpointing,) if wish.checkpointing else POLICIES
        offloads = ("none", "optimizer", "all") if wish.mode == "full" else ("none",)
        if wish.offload:
            offloads = (wish.offload,)
    for axes in _axes(model, wish, accelerators):
        for policy, offload, sequences in itertools.product(policies, offloads, (1, 4)):
            layout = dataclasses.replace(
                axes, checkpointing=policy, offload=offload, sequences=sequences
            )
            if not (wish.startable and unsupported_parts(layout)):
                yield layout


def _axes(model: Model, wish: Wish, accelerators: Accelerators) -> Iterator[TrainingLayout]:
    """Yields layouts that differ in their axes only."""
    count, node = accelerators.count, accelerators.kind.per_node
    heads = [layer.attention.heads for layer, _ in model.kinds]
    heads += [layer.attention.key_value_heads for layer, _ in model.kinds]
    experts = [layer.feed_forward.experts for layer, _ in model.kinds if layer.feed_forward.experts]
    basis = TrainingLayout(
        mode=wish.mode,
        context=wish.context,
        optimizer=wish.optimizer,
        packing=wish.packing,
        lora_rank=wish.lora_rank,
        lora_experts=wish.lora_experts,
        accumulate=wish.mode != "reference",
    )
    choices = itertools.product(
        _powers(min(8, node, count)),
        _powers(min(8, count)),
        sorted({1, max(1, count // node)}),
        _powers(64 if experts else 1),
    )
    for tensor, context, replicate, expert in choices:
        if count % (tensor * context * replicate) or wish.context % context:
            continue
        shards = count // tensor // replicate
        if shards % expert or any(number % tensor for number in heads):
            continue
        if any(number % expert for number in experts):
            continue
        yield dataclasses.replace(
            basis,
            data=shards // context,
            replicate=replicate,
            tensor=tensor,
            context_parallel=context,
            expert=expert,
            imbalance=EXPERT_IMBALANCE if expert > 1 else 1.0,
        )


def _candidates(model: Model, wish: Wish, accelerators: Accelerators) -> Iterator[Candidate]:
    for layout in _layouts(model, wish, accelerators):
        yield Candidate(
            model, layout, accelerators.kind, estimate_step(model, layout, accelerators.kind)
        )


def _least(model: Model, wish: Wish, accelerators: Accelerators) -> Candidate | None:
    """Returns the candidate that takes the least device memory, None if there is no layout.

    More checkpointing, offload and sharding and a smaller micro-batch never take more, so only
    layouts with the most of them are compared.
    """
    most: Offload = "optimizer" if wish.startable else "all"
    frugal = dataclasses.replace(
        wish,
        checkpointing=wish.checkpointing or "offloaded",
        offload=wish.offload or (most if wish.mode == "full" else "none"),
    )
    candidates = (
        Candidate(model, layout, accelerators.kind, _NO_TIME)
        for layout in _layouts(model, frugal, accelerators)
        if layout.sequences == 1 and layout.replicate == 1
    )
    return min(candidates, key=lambda candidate: candidate.peak.with_allowance, default=None)


_NO_TIME = StepTime(compute=1, communication=0, host=0, tokens=1)


def _nothing_fits(
    model: Model, wish: Wish, accelerators: Accelerators, least: Candidate
) -> InputError:
    """Makes the error for a model that does not fit, with the smallest hardware that would
    suffice.
    """
    options = []
    kinds = {accelerators.kind.name: accelerators.kind, **shipped_accelerators()}
    for kind in kinds.values():
        if kind.device == "cpu" and kind is not accelerators.kind:
            continue
        count = smallest_count(model, wish, kind)
        if count is not None:
            options.append(f"{count} x {kind.name}")
    return InputError(
        f"{model.name} {wish.mode} at {wish.context} tokens does not fit "
        f"{accelerators.count} x {accelerators.kind.name}: {least.obstacle()}, even with the "
        f"layout that takes the least device memory",
        hint=f"smallest that would suffice: {', '.join(options) or 'none of those known'}",
    )


def _binding(best: Candidate, fastest: Candidate) -> str:
    """Says what keeps the layout from being faster."""
    if best is not fastest:
        return f"{fastest.obstacle()} for the faster layout {summarize(fastest.layout)}"
    time = best.time
    if time.seconds == time.compute:
        return "compute: no layout on these accelerators is estimated to be faster"
    kind = "communication" if time.seconds == time.communication else "transfers to the host"
    return f"{kind}: no layout on these accelerators is estimated to be faster"


def _cheaper(model: Model, wish: Wish, accelerators: Accelerators) -> Alternative:
    """Describes the next smaller number of accelerators."""
    count = accelerators.count // 2
    if count < 1:
        return Alternative(accelerators=0, note="one accelerator is the minimum")
    try:
        best, least = best_layout(model, wish, Accelerators(accelerators.kind, count))
    except InputError as none:
        return Alternative(accelerators=count, note=none.message)
    if best is None:
        return Alternative(accelerators=count, note=f"does not fit: {least.obstacle()}")
    return _alternative(best, count)


def _faster(model: Model, wish: Wish, accelerators: Accelerators, now: Candidate) -> Alternative:
    """Describes the next larger number of accelerators."""
    count = accelerators.count * 2
    if count > MOST_ACCELERATORS:
        return Alternative(accelerators=count, note="more accelerators than the plan supports")
    try:
        best, _ = best_layout(model, wish, Accelerators(accelerators.kind, count))
    except InputError as none:
        return Alternative(accelerators=count, note=none.message)
    if best is None or best.time.tokens_per_second <= now.time.tokens_per_second:
        return Alternative(accelerators=count, note="not estimated to be faster")
    return _alternative(best, count)


def _alternative(candidate: Candidate, count: int) -> Alternative:
    return Alternative(
        accelerators=count,
        note=summarize(candidate.layout),
        layout=_data(candidate.layout),
        peak_with_allowance=round(candidate.peak.with_allowance),
        estimated_tokens_per_second=round(candidate.time.tokens_per_second, 1),
    )


def _trained(model: Model, wish: Wish) -> int:
    if wish.mode == "reference":
        return 0
    if wish.mode == "full":
        return model.parameters
    return sum(
        count * layer.adapter_parameters(wish.lora_rank, experts=wish.lora_experts)
        for layer, count in model.kinds
    )


def _data(layout: TrainingLayout) -> LayoutData:
    fields = dataclasses.asdict(layout)
    del fields["mode"]
    return LayoutData(**fields)


def summarize(layout: TrainingLayout) -> str:
    """Describes a layout in a few words."""
    words = [f"data {layout.data}"]
    axes = ("replicate", "tensor", "expert", "pipeline", "context_parallel")
    words.extend(
        f"{axis.replace('_', ' ')} {size}" for axis in axes if (size := getattr(layout, axis)) > 1
    )
    words.append(f"{layout.sequences} x {layout.context} tokens")
    if layout.mode != "reference":
        words.append(f"checkpointing {layout.checkpointing}")
    if layout.offload != "none":
        words.append(f"offload {layout.offload}")
    if layout.packing != "none":
        words.append(f"packing {layout.packing}")
    return ", ".join(words)
