"""Estimates the time of a training step from FLOPs and bytes. An estimate, not a measurement.

FLOPs are counted and checked against torch's counter. How much of an accelerator's peak a step
reaches is fitted to published figures or assumed (`Accelerator.utilization`); how much
communication overlaps with compute is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltawire.plan.accelerators import Accelerator
from deltawire.plan.architecture import DecoderLayer, Model
from deltawire.plan.layout import TrainingLayout

LINK_UTILIZATION = 0.7
"""Assumed share of a link's bandwidth that collectives reach."""

COMPRESSED_REACH = 4096
"""Assumed entries that compressed attention (DeepSeek-V4) reads for each token."""


@dataclass(frozen=True)
class StepTime:
    """Estimated seconds of one step with one micro-batch per data rank."""

    compute: float
    communication: float
    host: float
    """Transfers of offloaded state; they overlap with compute."""
    tokens: int
    """Tokens of the step, over all ranks."""

    @property
    def seconds(self) -> float:
        """The slowest of the three, since they overlap."""
        return max(self.compute, self.communication, self.host)

    @property
    def tokens_per_second(self) -> float:
        """Throughput over all ranks."""
        return self.tokens / self.seconds


def forward_flops(model: Model, layout: TrainingLayout) -> float:
    """FLOPs of one forward over one micro-batch of all its ranks.

    A matrix product takes 2 FLOPs per weight and token; only chosen experts count. Causal
    attention takes 2·q (scores) and 2·v (values) FLOPs for each pair of tokens, and half of the
    pairs exist; a full square is counted, as torch's counter and flash kernels' figures do not
    halve it either. A linear attention layer reads and updates its state: 6 FLOPs per value.
    """
    length = layout.context
    tokens = length * layout.sequences
    per_token = 2.0 * model.vocabulary * model.hidden
    for layer, count in model.kinds:
        per_token += count * (2 * _active_matrices(layer) + _attention_flops(layer, length))
    return per_token * tokens


def _attention_flops(layer: DecoderLayer, length: int) -> float:
    """FLOPs per token of attention itself, projections excluded."""
    shape = layer.attention
    if shape.kind == "linear":
        return 6.0 * shape.state
    if shape.kind == "compressed":
        return 4.0 * shape.queries * min(length, COMPRESSED_REACH)
    return 2.0 * (shape.queries + shape.outputs) * length


def _active_matrices(layer: DecoderLayer) -> float:
    """Weights that multiply one token."""
    shape = layer.feed_forward
    total = 0.0
    for matrix in layer.matrices:
        weights = matrix.inputs * matrix.outputs
        total += weights * (shape.chosen if matrix.part == "experts" else matrix.copies)
    return total


def step_flops(model: Model, layout: TrainingLayout) -> float:
    """FLOPs of a whole step of one micro-batch.

    The backward of a product takes one product for its input and one for its weight, which frozen
    weights skip: 3 forwards for full training, 2 for LoRA, 1 for a reference. Full and offloaded
    checkpointing repeat the layers' forward; selective checkpointing repeats no product.
    """
    forward = forward_flops(model, layout)
    if layout.mode == "reference":
        return forward
    passes = 3.0 if layout.mode == "full" else 2.0
    repeated = layout.checkpointing in {"full", "offloaded"}
    return forward * (passes + repeated)


def estimate_step(model: Model, layout: TrainingLayout, accelerator: Accelerator) -> StepTime:
    """Estimates one step.

    Communication per rank: FSDP2 gathers a stage's bf16 parameters once per pass and reduces fp32
    gradients; tensor parallelism reduces two hidden arrays per layer and pass; expert parallelism
    sends each token's copies there and back. A group within a node uses its links. One of several
    nodes uses the network links of all accelerators of a node, and experts those of one. Host:
    offloaded moments cross twice, offloaded masters and gradients once more each, offloaded
    activations twice.
    """
    flops = step_flops(model, layout)
    group = layout.shards * layout.tensor * layout.pipeline
    peak = accelerator.bf16_tflops * 1e12 * accelerator.utilization
    compute = flops * layout.data / group / peak
    passes = 1 if layout.mode == "reference" else 2
    inside = layout.tensor * layout.shards <= accelerator.per_node
    rate = accelerator.link_gb_s if inside else accelerator.spanning_gb_s
    rate *= 1e9 * LINK_UTILIZATION
    link = accelerator.link_gb_s * 1e9 * LINK_UTILIZATION
    experts = model.expert_parameters / layout.expert
    local = (model.parameters - model.expert_parameters + experts) / layout.tensor / layout.pipeline
    trained = local if layout.mode == "full" else 0.0
    moved = 0.0
    if layout.shards > 1:
        share = 1 - 1 / layout.shards
        moved = (2 * passes * local + 4 * trained) * share / rate
    tokens, layers = layout.tokens, len(model.layers) / layout.pipeline
    if layout.tensor > 1:
        moved += 4 * passes * layers * tokens * model.hidden * 2 / link
    if layout.expert > 1:
        chosen = max(layer.feed_forward.chosen for layer, _ in model.kinds)
        spread = layout.expert <= accelerator.per_node
        # Tokens go to ranks of any node, each over its own network link.
        apart = accelerator.network_gb_s * 1e9 * LINK_UTILIZATION
        moved += 4 * passes * layers * tokens * chosen * model.hidden / (link if spread else apart)
    host = 0.0
    values = model.parameters / layout.shards / layout.tensor / layout.pipeline
    if layout.mode == "full" and layout.offload != "none":
        host += values * (16 if layout.offload == "optimizer" else 24)
    if layout.checkpointing == "offloaded" and layout.mode != "reference":
        host += 4 * layers * tokens * model.hidden
    return StepTime(
        compute=compute,
        communication=moved,
        host=host / (accelerator.host_link_gb_s * 1e9 * LINK_UTILIZATION),
        tokens=layout.context * layout.sequences * layout.data * layout.replicate,
    )
