"""Predicts the peak memory of a training step on the most loaded rank, by formula.

A step passes through phases, and the peak is the largest one:

    forward ─► head ─► backward of the last layer … of the first ─► embedding ─► step

Every phase adds up the same parts (`Breakdown`). The formulas follow FSDP2 as torch implements it
(`torch.distributed.fsdp.fully_shard`, one group per layer and one for embedding, final norm and
head, which stays gathered during the step): parameters are gathered in bf16 one layer ahead, and
gradients are reduced in fp32 from a buffer that lives until the next layer's. Nothing here calls a
tracker or torch; `benchmarks.training_memory` measures the same steps to check it.

Units are bytes unless a name says values (numbers of elements).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deltawire.packed_formats import planned_bits
from deltawire.plan.activations import LayerActivations, layer_activations
from deltawire.plan.architecture import DecoderLayer, Model
from deltawire.plan.layout import TrainingLayout, check_layout

MASTER, GRADIENT, COMPUTE = 4, 4, 2
"""Bytes per value of an fp32 master, of a reduced gradient and of a bf16 copy."""
ALLOWANCE = 0.05
"""Share of the memory that comes and goes during a step, added for fragmentation. An assumption:
the caching allocator's waste depends on sizes and order and has no formula."""


@dataclass(frozen=True)
class Breakdown:
    """Bytes on one rank in one phase of a step."""

    phase: str
    parameters: float = 0
    gradients: float = 0
    optimizer: float = 0
    gathered: float = 0
    """Unsharded bf16 parameters of the layer at work and of embedding, norm and head."""
    communication: float = 0
    """All-gather output of the next layer and reduce-scatter input of the previous one."""
    activations: float = 0
    """Kept from forward to backward."""
    workspace: float = 0
    """Recomputed activations, gradients on their way, logits and dequantized weights."""

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(self.parts().values())

    @property
    def transient(self) -> float:
        """Memory that is allocated and freed within a step."""
        return self.gathered + self.communication + self.activations + self.workspace

    @property
    def with_allowance(self) -> float:
        """The sum and an allowance for fragmentation."""
        return self.total + ALLOWANCE * self.transient

    def parts(self) -> dict[str, float]:
        """Bytes by part."""
        return {
            name: getattr(self, name)
            for name in (
                "parameters",
                "gradients",
                "optimizer",
                "gathered",
                "communication",
                "activations",
                "workspace",
            )
        }


@dataclass(frozen=True)
class _LayerBytes:
    """The memory of one layer on one rank, without activations."""

    stored: float
    """Masters or frozen weights, sharded."""
    trained: float
    """Trained values, sharded."""
    gathered: float
    ahead: float
    """Gathered bytes of the group that holds the layer: with expert parallelism, its experts are a
    separate group, gathered and reduced between two layer groups."""
    reduced: float
    """The fp32 reduce-scatter input: trained values of that group, unsharded."""
    moments: float


def optimizer_bytes(values: float, matrices: float, layout: TrainingLayout) -> float:
    """Optimizer state of ``values`` trained values, of which ``matrices`` lie in 2-D weights.

    AdamW keeps two fp32 moments (8 bytes). Muon keeps one momentum (4 bytes) for the matrices of
    layers and leaves the rest to AdamW. Source: torch.optim.AdamW and torch.optim.Muon.
    """
    if layout.optimizer == "muon":
        return 4 * matrices + 8 * (values - matrices)
    return 8 * values


def _layer_bytes(layer: DecoderLayer, layout: TrainingLayout) -> _LayerBytes:
    """Derives a layer's static and communicated bytes.

    Dense matrices are split by tensor parallelism and sharded by FSDP2; norms, routers, and
    attention whose heads the trainer does not divide (`_undivided`) are only sharded. Of an
    adapter's pair, the matrix on the divided side is split.
    Experts are spread over expert-parallel ranks first and sharded over what remains, so a rank
    stores 1/(shards·tensor) of them but gathers 1/(expert·tensor). Frozen weights are kept in
    bf16 (2 bytes) and packed experts in their format's bits; both are gathered as they are.
    """
    split, shards = layout.tensor, layout.shards
    experts = layer.part("experts")
    whole = _undivided(layer)
    dense = sum(matrix.parameters for matrix in layer.matrices) - experts - whole
    if layout.mode == "full":
        values = (dense + experts) / split + whole + layer.others
        local = dense / split + experts / (split * layout.expert) + whole + layer.others
        matrices = ((dense + experts) / split + whole) / shards
        moments = optimizer_bytes(values / shards, matrices, layout)
        stored = (COMPUTE if layout.offload == "all" else MASTER) * values / shards
        group = local - (experts / (split * layout.expert) if layout.expert > 1 else 0)
        return _LayerBytes(
            stored, values / shards, COMPUTE * local, COMPUTE * group, MASTER * group, moments
        )
    width = planned_bits(layout.packing) / 8
    frozen = COMPUTE * (dense / split + whole + layer.others)
    adapters = reduced = 0.0
    if layout.mode == "lora":
        outside = float(layer.adapter_parameters(layout.lora_rank, experts=False))
        inside = layer.adapter_parameters(layout.lora_rank, experts=layout.lora_experts) - outside
        outside *= (1 + 1 / split) / 2
        adapters = outside + inside / split
        reduced = outside + inside / (split * layout.expert)
    stored = (frozen + width * experts / split + MASTER * adapters) / shards
    spread = width * experts / (split * layout.expert)
    return _LayerBytes(
        stored,
        adapters / shards,
        frozen + spread + COMPUTE * reduced,
        frozen + COMPUTE * reduced + (spread if layout.expert == 1 else 0),
        MASTER * reduced,
        optimizer_bytes(adapters / shards, adapters / shards, layout),
    )


def _undivided(layer: DecoderLayer) -> int:
    """Values of matrices that each of the tensor-parallel ranks holds whole: transformers' plans
    divide grouped attention, feed-forward layers and experts, and leave out the rest."""
    attention = layer.part("attention") if layer.attention.kind != "grouped" else 0
    return layer.part("router") + attention


class _PipelineStage:
    """One pipeline stage: its layers and, at the ends, embedding and head."""

    def __init__(self, model: Model, layout: TrainingLayout, index: int) -> None:
        size = -(-len(model.layers) // layout.pipeline)
        self.layout = layout
        self.hidden = model.hidden
        self.layers = model.layers[index * size : (index + 1) * size]
        kinds = {id(layer): layer for layer in self.layers}
        costs = {key: _layer_bytes(layer, layout) for key, layer in kinds.items()}
        acts = {key: layer_activations(layer, model.hidden, layout) for key, layer in kinds.items()}
        self.costs = [costs[id(layer)] for layer in self.layers]
        self.acts = [acts[id(layer)] for layer in self.layers]
        self.first = index == 0
        self.last = index == layout.pipeline - 1
        self.in_flight = layout.pipeline - index
        split = layout.tensor
        table = model.vocabulary * model.hidden / split
        self.head = table if self.last else 0.0
        shared = model.tied and self.first and self.last
        self.root = (table if self.first and not shared else 0.0) + self.head
        self.root += model.outside if self.last else 0
        self.vocabulary = model.vocabulary / split
        self.trains = layout.mode == "full"
        self.root_trained = self.root if self.trains else 0.0
        gradients = sum(cost.trained for cost in self.costs) + self.root_trained / layout.shards
        self.all_gradients = 0.0 if layout.offload == "all" else GRADIENT * gradients

    def kept(self, act: LayerActivations) -> float:
        """Returns the bytes that one layer saves for its backward, by checkpointing policy."""
        policy = self.layout.checkpointing
        if self.layout.mode == "reference" or policy == "offloaded":
            return 0.0
        return {"none": act.saved, "selective": act.kept, "full": act.boundary}[policy]

    def static(self) -> dict[str, float]:
        """Parameters and optimizer state, there all the time, and accumulated gradients."""
        layout, shards = self.layout, self.layout.shards
        width = MASTER if self.trains and layout.offload != "all" else COMPUTE
        parameters = sum(cost.stored for cost in self.costs) + width * self.root / shards
        moments = 0.0
        if layout.offload == "none":
            moments = sum(cost.moments for cost in self.costs)
            moments += optimizer_bytes(self.root_trained / shards, 0, layout)
        return {
            "parameters": parameters,
            "optimizer": moments,
            "gradients": self.all_gradients if layout.accumulate else 0.0,
        }

    def phases(self) -> Iterator[Breakdown]:
        """Every phase of the step on this stage."""
        yield self._forward()
        if self.last:
            yield self._head()
        if self.layout.mode == "reference":
            return
        yield from self._backward()
        yield self._embedding()
        yield self._step()

    def _ahead(self, cost: _LayerBytes) -> float:
        """Returns the all-gather output of a layer; one rank copies without one."""
        return cost.ahead if self.layout.shards > 1 else 0.0

    def _outstanding(self) -> float:
        """Activations of all layers and of the other micro-batches in flight (1F1B)."""
        return self.in_flight * sum(self.kept(act) for act in self.acts)

    def _forward(self) -> Breakdown:
        """Returns the last layer's forward.

        An all-gather keeps its own output and the previous layer's until it is copied into
        parameters, so three copies of a layer exist for a moment, and two while it computes.
        """
        widest = max(range(len(self.costs)), key=lambda i: self.costs[i].gathered)
        cost = self.costs[widest]
        computing = max(act.forward for act in self.acts)
        moment = max(self._ahead(cost), computing)
        return Breakdown(
            "forward",
            **self.static(),
            gathered=COMPUTE * self.root + cost.gathered,
            communication=self._ahead(cost),
            activations=self._outstanding(),
            workspace=moment,
        )

    def _head(self) -> Breakdown:
        """Log-probabilities of the targets and their backward, before any layer's.

        The logits of a chunk exist as fp32 four times during their backward (themselves, the
        softmax that the log-sum-exp's gradient needs, the gathered targets' gradient and the
        sum): 16 bytes per token and vocabulary entry. From the second chunk on the head's bf16
        gradient is held as well, and for a moment there are three: the old, the new and their
        sum. Without a backward there are the bf16 and the fp32 logits.
        The final norm saves 8 bytes per hidden value (6 where it is frozen), and the gradient of
        its output takes 2.
        """
        layout, tokens = self.layout, self.layout.tokens
        chunk = min(layout.chunk or tokens, tokens)
        weights = COMPUTE * self.head if self.trains else 0.0
        if layout.mode == "reference":
            logits, norm = 6 * chunk * self.vocabulary, 2 * self.hidden * tokens
        else:
            waiting = weights if chunk < tokens else 0.0
            made = max(weights + 2 * chunk * self.vocabulary, 2 * waiting) + waiting
            logits = max(16 * chunk * self.vocabulary + waiting, made)
            norm = (10 if self.trains else 8) * self.hidden * tokens
        return Breakdown(
            "head",
            **self.static(),
            gathered=COMPUTE * self.root,
            communication=self._ahead(self.costs[-1]),
            activations=self._outstanding() + norm,
            workspace=logits,
        )

    def _backward(self) -> Iterator[Breakdown]:
        """Each layer's backward, from last to first.

        Alive: the layer's gathered parameters, the next one's all-gather output, the
        reduce-scatter input of the layer before, the head's unreduced bf16 gradient, reduced
        gradients of the layers that are done, activations of those that are not, and the layer's
        own (`LayerActivations.backward`), recomputed or saved.
        """
        static = self.static()
        kept = [self.kept(act) for act in self.acts]
        others = (self.in_flight - 1) * sum(kept)
        waiting = COMPUTE * self.head if self.trains else 0.0
        reduced, done = 0.0, 0.0
        accumulated = static.pop("gradients")
        for index in reversed(range(len(self.layers))):
            cost, act = self.costs[index], self.acts[index]
            plain = self.layout.checkpointing == "none"
            own = 0.0 if plain else act.boundary
            ahead = self._ahead(self.costs[index - 1]) if index else 0.0
            yield Breakdown(
                "backward",
                **static,
                gradients=max(accumulated, done),
                gathered=COMPUTE * self.root + cost.gathered,
                communication=ahead + reduced,
                activations=others + sum(kept[:index]) + own,
                workspace=waiting + (act.backward if plain else max(act.backward, act.recompute)),
            )
            reduced = cost.reduced
            if self.layout.offload != "all":
                done += GRADIENT * cost.trained

    def _embedding(self) -> Breakdown:
        """Returns the embedding's gradient and the reduction of the group outside layers.

        At the end of the backward the bf16 gradients of embedding and head coexist with their
        gathered parameters and the first layer's reduce-scatter input; then the parameters are
        freed and the gradients copied into an fp32 buffer (4 bytes) with an fp32 result (4/shards),
        while the last one's bf16 source still exists.
        """
        values, static = self.root_trained, self.static()
        first = self.costs[0]
        gathered = COMPUTE * self.root + COMPUTE * values + first.reduced
        reducing = MASTER * values + COMPUTE * (self.head or values)
        done = sum(cost.trained for cost in self.costs) * GRADIENT
        if self.layout.offload == "all":
            done = 0.0
        result = MASTER * values / self.layout.shards
        static["gradients"] = max(static["gradients"], done + result)
        if gathered - result > reducing:
            return Breakdown(
                "embedding",
                **{**static, "gradients": max(self.static()["gradients"], done)},
                gathered=COMPUTE * self.root,
                communication=first.reduced,
                workspace=COMPUTE * values + 2 * self.hidden * self.layout.tokens,
            )
        return Breakdown(
            "embedding",
            **static,
            communication=MASTER * values,
            workspace=COMPUTE * (self.head or values),
        )

    def _step(self) -> Breakdown:
        """Returns the optimizer's step: all gradients, and for offloaded moments two layers' worth.

        The fused AdamW updates in place. Muon orthogonalizes one whole matrix at a time: in bf16
        the matrix, its square and a product, 3·2 bytes per value of the largest one.
        """
        static = self.static()
        static["gradients"] = self.all_gradients
        streamed = 0.0
        if self.layout.offload == "optimizer":
            streamed = 2 * max(cost.moments for cost in self.costs)
        whole = 0.0
        if self.layout.optimizer == "muon" and self.layout.mode != "reference":
            matrices = (m for layer in self.layers for m in layer.matrices)
            whole = 6 * max(matrix.inputs * matrix.outputs for matrix in matrices)
        return Breakdown("step", **static, workspace=streamed + whole)


def predict_memory(model: Model, layout: TrainingLayout) -> Breakdown:
    """Returns the phase with the largest peak on the most loaded rank.

    Raises `InputError` for a layout that does not divide the model.

    Example::

        peak = predict_memory(model, TrainingLayout(data=8, context=8192))
        print(peak.phase, peak.total / 2**30, peak.parts())
    """
    return max(all_phases(model, layout), key=lambda phase: phase.total)


def all_phases(model: Model, layout: TrainingLayout) -> list[Breakdown]:
    """Returns every phase of every pipeline stage."""
    check_layout(model, layout)
    size = -(-len(model.layers) // layout.pipeline)
    stages = range(-(-len(model.layers) // size))
    return [phase for index in stages for phase in _PipelineStage(model, layout, index).phases()]


def host_bytes(model: Model, layout: TrainingLayout) -> float:
    """Host memory per rank that a layout needs for what it offloads.

    Offloaded moments: their bytes. Offload of all: fp32 masters, gradients and moments. Offloaded
    activations: one input of every layer for every micro-batch in flight.
    """
    check_layout(model, layout)
    first = _PipelineStage(model, layout, 0)
    values = sum(cost.trained for cost in first.costs) + first.root_trained / layout.shards
    moments = sum(cost.moments for cost in first.costs)
    moments += optimizer_bytes(first.root_trained / layout.shards, 0, layout)
    total = {"none": 0.0, "optimizer": moments, "all": moments + (MASTER + GRADIENT) * values}[
        layout.offload
    ]
    if layout.checkpointing == "offloaded" and layout.mode != "reference":
        total += first.in_flight * sum(act.boundary for act in first.acts)
    return total


def rescoring_bytes(model: Model, layout: TrainingLayout) -> float:
    """Host memory in which rank 0 computes workers' log-probabilities again: a float32 copy of the
    model, and the bf16 bits that it is set from; packed experts twice in their format. A reference
    has no workers. Activations are not counted (`deltawire.rl.evaluate.rescoring.memory_of`)."""
    if layout.mode == "reference":
        return 0.0
    packed = model.expert_parameters if layout.packing != "none" else 0
    dense = (MASTER + COMPUTE) * (model.parameters - packed)
    return dense + 2 * planned_bits(layout.packing) / 8 * packed
