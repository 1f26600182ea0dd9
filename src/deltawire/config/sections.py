"""Defines the sections of a run's configuration: one struct per table, with defaults and limits."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from msgspec import Meta

from deltawire.config.adapters import (
    AdapterConfig,
    AdapterLineConfig,
    LineConfig,
    adapters_contradiction,
)
from deltawire.config.allocation import AllocationConfig
from deltawire.config.base import Count, ExporterName, Fraction, OwnDevice, Positive, Section
from deltawire.config.budget import BudgetConfig
from deltawire.config.fleet import TrustConfig, WorkersConfig
from deltawire.config.layout import layout_contradiction
from deltawire.config.live import LiveConfig
from deltawire.config.losses import LossConfig
from deltawire.config.optimization import OptimizerConfig, ScheduleConfig
from deltawire.config.reference import ReferenceConfig
from deltawire.config.retention import RetainConfig
from deltawire.config.reuse import ReuseConfig
from deltawire.config.scaffold import Scaffold
from deltawire.config.staleness import StalenessConfig
from deltawire.config.tasks import ChatConfig, EvaluateConfig, MidtrainConfig, TaskConfig
from deltawire.config.thinking import ThinkingConfig

OnFull = Literal["end", "drop", "summary"]
Device = Annotated[str, Meta(pattern=r"^(auto|cpu|mps|cuda(:[0-9]{1,3})?)\Z")]
Ranks = Annotated[int, Meta(ge=1, le=65536)]

MOST_GROUPS = 8192
"""Groups of a step: a version's manifest names each, in at most 1 MiB, and this many fit with the
longest names of workers."""


class BuildConfig(Section, frozen=True, kw_only=True):
    """An architecture to build with random weights and a byte tokenizer.

    Example::

        [model.build]
        family = "qwen3_moe"
        hidden_size = 256
        experts = 32
        experts_per_token = 4
    """

    family: Literal["qwen3", "qwen3_moe"] = "qwen3"
    hidden_size: Count = 160
    layers: Count = 4
    head_size: Count = 32
    feed_forward_size: Count = 480
    """The hidden width of each expert in a mixture of experts."""
    experts: Count = 16
    """Experts of a layer; this and the next key are for ``qwen3_moe`` only."""
    experts_per_token: Count = 2
    vocabulary: Annotated[int, Meta(ge=264, le=1_000_000)] = 264
    """Rows of the embedding; those after the 256 bytes and the two special tokens stay unused."""
    context: Count = 512

    def architecture(self) -> dict[str, Any]:
        """Returns the fields of a config.json that these sizes give, by transformers' names."""
        heads = self.hidden_size // self.head_size
        fields: dict[str, Any] = {
            "model_type": self.family,
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.feed_forward_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": self.head_size,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": True,
        }
        if self.family == "qwen3_moe":
            fields |= {
                "moe_intermediate_size": self.feed_forward_size,
                "num_experts": self.experts,
                "num_experts_per_tok": self.experts_per_token,
            }
        return fields


class ModelConfig(Section, frozen=True, kw_only=True):
    """The source of version 0: a Hugging Face directory, or an architecture to build.

    Example::

        [model]
        path = "models/qwen3-0.6b"
    """

    path: str = ""
    build: BuildConfig | None = None


class WarmStartConfig(Section, frozen=True, kw_only=True):
    """Supervised steps on the task's question and answer pairs, before version 0.

    Example::

        [warm_start]
        max_steps = 400
        stop_at_accuracy = 0.3
    """

    max_steps: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    stop_at_accuracy: Fraction = 1.0
    """Stop once greedy accuracy on separate validation problems reaches this."""
    check_every: Count = 25
    learning_rate: Positive = 2e-3
    batch: Count = 48


class RolloutConfig(Section, frozen=True, kw_only=True):
    """Rollout workers: how many ``deltawire run`` starts, and how each samples.

    Example::

        [rollout]
        workers = 4
        group_size = 16
        max_tokens = 512
        context = 1024
    """

    workers: Annotated[int, Meta(ge=0, le=1024)] = 2
    engine: Annotated[str, Meta(pattern=r"^[a-z0-9_]{1,64}\Z")] = "transformers"
    """The engine that a worker samples from, a name of `deltawire.engines.registry`: the embedded
    engine, or a vLLM or SGLang server that the worker starts."""
    group_size: Annotated[int, Meta(ge=2, le=4096)] = 8
    max_tokens: Count = 16
    max_turns: Count = 1
    scaffold: Scaffold = "plain"
    """``plain``, ``plan_then_solve``, ``check_and_retry``, or ``module:function`` of a module that
    this machine trusts (`deltawire.envs.scaffold`)."""
    max_steps: Count = 50
    """The most turns of an episode with a scaffold."""
    temperature: Positive = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Draw from the fewest tokens that make up this share of the probability. Log-probabilities
    stay those of the full softmax at the temperature, with this and the next two keys."""
    top_k: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    """Draw from the k likeliest tokens; 0 is all."""
    min_p: Fraction = 0.0
    """Draw only tokens of at least this share of the likeliest one's probability."""
    slots: Count = 64
    """The most sequences that one worker decodes at a time; memory may allow fewer."""
    context: Count = 256
    """The most tokens of one sequence, prompt included."""
    concurrent: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Episodes that one worker runs at a time; 0 is one for each slot. More of them keep the slots
    busy while environments work."""
    on_full: OnFull = "end"
    """Once an episode's context is full: end the episode, drop its oldest turns, or replace them
    with a summary that the model writes."""
    summary_tokens: Count = 256
    summary_prompt: Annotated[str, Meta(min_length=1, max_length=10_000)] = (
        "Summarize what was done and found so far; only this will be kept."
    )
    step_limit_s: Positive = 120.0
    """Seconds that one call of an environment may take."""
    episode_limit_s: Positive = 7200.0
    max_characters: Count = 20_000
    """The longest message of an environment that the model reads, in characters; the rest is
    cut.
    """
    on_failure: Literal["drop", "stop"] = "drop"
    """Once an episode fails for a reason other than the model: leave it out and count it, or stop
    the run."""
    max_failed: Fraction = 0.5
    """Stop the run in any case once more than this share of the last 64 or more episodes failed."""
    weights: Annotated[str, Meta(pattern=r"^[a-z0-9_-]{0,64}\Z")] = ""
    """The exporter of the weights that workers and the evaluator serve, if not the run's."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """The precision of the engine; ``train.compute`` is the trainer's."""
    device: OwnDevice = ""
    """The workers' device, if not the run's."""
    thinking: ThinkingConfig | None = None
    """Bounds how long the model thinks before it answers; without it, only max_tokens does."""
    allocation: AllocationConfig = AllocationConfig()
    reuse: ReuseConfig = ReuseConfig()
    """Episodes of a group that share finished turns."""

    def contradiction(self) -> tuple[str, str] | None:
        """Finds settings that contradict each other: the reason and what to do, or None."""
        if found := self.allocation.contradiction(self.group_size):
            return found
        if self.thinking is None:
            return None
        return self.thinking.contradiction(self.max_tokens, self.context)


class TrainConfig(Section, frozen=True, kw_only=True):
    """The trainer: the number of versions, the optimizer, and how far off-policy it trains.

    Example::

        [train]
        versions = 500
        groups_per_step = 32
        minibatches = 4
        activation_checkpointing = "full"
    """

    versions: Count = 100
    groups_per_step: Count = 16
    max_staleness: Annotated[int, Meta(ge=0, le=1024)] = 2
    """Groups older than this many versions are not trained on; 0 alternates strictly between
    sampling and training.
    """
    offload: Literal["none", "optimizer"] = "none"
    """``optimizer`` keeps the optimizer's states in host memory and streams them to the device
    layer by layer; the bits are the same."""
    publisher_offload: Literal["none", "disk"] = "none"
    """``disk`` keeps the publisher's copies in ``snapshot_dir`` of the machine's policy."""
    max_tokens_per_batch: Count = 16_384
    """Tokens of one forward and backward pass, prompts and padding included; a step takes as many
    passes as it needs. A longer episode gets a separate pass.
    """
    packing: Literal["auto", "off"] = "auto"
    """``auto`` packs trajectories into one row without padding if the model's attention allows it;
    ``off`` pads."""
    fp32_head: bool = False
    """Compute the head's product in float32 even if the model computes in bf16."""
    activation_checkpointing: Literal["none", "selective", "full", "offloaded"] = "none"
    """Layers whose activations are computed again in the backward pass instead of kept: ``full``
    keeps each layer's input, ``selective`` also the results of products and attention,
    ``offloaded`` the inputs in host memory. The bits are the same."""
    minibatches: Count = 1
    """Optimizer steps of a version, each on an equal share of its groups. With several, ``old`` is
    the policy before the first of them."""
    exporter: ExporterName = "bf16"
    """The exporter of the model's weights, by its name in `deltawire.config.exporters`."""
    masters: Literal["dithered", "published"] = "dithered"
    """Where float32 masters start: ``dithered``, at random in the interval that rounds to the
    published 16 bits, so that small updates reach the published weights from the first step on; or
    ``published``, at the published values."""
    also_publish: list[ExporterName] = []
    """Exporters that quantize, by which each version is published too, in a line for each."""
    anchor_every: Count = 50
    compaction: bool = False
    """Also make compacted deltas over longer strides, for readers that lag far behind the trainer.
    This takes a core and a model's memory, and helps if few weights change in a step."""
    checkpoint_every: Count = 20
    final_checkpoint: Literal["auto", "always", "never"] = "auto"
    """Store the trainer's state when the run completes. With ``auto`` a run of fewer than
    ``checkpoint_every`` versions stores none of more than 256 MiB: a run that continues, or a fork,
    computes those steps again, as after a crash. A stopped run always stores one."""
    dropout: bool = False
    """Train with the model's dropout. Without it the trainer computes the policy that samples; the
    reference of a KL penalty never uses dropout."""
    max_failed_groups: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Stop the run once this many groups in a row had fewer than two episodes that did not fail; 0
    never stops."""
    device: OwnDevice = ""
    """The trainer's device, if not the run's."""
    adapter: AdapterConfig = AdapterConfig()
    adapters: list[AdapterLineConfig] = []
    """Several adapters over one base, each with its own versions and tasks."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """The precision of forward and backward passes. Both compute with the published weights; the
    masters, their gradients and the optimizer are float32 in either case."""
    ranks: Ranks = 1
    """The number of processes that weights are sharded over. ``deltawire run`` starts that many on
    this machine; under ``torchrun`` the number that torchrun starts counts."""
    replicate: Ranks = 1
    """Copies of the sharded weights (hybrid sharding); each is spread over ranks / replicate
    ranks.
    """
    tensor_parallel: Ranks = 1
    """Ranks that compute one micro-batch together: each layer's heads and columns, the vocabulary,
    and whole experts are divided over them."""
    expert_parallel: Ranks = 1
    """The number of ranks that the experts of a layer are divided over. These are ranks that
    compute different micro-batches, and exchange tokens.
    """
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loss: LossConfig = LossConfig()
    staleness: StalenessConfig = StalenessConfig()

    @property
    def base_adapter(self) -> AdapterConfig:
        """Return the adapter of the model that a run publishes; of several, only the packing."""
        if not self.adapters or self.adapters[0].packed == "none":
            return self.adapter
        first = self.adapters[0]
        return AdapterConfig(kind="lora", targets=[], packed=first.packed)

    @property
    def served_adapter(self) -> AdapterConfig:
        """Return the adapter of models that read published versions: none where it is merged."""
        if self.exporter != "merged" or self.adapter.kind == "none":
            return self.adapter
        return AdapterConfig(
            kind="none" if self.adapter.packed == "none" else "lora",
            targets=[],
            packed=self.adapter.packed,
            packed_layers=self.adapter.packed_layers,
        )

    @property
    def largest_age(self) -> int:
        """Return the largest age of any group that is trained on, by the staleness policy."""
        match self.staleness.policy:
            case "strict":
                return self.max_staleness
            case "windowed_fifo":
                limit = (self.max_staleness + 1) * self.groups_per_step
                window = max(1, int(self.staleness.window * limit))
                return self.max_staleness + -(-(window - 1) // self.groups_per_step)
            case "requeue":
                return self.staleness.requeue_age or 4 * self.max_staleness

    def layout_contradiction(self, ranks: int) -> tuple[str, str] | None:
        """Finds a contradiction between a number of ranks and the axes: the reason and what to do,
        or None.
        """
        return layout_contradiction(
            ranks,
            replicate=self.replicate,
            tensor_parallel=self.tensor_parallel,
            expert_parallel=self.expert_parallel,
        )

    def contradiction(self) -> tuple[str, str] | None:
        """Finds a contradiction between staleness and loss: the reason and what to do, or None."""
        if self.groups_per_step > MOST_GROUPS:
            room = f"a version's manifest names its groups, and has room for {MOST_GROUPS:,} groups"
            reason = f"{room}: groups_per_step is {self.groups_per_step:,}"
            return reason, "lower groups_per_step, or raise rollout.group_size"
        if self.minibatches > self.groups_per_step:
            return (
                f"{self.groups_per_step} groups cannot fill {self.minibatches} minibatches",
                "lower minibatches, or raise groups_per_step",
            )
        policy = self.staleness.policy
        if policy != "strict" and self.max_staleness == 0:
            reason = f"{policy} lets groups be older than max_staleness = 0"
            return reason, 'set staleness.policy = "strict", or raise max_staleness'
        if policy == "requeue":
            if self.largest_age <= self.max_staleness:
                return "requeue_age is not above max_staleness", "set it to 0 for a default"
            if self.loss.ratio_base == "rollout" or not self.loss.corrections:
                reason = "requeue trains on groups too old for a ratio to their own sampler"
                ways = ['set loss.ratio_base = "old"'] if self.loss.ratio_base != "old" else []
                if not self.loss.corrections:
                    ways.append("add a [[train.loss.corrections]]")
                return reason, " and ".join(ways)
        if self.adapter.dropout and not self.dropout:
            return "adapter.dropout has no effect without dropout", "set train.dropout = true"
        merged = self.exporter == "merged"
        if found := adapters_contradiction(self.adapter, self.adapters, merged=merged):
            return found
        if found := self.layout_contradiction(self.ranks):
            return found
        for number, group in enumerate(self.optimizer.groups):
            try:
                re.compile(group.names)
            except re.error as error:
                return (
                    f"optimizer.groups[{number}]: names is not a regular expression: {error}",
                    "escape characters that should match literally",
                )
        return self.schedule.contradiction() or self.loss.contradiction(self.largest_age)


NO_LIMIT = 1e9
Limit = Annotated[float, Meta(ge=0, le=NO_LIMIT)]


class ParityLimits(Section, frozen=True, kw_only=True):
    """Thresholds of the divergence between sampler and trainer; a default never triggers.

    The first six apply to tokens that the trained version itself drew, after a prefix that it drew:
    any difference there is arithmetic. Those that begin with ``drift`` apply to all tokens of the
    batch, and include the change of the policy since the sampler's version. Units are nats a token,
    or shares from 0 to 1; `deltawire.parity.divergence` has the formulas.

    Example::

        [parity.stop]
        k3 = 0.1
    """

    k3: Limit = NO_LIMIT
    k3_swapped: Limit = NO_LIMIT
    mean_gap: Limit = NO_LIMIT
    largest_gap: Limit = NO_LIMIT
    extreme_share: Fraction = 1.0
    flipped_share: Fraction = 1.0
    """The share of expert choices that differ, in the worst layer."""
    drift_k3: Limit = NO_LIMIT
    drift_largest_gap: Limit = NO_LIMIT
    drift_extreme_share: Fraction = 1.0
    drift_effective_share: Fraction = 0.0
    """The effective sample size as a share; a lower bound, unlike the others."""


class WarnLimits(ParityLimits, frozen=True, kw_only=True):
    """The same thresholds with defaults that suit most runs.

    Example::

        [parity.warn]
        k3 = 0.01
    """

    k3: Limit = 1e-3
    drift_extreme_share: Fraction = 0.1
    drift_effective_share: Fraction = 0.3


class MaskLimits(ParityLimits, frozen=True, kw_only=True):
    """The same thresholds for one sequence, with defaults far beyond any honest difference: 10 nats
    are a factor of 22,000 in the probability of one token."""

    drift_k3: Limit = 100.0
    drift_largest_gap: Limit = 10.0


class ParityConfig(Section, frozen=True, kw_only=True):
    """Actions on a divergence between sampler and trainer, and the handling of expert choices.

    ``warn`` and ``stop`` apply to a batch, ``mask`` removes single sequences from the loss. A batch
    that stops the run is not trained on.

    Example::

        [parity]
        routes = "replay"

        [parity.stop]
        k3 = 0.1
    """

    warn: WarnLimits = WarnLimits()
    mask: MaskLimits = MaskLimits()
    stop: ParityLimits = ParityLimits()
    extreme_ratio: Annotated[float, Meta(ge=1, le=1e9)] = 2.0
    min_tokens: Count = 32
    """A batch's means are compared from this many tokens on; its largest gaps always are."""
    recheck_share: Annotated[float, Meta(ge=0, le=1)] = 0.02
    """If the trainer is so slow that no batch holds tokens of the trained version, it periodically
    keeps a copy of one version and compares it with tokens that this version drew, in a thread that
    runs for at most this share of the time; 0 never does. It costs one copy of the trained weights.
    """
    routes: Literal["off", "record", "replay"] = "off"
    """For models with experts: ``record`` sends each token's expert choices to the trainer, which
    compares them with its own; ``replay`` also trains with them."""
    plausible: Fraction = 0.0
    """Replay a recorded expert only if the trainer's score of it is at least this share of the
    weakest score among its own choices; 0 replays all of them."""


class FaultsConfig(Section, frozen=True, kw_only=True):
    """Limits after which a supervisor replaces a process
    (`deltawire.runtime.supervisor` derives the bounds).

    Example::

        [faults]
        silence_s = 60.0
        long_s = 1800.0
    """

    silence_s: Positive = 30.0
    """Seconds without a heartbeat after which a process counts as silent."""
    stall_s: Positive = 120.0
    """Seconds without progress after which a living process counts as stalled."""
    long_s: Positive = 1800.0
    """The longest time of any activity in seconds, and the limit of the first long one, such as
    loading.
    """


class ProbesConfig(Section, frozen=True, kw_only=True):
    """Probes: an environment's checks that the reward does not see, and the action when reward and
    probe diverge (`deltawire.reward_monitor`).

    Example::

        [probes]
        action = "downweight"
        false_alarm = 0.001
    """

    action: Literal["warn", "downweight", "stop"] = "warn"
    """Report the divergence; with ``downweight`` also train on fewer groups of the family; with
    ``stop`` also stop.
    """
    false_alarm: Annotated[float, Meta(gt=0, le=0.5)] = 0.01
    """The largest probability that a run without divergence is flagged, over its whole length."""
    tolerance: Annotated[float, Meta(gt=0, le=0.5)] = 0.05
    """Largest mean excess of the reward over a probe, as a share of ``reward_scale``."""
    reward_scale: Positive = 1.0
    """The reward of a solved task."""
    keep: Annotated[float, Meta(gt=0, le=1)] = 0.25
    """The share of a flagged family's groups that ``downweight`` still trains on."""


class RunConfig(Section, frozen=True, kw_only=True):
    """The whole configuration. ``threads`` is the number of threads of each process's tensor
    library.

    Example::

        name = "first"
        seed = 1

        [model]
        path = "models/qwen3-0.6b"

        [train]
        versions = 200
    """

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
    seed: Annotated[int, Meta(ge=0, le=2**31)] = 0
    threads: Annotated[int, Meta(ge=1, le=1024)] = 1
    device: Device = "auto"
    """Where models compute: ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``. ``auto`` is the
    first that the machine has of CUDA, MPS and the CPU."""
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    chat: ChatConfig = ChatConfig()
    midtrain: MidtrainConfig | None = None
    warm_start: WarmStartConfig = WarmStartConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    reference: ReferenceConfig = ReferenceConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    budget: BudgetConfig = BudgetConfig()
    probes: ProbesConfig = ProbesConfig()
    parity: ParityConfig = ParityConfig()
    faults: FaultsConfig = FaultsConfig()
    retain: RetainConfig = RetainConfig()
    workers: WorkersConfig = WorkersConfig()
    trust: TrustConfig = TrustConfig()
    line: LineConfig | None = None
    """The version line that this is the configuration of. Not a key of a file."""
    live: LiveConfig = LiveConfig()
    shape: dict[str, Any] = {}
    """The training profile that ``deltawire run --shape`` started the run with, as plain data
    (`deltawire.plan.profile`); empty without one. Not a key of a file."""

    @property
    def reference_mode(self) -> Literal["none", "adapter_off", "sleeping", "process"]:
        """Return where the reference computes; ``none`` for a loss that needs none."""
        if not self.train.loss.needs_reference:
            return "none"
        if self.reference.mode != "auto":
            return self.reference.mode
        one = self.train.adapter.kind != "none" or bool(self.train.adapters)
        adapted = one and not self.reference.model
        return "adapter_off" if adapted else "sleeping"

    def device_of(self, role: Literal["trainer", "worker", "evaluator"]) -> str:
        """Returns the device that is configured for a kind of process."""
        own = {
            "trainer": self.train.device,
            "worker": self.rollout.device,
            "evaluator": self.evaluate.device,
        }
        return own[role] or self.device
