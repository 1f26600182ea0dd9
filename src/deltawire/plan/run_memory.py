"""Predicts the most memory that each process of a run on one machine's processors holds.

A trainer of one rank that computes in float32 holds, in bytes for each parameter: 4 for the values
that it computes with; 4 for the master of each trained one, 8 for Adam's moments, 4 for gradients;
2 for the publisher's baseline, and 2 for the next version of each trained one. To this come the
activations of ``train.max_tokens_per_batch`` tokens, and a chunk of logits, with the plan's
allowance for fragmentation. Activations are those of the plan for accelerators
(`deltawire.plan.activations`), which counts 2 bytes a value where float32 takes 4. They differ in
two points. A norm keeps no copy of its input in float32, which its input is. Attention over packed
rows (`deltawire.train.packing`) keeps keys and values once for each query head, those of a shared
prompt for each completion, and its result a second time, in the order of the row.

A sampler holds the values, the version's published bits, which the next delta is applied to, and
keys and values of ``slots`` sequences of ``context`` tokens. To this come either the activations of
one layer for all prompts that are read together (a worker's are one for each group, an evaluator's
may all differ), or one layer's keys and values for each query head, which attention makes in a step
of decoding.

Nothing here imports torch. ``deltawire bench train --keys real_memory_error`` compares the
predictions with what processes held.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deltawire.config import RunConfig
from deltawire.config.checkpoints import stores_last_state
from deltawire.plan.activations import layer_activations
from deltawire.plan.architecture import DecoderLayer, Model
from deltawire.plan.layout import TrainingLayout
from deltawire.plan.memory import ALLOWANCE

GIB = 2.0**30
LIBRARIES = 0.46 * GIB
"""Resident memory of a process that has imported torch, transformers and deltawire, and done
nothing: measured with torch's build for processors."""
VALUE, PUBLISHED = 4, 2
"""Bytes of a value that is computed with, and of one that is published."""
WIDER = VALUE / PUBLISHED
"""Bytes of an activation over those of the plan for accelerators."""
LOGITS = 1 << 26
"""`deltawire.train.head.CHUNK_ELEMENTS`; this module must not import torch."""
LOGIT_COPIES = 2
"""Arrays of a chunk's size that the head's passes hold at a time: logits and probabilities."""
SAMPLED_COPIES = 5
"""Arrays of logits that a sampler holds at a time: logits, scaled ones, log-probabilities, noise,
and their difference."""
READ_WIDTHS, READ_HIDDEN = 3, 4
"""Arrays of the feed-forward's width, and of the model's, that a layer holds at a time while a
prompt is read without gradients."""
TOKEN_BYTES = 13
"""Bytes of a token in a stored group: id, log-probability, version, and mask."""
LEAST_ROWS, MOST_ROWS = 256, 4096


@dataclass(frozen=True)
class ProcessMemory:
    """The most that one process holds, in bytes by part; ``count`` processes are alike."""

    process: str
    count: int
    parts: dict[str, float]

    @property
    def total(self) -> float:
        """Bytes of one of them."""
        return sum(self.parts.values())

    @property
    def words(self) -> str:
        """Returns the parts in one line, the largest first."""
        largest = sorted(self.parts.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {size / GIB:.2f}" for name, size in largest if size >= GIB / 100)


@dataclass(frozen=True)
class RunMemory:
    """The memory that a run takes of one machine, and other figures that follow from its sizes."""

    processes: list[ProcessMemory]
    step_tokens: int
    """The most tokens of a step: prompts and answers that fill the context."""
    version_bytes: int
    """Bytes of a version that is stored whole."""
    checkpoint_bytes: int
    kept_checkpoints: int
    proofs: int = 0
    """Intervals that ``retain.proofs`` keeps."""
    interval_bytes: int = 0
    """About the bytes of one: two states, and the tokens of its groups."""

    @property
    def total(self) -> float:
        """Bytes of all processes at their peaks."""
        return sum(one.count * one.total for one in self.processes)

    def lines(self) -> list[str]:
        """Returns one line for each process, and one for each other figure."""
        found = [
            f"{one.count} x {one.process}: {one.total / GIB:.1f} GiB ({one.words})"
            for one in self.processes
        ]
        found.append(f"together: {self.total / GIB:.1f} GiB at their peaks")
        found.append(f"a step: at most {self.step_tokens:,} tokens")
        found.append(f"a whole version: {self.version_bytes / 1e6:,.0f} MB")
        disk = self.checkpoint_bytes * self.kept_checkpoints
        if not self.kept_checkpoints:
            found.append(
                f"no checkpoint is stored ({self.checkpoint_bytes / 1e9:.2f} GB, unless the run is "
                "stopped): continuing or forking the run computes its steps again"
            )
            return found
        found.append(
            f"a checkpoint: {self.checkpoint_bytes / 1e9:.2f} GB on disk, "
            f"{self.kept_checkpoints} are kept: {disk / 1e9:.2f} GB"
        )
        if self.proofs:
            found.append(
                f"{self.proofs} intervals are kept for proofs: about "
                f"{self.proofs * self.interval_bytes / 1e9:.2f} GB, and all versions from the "
                "first of them on"
            )
        return found


def run_memory(model: Model, config: RunConfig) -> RunMemory | None:
    """Predicts a run on processors; None where the formulas do not hold.

    They hold for one rank that computes in float32 and publishes 16 bits a weight, and for embedded
    samplers.
    """
    train, rollout = config.train, config.rollout
    outside = train.ranks > 1 or train.compute != "float32" or bool(train.adapters)
    if outside or train.exporter not in ("bf16", "f16") or rollout.engine != "transformers":
        return None
    if config.device == "cuda" or train.adapter.packed != "none" or config.midtrain is not None:
        return None
    trained = trained_parameters(model, config)
    step_tokens = train.groups_per_step * rollout.group_size * rollout.context
    processes = [trainer_memory(model, config, tokens=train.max_tokens_per_batch)]
    if rollout.workers:
        prompts = -(-rollout.slots // rollout.group_size)
        parts = sampler_parts(model, config, slots=rollout.slots, prompts=prompts)
        processes.append(ProcessMemory("worker", rollout.workers, parts))
    if config.evaluate.every:
        slots = config.evaluate.slots
        parts = sampler_parts(model, config, slots=slots, prompts=slots)
        processes.append(ProcessMemory("evaluator", 1, parts))
    return RunMemory(
        processes=processes,
        step_tokens=step_tokens,
        version_bytes=PUBLISHED * model.parameters,
        checkpoint_bytes=12 * trained,
        kept_checkpoints=_kept_checkpoints(config, 12 * trained),
        proofs=min(config.retain.proofs, -(-train.versions // train.checkpoint_every)),
        interval_bytes=2 * 12 * trained + train.checkpoint_every * step_tokens * TOKEN_BYTES,
    )


def _kept_checkpoints(config: RunConfig, size: int) -> int:
    """Returns how many states of ``size`` bytes a run that completes leaves on disk."""
    versions, every = config.train.versions, config.train.checkpoint_every
    stored = versions // every
    if versions % every and stores_last_state(config, versions, size):
        stored += 1
    return min(stored, config.retain.checkpoints or stored)


def trained_parameters(model: Model, config: RunConfig) -> int:
    """Returns how many values a run trains."""
    if config.train.adapter.kind == "none":
        return model.parameters
    rank = config.train.adapter.rank
    return sum(layer.adapter_parameters(rank, experts=False) for layer in model.layers)


def trainer_memory(model: Model, config: RunConfig, *, tokens: int) -> ProcessMemory:
    """Predicts a trainer whose micro-batches have at most ``tokens`` tokens."""
    train, rollout = config.train, config.rollout
    trained = trained_parameters(model, config)
    frozen = model.parameters if train.adapter.kind != "none" else 0
    tokens = min(tokens, train.groups_per_step * rollout.group_size * rollout.context)
    masters = {
        "weights": VALUE * (frozen + trained),
        "masters": VALUE * trained,
        "optimizer": 2 * VALUE * trained if train.optimizer.kind != "muon" else VALUE * trained,
        "gradients": VALUE * trained,
        "publisher": PUBLISHED * (frozen + trained) + PUBLISHED * trained,
    }
    rows = min(tokens, max(LEAST_ROWS, min(MOST_ROWS, LOGITS // model.vocabulary)))
    head = LOGIT_COPIES * VALUE * rows * model.vocabulary
    if not frozen:
        head += VALUE * model.embedding  # The sum of the head's gradient, next to the parameter's.
    parts = {
        "libraries": LIBRARIES,
        **masters,
        "activations": (1 + ALLOWANCE) * _activations(model, config, tokens),
        "logits": (1 + ALLOWANCE) * head,
    }
    return ProcessMemory("trainer", 1, {name: float(size) for name, size in parts.items()})


def _activations(model: Model, config: RunConfig, tokens: int) -> float:
    """Returns the bytes of all layers' activations at the end of a forward pass."""
    adapter = config.train.adapter
    layout = TrainingLayout(
        mode="full" if adapter.kind == "none" else "lora",
        context=tokens,
        lora_rank=0 if adapter.kind == "none" else adapter.rank,
    )
    kept, largest = 0.0, 0.0
    policy = config.train.activation_checkpointing
    for layer, count in model.kinds:
        found = layer_activations(layer, model.hidden, layout)
        each = {"none": found.saved, "selective": found.kept}.get(policy, found.boundary)
        more = tokens * _more_on_processors(model, layer, config)
        kept += count * (WIDER * each + (more if policy == "none" else 0.0))
        if policy != "none":
            largest = max(largest, WIDER * found.backward + more)
    return kept + largest


def _more_on_processors(model: Model, layer: DecoderLayer, config: RunConfig) -> float:
    """Returns the bytes of a token that a layer keeps in float32 on processors, beyond those of
    the plan for accelerators; negative where it keeps fewer."""
    rollout, shape = config.rollout, layer.attention
    norms = -2 * VALUE * model.hidden * layer.streams
    if shape.kind != "grouped":
        return norms
    group, drawn = rollout.group_size, min(rollout.max_tokens, rollout.context)
    prompt = rollout.context - drawn
    # A prompt is one block of the row, and a prefix of each of its completions.
    copies = (prompt + group * rollout.context) / (prompt + group * drawn)
    repeated = 2 * shape.queries * copies - (shape.keys + shape.values)
    return norms + VALUE * (repeated + shape.queries)


def sampler_parts(model: Model, config: RunConfig, *, slots: int, prompts: int) -> dict[str, float]:
    """Predicts a worker or an evaluator with the embedded engine, which reads ``prompts`` different
    prompts at a time."""
    rollout = config.rollout
    value = VALUE if rollout.precision == "float32" else PUBLISHED
    weights = model.parameters + (
        trained_parameters(model, config) if config.train.adapter.kind != "none" else 0
    )
    cache = sum(layer.attention.keys + layer.attention.values for layer in model.layers)
    queries = max(layer.attention.queries for layer in model.layers)
    read = prompts * max(1, rollout.context - rollout.max_tokens)
    layer = max(
        value * read * (READ_WIDTHS * _width(model) + READ_HIDDEN * model.hidden),
        value * slots * rollout.context * 2 * queries,
    )
    return {
        "libraries": LIBRARIES,
        "weights": float(VALUE * weights),
        "version": float(PUBLISHED * weights),
        "cache": float(value * slots * rollout.context * cache),
        "activations": float(layer),
        "logits": float(SAMPLED_COPIES * VALUE * slots * model.vocabulary),
    }


def _width(model: Model) -> int:
    """Returns the most values of a token that a feed-forward block computes at a time."""
    return max(
        max(one.intermediate, one.chosen * one.expert_intermediate + one.shared_intermediate)
        for one in (layer.feed_forward for layer in model.layers)
    )


def memory_of(config: RunConfig) -> RunMemory | None:
    """Predicts the run of a configuration whose model is a directory; None without one, or for a
    model that the plan does not describe."""
    from deltawire.errors import InputError
    from deltawire.plan.catalogue import find_model

    if not config.model.path:
        return None
    try:
        model, _ = find_model(str(Path(config.model.path)))
    except InputError:
        return None
    return run_memory(model, config)
