"""A run's configuration: a TOML file, checked whole before anything starts.

Every key has a default that suits a small run on one machine. Unknown and wrong keys are refused
by name, with the nearest valid one.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from deltawire.errors import InputError

Count = Annotated[int, Meta(ge=1, le=1_000_000_000)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Decay = Annotated[float, Meta(ge=0, lt=1)]


OnFull = Literal["end", "drop", "summary"]


class _Section(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A table of the file."""


class BuildConfig(_Section, frozen=True, kw_only=True):
    """A model built from its architecture alone, with random weights and a byte tokenizer."""

    family: Literal["qwen3", "qwen3_moe"] = "qwen3"
    hidden_size: Count = 160
    layers: Count = 4
    head_size: Count = 32
    feed_forward_size: Count = 480
    """Of each expert, where there are experts."""
    experts: Count = 16
    """Experts a layer; ``qwen3_moe`` only, as is the next."""
    experts_per_token: Count = 2
    vocabulary: Annotated[int, Meta(ge=264, le=1_000_000)] = 264
    """Rows of the embedding; those behind the 256 bytes and the two marks stay unused."""
    context: Count = 512


class ModelConfig(_Section, frozen=True, kw_only=True):
    """Where version 0 comes from: a Hugging Face directory, or an architecture to build."""

    path: str = ""
    build: BuildConfig | None = None


class TaskConfig(_Section, frozen=True, kw_only=True):
    """Where tasks come from: an environment by name, and its own ``options``."""

    environment: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}\Z")] = "reasoning_gym"
    """A name that `deltawire.envs` knows, or ``module:attribute`` of a module that this machine
    trusts; see docs/ENVIRONMENTS.md."""
    dataset: str = "spell_backward"
    """Which of the environment's datasets, where it has several."""
    options: dict[str, Any] = {}
    prompt: str = "{question}\n"
    attempts: Count = 1
    """Answers that a question of reasoning-gym may get; each wrong one but the last is answered
    with ``retry``."""
    retry: str = "That is not right. Try again.\n"
    heldout: Count = 200
    """Problems that are evaluated on and never trained on."""


class WarmStartConfig(_Section, frozen=True, kw_only=True):
    """Supervised steps on the task's own pairs, before version 0."""

    max_steps: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    stop_at_accuracy: Fraction = 1.0
    """Stop once greedy accuracy on validation problems of its own reaches this."""
    check_every: Count = 25
    learning_rate: Positive = 2e-3
    batch: Count = 48


class RolloutConfig(_Section, frozen=True, kw_only=True):
    """Rollout workers: how many are supervised, and how each samples."""

    workers: Annotated[int, Meta(ge=0, le=1024)] = 2
    engine: Annotated[str, Meta(pattern=r"^[a-z0-9_]{1,64}\Z")] = "transformers"
    """What a worker samples from, by its name in `deltawire.engines.registry`: the embedded engine,
    or a vLLM server that the worker starts."""
    group_size: Annotated[int, Meta(ge=2, le=4096)] = 8
    max_tokens: Count = 16
    max_turns: Count = 1
    temperature: Positive = 1.0
    slots: Count = 64
    """Sequences that one worker decodes at a time, at most; memory may allow fewer."""
    context: Count = 256
    """Tokens of one sequence, prompt included."""
    concurrent: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Episodes that one worker plays at a time; 0 for as many as it has slots. More keep the slots
    busy while environments work."""
    on_full: OnFull = "end"
    """When an episode's context is full: end it, drop its oldest turns, or let the model write a
    summary that stands for them."""
    summary_tokens: Count = 256
    summary_prompt: Annotated[str, Meta(min_length=1, max_length=10_000)] = (
        "Summarize what was done and found so far; only this will be kept."
    )
    step_limit_s: Positive = 120.0
    """Seconds that one call of an environment may take."""
    episode_limit_s: Positive = 7200.0
    max_characters: Count = 20_000
    """Of a message of an environment's, that the model gets to read."""
    on_failure: Literal["drop", "stop"] = "drop"
    """When an episode fails for another reason than the model: leave it out and count it, or stop
    the run."""
    max_failed: Fraction = 0.5
    """Share of the last 64 episodes and more that may fail before the run stops all the same."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What the engine computes in. The trainer computes in float32."""


class CorrectionConfig(_Section, frozen=True, kw_only=True):
    """One off-policy correction by w = old / sampler
    (`deltawire.train.loss.correction_weights`)."""

    level: Literal["token", "sequence", "geometric"] = "token"
    action: Literal["truncate", "clip", "mask"] = "truncate"
    low: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    high: Positive = 2.0
    weigh: bool = True
    """Multiply by the weight; false only rejects what lies outside the bounds (``mask``)."""


class SurrogateTraits(NamedTuple):
    """A registered surrogate: where its function is and what the configuration must know of it.

    ``clip`` holds the default bounds, None where it takes none; ``ratio`` says that it divides by
    the anchor; ``positive_low`` that 1 − clip_low must not be negative.
    """

    function: str
    clip: tuple[float, float] | None = None
    ratio: bool = True
    dual_clip: bool = False
    positive_low: bool = False


SURROGATES = {
    "ppo": SurrogateTraits(
        "deltawire.train.loss.ppo:ppo", (0.2, 0.28), dual_clip=True, positive_low=True
    ),
    "cispo": SurrogateTraits("deltawire.train.loss.cispo:cispo", (1.0, 4.0)),
    "gspo": SurrogateTraits("deltawire.train.loss.gspo:gspo", (3e-4, 4e-4), positive_low=True),
    "dppo": SurrogateTraits("deltawire.train.loss.dppo:dppo", (0.2, 0.28)),
    "importance_sampling": SurrogateTraits(
        "deltawire.train.loss.importance_sampling:importance_sampling"
    ),
    "reinforce": SurrogateTraits("deltawire.train.loss.reinforce:reinforce", ratio=False),
}
"""The surrogates that ``train.loss.surrogate`` may name: one line each, and one module each."""


class LossConfig(_Section, frozen=True, kw_only=True):
    """The loss by its names (`deltawire.train.loss`)."""

    advantage: Literal["group_mean", "group_std", "leave_one_out"] = "group_std"
    anchor: Literal["old", "rollout"] = "rollout"
    """What the ratio is against: the policy before the step, or the sampler's log-probabilities."""
    surrogate: str = "ppo"
    """One of `SURROGATES`."""
    clip_low: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    """Bounds of the surrogate; None for its own defaults in `SURROGATES`."""
    clip_high: Positive | None = None
    dual_clip: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """The dual clip's c, above 1; 0 is off. ``ppo`` only."""
    corrections: list[CorrectionConfig] = []
    aggregation: Literal["token_mean", "seq_mean_token_mean", "dr_grpo"] = "token_mean"
    horizon: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    """The constant length of ``dr_grpo``; 0 is rollout.max_tokens times rollout.max_turns."""
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """A penalty for leaving version 0, which the trainer then holds a second time."""
    kl_coefficient: Annotated[float, Meta(ge=0, le=1e9)] = 1e-3

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """The surrogate's lower and upper bound, its own defaults where none is set."""
        low, high = SURROGATES[self.surrogate].clip or (0.0, 0.0)
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    def contradiction(self, largest_age: int) -> tuple[str, str] | None:
        """Why these settings make no sense together, or for groups of that age, and what to do;
        None if they do."""
        if self.surrogate not in SURROGATES:
            near = difflib.get_close_matches(self.surrogate, SURROGATES, n=1, cutoff=0.4)
            known = f"did you mean {near[0]}?" if near else f"one of {', '.join(SURROGATES)}"
            return f"there is no surrogate {self.surrogate[:64]!r}", known
        traits = SURROGATES[self.surrogate]
        weighing = [c for c in self.corrections if c.weigh]
        ratio = traits.ratio
        if self.anchor == "rollout" and weighing and ratio:
            reason = (
                "anchor = rollout already divides by the sampler's probability, and a correction "
                "that weighs would divide by it again"
            )
            return reason, 'set anchor = "old", or weigh = false to reject without weighing'
        if len(weighing) > 1:
            return (
                "two corrections weigh, which counts the way from sampler to trainer twice",
                "set weigh = false on all but one",
            )
        for number, correction in enumerate(self.corrections):
            where = f"corrections[{number}]"
            if correction.low >= correction.high:
                return f"{where}: low is not below high", "low is the smaller bound"
            if correction.low and correction.weigh and correction.action == "truncate":
                return f"{where}: truncate has no lower bound", 'set action = "clip", or low = 0'
            if not correction.weigh and correction.action != "mask":
                return f"{where}: without a weight there is nothing to {correction.action}", (
                    'set action = "mask"'
                )
        corrected = bool(self.corrections) or (self.anchor == "rollout" and ratio)
        if largest_age > UNCORRECTED_STALENESS and not corrected:
            reason = (
                f"groups up to {largest_age} versions old would be trained on as if the policy "
                "had just drawn them"
            )
            lower = f"let none be older than {UNCORRECTED_STALENESS}"
            return reason, f'set anchor = "rollout", add a [[train.loss.corrections]], or {lower}'
        if self.dual_clip and (self.dual_clip <= 1 or not traits.dual_clip):
            return "dual_clip is a bound above 1 on the surrogate ppo", "set dual_clip = 0"
        if traits.clip is None and (self.clip_low, self.clip_high) != (None, None):
            reason = f"the surrogate {self.surrogate} has no bounds"
            return reason, "leave out clip_low and clip_high"
        if traits.positive_low and self.clip_bounds[0] > 1:
            return "1 - clip_low would be a ratio below 0", "set clip_low within 0 and 1"
        return None


UNCORRECTED_STALENESS = 1
"""How old a group may be at most where nothing in the loss knows that it is old: with one step of
lag the ratio stays within PPO's bounds for almost every token; deeper queues need a correction."""


class StalenessConfig(_Section, frozen=True, kw_only=True):
    """What becomes of groups that finish late (`deltawire.rl.control.staleness`)."""

    policy: Literal["strict", "windowed_fifo", "requeue"] = "strict"
    window: Fraction = 0.3
    """Of ``windowed_fifo``: the share of the outstanding groups that may be overtaken."""
    requeue_share: Fraction = 0.25
    """Of ``requeue``: the share of a step that groups older than max_staleness make at most."""
    requeue_age: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Of ``requeue``: how old a group may be; 0 is four times max_staleness."""


class TrainConfig(_Section, frozen=True, kw_only=True):
    """The trainer: how many versions to make, from what, and how far off-policy."""

    versions: Count = 100
    groups_per_step: Count = 16
    max_staleness: Annotated[int, Meta(ge=0, le=1024)] = 2
    """No group older than this many versions is ever trained on; 0 alternates strictly."""
    learning_rate: Positive = 1e-4
    warmup_steps: Annotated[int, Meta(ge=0, le=1_000_000)] = 20
    adam_beta1: Decay = 0.9
    adam_beta2: Decay = 0.99
    weight_decay: Annotated[float, Meta(ge=0, le=1)] = 0.0
    max_grad_norm: Positive = 1.0
    micro_batch_groups: Count = 16
    exporter: Annotated[str, Meta(pattern=r"^[a-z0-9_]{1,64}\Z")] = "bf16"
    """What is published of the model: a name that `deltawire.export.source` knows."""
    anchor_every: Count = 50
    folds: bool = False
    """Whether the trainer also folds its deltas over longer strides, for readers far behind. That
    takes a core and a model's memory, and pays where few weights change a step."""
    checkpoint_every: Count = 20
    dropout: bool = False
    """Whether the model's dropout is active in training. Off, the trainer computes the policy that
    samples; the reference of a KL penalty never drops anything."""
    max_failed_groups: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Stop the run once so many groups in a row had fewer than two episodes that did not fail; 0
    goes on for ever."""
    loss: LossConfig = LossConfig()
    staleness: StalenessConfig = StalenessConfig()

    @property
    def largest_age(self) -> int:
        """The age that no group exceeds when it is trained on, by the policy of its staleness."""
        match self.staleness.policy:
            case "strict":
                return self.max_staleness
            case "windowed_fifo":
                limit = (self.max_staleness + 1) * self.groups_per_step
                window = max(1, int(self.staleness.window * limit))
                return self.max_staleness + -(-(window - 1) // self.groups_per_step)
            case "requeue":
                return self.staleness.requeue_age or 4 * self.max_staleness

    def contradiction(self) -> tuple[str, str] | None:
        """Why staleness and loss make no sense together, and what to do; None if they do."""
        policy = self.staleness.policy
        if policy != "strict" and self.max_staleness == 0:
            reason = f"{policy} lets groups be older than max_staleness = 0"
            return reason, 'set staleness.policy = "strict", or raise max_staleness'
        if policy == "requeue":
            if self.largest_age <= self.max_staleness:
                return "requeue_age is not above max_staleness", "set it to 0 for a default"
            if self.loss.anchor == "rollout" or not self.loss.corrections:
                reason = "requeue trains on groups too old to be anchored on their own sampler"
                return reason, 'set loss.anchor = "old" and add a [[train.loss.corrections]]'
        return self.loss.contradiction(self.largest_age)


class EvaluateConfig(_Section, frozen=True, kw_only=True):
    """Held-out accuracy at version 0, every so many versions, and at the last.

    It is the share of correct answers among ``samples`` a problem, drawn at the rollout's own
    temperature (pass@1 of the policy that is trained); greedy accuracy is measured beside it.
    """

    every: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 20
    """0 starts no evaluator."""
    samples: Count = 4
    slots: Count = 256
    """Sequences that are decoded at a time, at most; memory may allow fewer."""


NO_LIMIT = 1e9
Limit = Annotated[float, Meta(ge=0, le=NO_LIMIT)]


class ParityLimits(_Section, frozen=True, kw_only=True):
    """Named thresholds between sampler and trainer; one left at its default judges nothing.

    The first six judge tokens that the trained version itself drew, over a prefix of its own: what
    differs there is arithmetic alone. Those that begin with ``drift`` judge all tokens of the
    batch, and so the policy's own change since the sampler's version as well. In nats a token, or
    shares from 0 to 1; `deltawire.parity.divergence` has the formulas.
    """

    k3: Limit = NO_LIMIT
    k3_swapped: Limit = NO_LIMIT
    mean_gap: Limit = NO_LIMIT
    largest_gap: Limit = NO_LIMIT
    extreme_share: Fraction = 1.0
    flipped_share: Fraction = 1.0
    """Of expert choices, in the worst layer."""
    drift_k3: Limit = NO_LIMIT
    drift_largest_gap: Limit = NO_LIMIT
    drift_extreme_share: Fraction = 1.0
    drift_effective_share: Fraction = 0.0
    """The one threshold below which it is too bad: an effective sample size."""


class WarnLimits(ParityLimits, frozen=True, kw_only=True):
    """As `ParityLimits`, with values that suit most runs."""

    k3: Limit = 1e-3
    drift_extreme_share: Fraction = 0.1
    drift_effective_share: Fraction = 0.3


class ParityConfig(_Section, frozen=True, kw_only=True):
    """What is done about a divergence between sampler and trainer, and about expert choices.

    ``warn`` and ``stop`` judge a batch, ``mask`` takes single sequences out of the loss. A batch
    that is stopped at is not trained on.
    """

    warn: WarnLimits = WarnLimits()
    mask: ParityLimits = ParityLimits()
    stop: ParityLimits = ParityLimits()
    extreme_ratio: Annotated[float, Meta(ge=1, le=1e9)] = 2.0
    min_tokens: Count = 32
    """A batch's means are judged from this many tokens on; largest gaps always are."""
    routes: Literal["off", "record", "replay"] = "off"
    """Of models with experts: whether workers send their expert choices with the tokens, and
    whether the trainer only compares them with its own or takes them."""
    plausible: Fraction = 0.0
    """A recorded expert is taken only if the trainer's score of it is at least this share of the
    weakest among its own choices; 0 takes every one."""


class FaultsConfig(_Section, frozen=True, kw_only=True):
    """How long a process may say nothing before its supervisor replaces it
    (`deltawire.runtime.supervisor` derives the bounds)."""

    silence_s: Positive = 30.0
    """No sign of life at all: stopped, or too busy even for its pulse."""
    stall_s: Positive = 120.0
    """A living process whose work does not go on."""
    long_s: Positive = 1800.0
    """The most that anything may take, and the first of what may take long: loading, a step."""


class ProbesConfig(_Section, frozen=True, kw_only=True):
    """Probes: checks of an environment that the reward does not see, and what is done when reward
    and probe come apart (`deltawire.reward_monitor`)."""

    action: Literal["warn", "downweight", "stop"] = "warn"
    """Say so; say so and train on fewer groups of the family; or say so and stop."""
    false_alarm: Annotated[float, Meta(gt=0, le=0.5)] = 0.01
    """The chance, at most, that a whole run without divergence is flagged, however long it is."""
    tolerance: Annotated[float, Meta(gt=0, le=0.5)] = 0.05
    """How much the reward may exceed a probe on average, as a share of its scale."""
    reward_scale: Positive = 1.0
    """The reward of a task that is solved."""
    keep: Annotated[float, Meta(gt=0, le=1)] = 0.25
    """Share of a flagged family's groups that ``downweight`` still trains on."""


class RunConfig(_Section, frozen=True, kw_only=True):
    """All of it. ``threads`` is what each process gives to its tensor library."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
    seed: Annotated[int, Meta(ge=0, le=2**31)] = 0
    threads: Annotated[int, Meta(ge=1, le=1024)] = 1
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    probes: ProbesConfig = ProbesConfig()
    parity: ParityConfig = ParityConfig()
    faults: FaultsConfig = FaultsConfig()


T = TypeVar("T", bound=msgspec.Struct)

MAX_CONFIG_BYTES = 1 << 20

RESUMABLE = frozenset(
    {
        "train.versions",
        "rollout.workers",
        "evaluate.every",
        "probes.action",
        "probes.keep",
        "threads",
        "faults.silence_s",
        "faults.stall_s",
        "faults.long_s",
    }
    | {
        f"parity.{action}.{name}"
        for action in ("warn", "stop")
        for name in get_type_hints(ParityLimits)
    }
)
"""Keys that may differ when a run is continued; any other would make it another run."""


def load_config(path: Path) -> RunConfig:
    """Read and check a TOML file, or the same as JSON if its name ends so.

    Raises `InputError` naming the file, the key and the nearest valid key.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise InputError(
            f"cannot read the configuration {path}: {error.strerror or error}",
            hint="give the path of a TOML file, such as examples/demo.toml",
        ) from error
    if len(data) > MAX_CONFIG_BYTES:
        raise InputError(f"{path} is too large: a configuration has at most a megabyte")
    try:
        text = data.decode()
        raw = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise InputError(f"{path} is not {kind}: {error}") from error
    if not isinstance(raw, dict):
        raise InputError(f"{path} is not a table of keys")
    config = parse_config(raw, source=str(path))
    if not config.model.path and config.model.build is None:
        raise InputError(
            f"{path} names no model",
            hint="set model.path to a Hugging Face directory, or add a [model.build] section",
        )
    return config


def parse_config(raw: dict[str, Any], *, source: str) -> RunConfig:
    """Turn plain values into a `RunConfig`; raises `InputError` as `load_config` does."""
    _refuse_unknown(raw, RunConfig, "", source)
    try:
        config = msgspec.convert(raw, RunConfig)
    except msgspec.ValidationError as error:
        text = str(error).replace("`$.", "`")
        raise InputError(f"{source}: {text}", hint=_way_on(text)) from error
    if found := config.train.contradiction():
        raise InputError(f"{source}: train: {found[0]}", hint=found[1])
    if config.task.environment == "reasoning_gym" and "{question}" not in config.task.prompt:
        raise InputError(f"{source}: task.prompt must contain {{question}}")
    rollout = config.rollout
    if rollout.on_full == "summary" and rollout.summary_tokens >= rollout.context:
        raise InputError(
            f"{source}: rollout.summary_tokens {rollout.summary_tokens} leave no room in "
            f"rollout.context {rollout.context}"
        )
    if rollout.engine == "vllm" and config.parity.routes != "off":
        raise InputError(
            f"{source}: rollout.engine vllm does not tell its expert choices",
            hint='set parity.routes = "off", or rollout.engine = "transformers"',
        )
    return config


def run_config(raw: dict[str, Any], *, url: str) -> RunConfig:
    """The configuration that the run in the bucket ``url`` carries. Raises `InputError` as
    `load_config` does, and if the run has none."""
    if not raw:
        raise InputError(
            "this run holds weights alone: deltawire's loop did not make it",
            hint="log, status, pull, relay, serve, export and fsck are for it",
            run=url,
        )
    return parse_config(raw, source=f"{url}/run.json")


def _way_on(text: str) -> str:
    """What may stand where msgspec says that something may not; empty if it says so itself."""
    if text.startswith("Object missing required field `name`"):
        return 'give the run a name, such as name = "mine"'
    place = re.search(r"at `([^`]+)`", text)
    if place is None:
        return ""
    if "matching regex" in text:
        return "use at most 64 letters, digits, -, _ and .; a letter or digit comes first"
    kind: Any = RunConfig
    for name in re.sub(r"\[[^]]*\]", "", place[1]).split("."):
        kinds = [option for option in (kind, *get_args(kind)) if isinstance(option, type)]
        sections = [option for option in kinds if issubclass(option, _Section)]
        if not sections or name not in (hints := get_type_hints(sections[0])):
            return ""
        kind = hints[name]
    return f"one of {', '.join(get_args(kind))}" if get_origin(kind) is Literal else ""


def _refuse_unknown(raw: dict[str, Any], kind: type[Any], prefix: str, source: str) -> None:
    hints = get_type_hints(kind)
    for key, value in raw.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1, cutoff=0.5)
            hint = (
                f"did you mean {prefix}{near[0]}?"
                if near
                else (f"valid keys here: {', '.join(sorted(hints))}")
            )
            raise InputError(f"{source}: unknown key {prefix}{key}", hint=hint)
        for option in (hints[key], *getattr(hints[key], "__args__", ())):
            if not (isinstance(option, type) and issubclass(option, _Section)):
                continue
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, dict):
                    _refuse_unknown(item, option, f"{prefix}{key}.", source)


def flatten(config: msgspec.Struct, prefix: str = "") -> dict[str, Any]:
    """Dotted keys to plain values, as for a table or a comparison."""
    flat: dict[str, Any] = {}
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, msgspec.Struct):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = msgspec.to_builtins(value)
    return flat


def differences(ours: RunConfig, theirs: RunConfig) -> list[str]:
    """The dotted keys, outside `RESUMABLE`, in which two configurations differ."""
    left, right = flatten(ours), flatten(theirs)
    keys = (left.keys() | right.keys()) - RESUMABLE
    return sorted(key for key in keys if left.get(key) != right.get(key))
