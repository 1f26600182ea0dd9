"""Reads and checks a run's configuration, a TOML file, before any process starts."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from deltawire.builds import build_name
from deltawire.config.base import Section
from deltawire.config.exporters import quantizing, scheme_of
from deltawire.config.features import former_key_hint
from deltawire.config.reuse import sharing_of
from deltawire.config.scaffold import BUILT_IN_SCAFFOLDS, turn_limit
from deltawire.config.sections import MOST_GROUPS, RunConfig
from deltawire.config.served import published, samples_quantized, served_exporter
from deltawire.errors import InputError

MAX_CONFIG_BYTES = 1 << 20
UNNAMED = "a build without a name"
SMALLEST_OF_CAP = 20
"""Groups of more answers satisfy `live.user_cap` 0.05, the default of earlier releases."""
MOST_RESULTS = 6144
"""Results of problems that the controller compares, in one evaluation's event: a line of events is
cut at 64 KiB, and decisions must follow from what was recorded."""


def load_config(path: Path) -> RunConfig:
    """Reads and checks a TOML file, or a JSON file with the same keys if its name ends in .json.

    Raises `InputError` naming the file, the key and the nearest valid key.
    """
    return check_config(read_values(path), source=str(path))


def check_config(raw: dict[str, Any], *, source: str) -> RunConfig:
    """Turns the values of a file into a `RunConfig`; raises `InputError` as `load_config` does."""
    if raw.get("shape"):
        raise InputError(
            f"{source}: shape is not a key of a file",
            hint="start the run with deltawire run --shape NAME|FILE",
        )
    if raw.get("line"):
        raise InputError(
            f"{source}: line is not a key of a file", hint="name adapters in [[train.adapters]]"
        )
    config = parse_config(raw, source=source)
    if not config.model.path and config.model.build is None:
        raise InputError(
            f"{source} does not name a model",
            hint="set model.path to a Hugging Face directory, or add a [model.build] section",
        )
    return config


def read_values(path: Path) -> dict[str, Any]:
    """Reads the values of a configuration file, unchecked; raises `InputError` naming the file."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise InputError(
            f"cannot read the configuration {path}: {error.strerror or error}",
            hint="give the path of a TOML file, such as examples/demo.toml",
        ) from error
    if len(data) > MAX_CONFIG_BYTES:
        raise InputError(f"{path} is larger than 1 MiB, the limit of a configuration")
    try:
        text = data.decode()
        raw = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise InputError(f"{path} is not {kind}: {error}") from error
    if not isinstance(raw, dict):
        raise InputError(f"{path} is not a table of keys")
    return raw


def parse_config(raw: dict[str, Any], *, source: str, created_by: str = "") -> RunConfig:
    """Turns plain values into a `RunConfig`; raises `InputError` as `load_config` does.

    ``created_by`` is the build that wrote them, if no person did: an unknown key is then a newer
    build's, and not a mistake.
    """
    _refuse_unknown(raw, RunConfig, "", source, created_by)
    try:
        config = msgspec.convert(raw, RunConfig)
    except msgspec.ValidationError as error:
        text = str(error).replace("`$.", "`")
        raise InputError(f"{source}: {text}", hint=_hint_for(text)) from error
    if found := config.train.contradiction():
        raise InputError(f"{source}: train: {found[0]}", hint=found[1])
    for found in (
        config.task.contradiction("task"),
        config.evaluate.contradiction(),
        config.rollout.contradiction(),
        config.live.contradiction(config.rollout.group_size),
        config.live.release.contradiction(),
        config.midtrain.contradiction() if config.midtrain is not None else None,
        _tools_fault(config),
        _scaffold_fault(config),
        _proofs_fault(config),
        _budgets_fault(config),
        _stop_fault(config),
        _controller_fault(config),
        _allocation_fault(config),
        _lengths_fault(config),
        _lineages_fault(config),
        _sharing_fault(config),
    ):
        if found:
            raise InputError(f"{source}: {found[0]}", hint=found[1])
    rollout = config.rollout
    if rollout.on_full == "summary" and rollout.summary_tokens >= rollout.context:
        raise InputError(
            f"{source}: rollout.summary_tokens {rollout.summary_tokens} do not fit into "
            f"rollout.context {rollout.context}"
        )
    if found := _reference_fault(config) or _tool_times_fault(config):
        raise InputError(f"{source}: {found[0]}", hint=found[1])
    if config.retain.versions and config.reference_mode != "none" and not config.reference.model:
        raise InputError(
            f"{source}: retain.versions would delete version 0, the reference of train.loss",
            hint="set retain.versions = 0, or a loss without a reference",
        )
    truncated = (rollout.top_p, rollout.top_k, rollout.min_p) != (1.0, 0, 0.0)
    if rollout.engine == "vllm" and truncated and rollout.temperature != 1.0:
        raise InputError(
            f"{source}: rollout.engine vllm reports no log-probabilities of the full softmax with "
            f"top_p, top_k or min_p at temperature {rollout.temperature:g}",
            hint='set rollout.temperature = 1, or rollout.engine = "transformers"',
        )
    ours = [f"w{number}" for number in range(rollout.workers)]
    names = config.workers.allow
    if refused := [n for n in ours if names and not any(fnmatchcase(n, a) for a in names)]:
        raise InputError(
            f"{source}: workers.allow leaves out {refused[0]}, which deltawire run starts",
            hint='add "w*" to workers.allow, or set rollout.workers = 0',
        )
    if found := _adapter_fault(config):
        raise InputError(f"{source}: {found[0]}", hint=found[1])
    if config.midtrain is not None:  # This run neither samples nor evaluates.
        rollout = msgspec.structs.replace(config.rollout, workers=0)
        evaluate = msgspec.structs.replace(config.evaluate, every=0)
        config = msgspec.structs.replace(config, rollout=rollout, evaluate=evaluate)
    return config


def _lengths_fault(config: RunConfig) -> tuple[str, str] | None:
    """Why a term on lengths cannot be computed, and what to do; None if all can."""
    rollout = config.rollout
    largest = rollout.max_tokens * turn_limit(rollout)
    for number, term in enumerate(config.train.loss.lengths):
        found = term.contradiction(largest, budgets=rollout.thinking is not None)
        if found:
            return f"train.loss.lengths[{number}]: {found[0]}", found[1]
    return None


def _lineages_fault(config: RunConfig) -> tuple[str, str] | None:
    """Why an answer could be trained on twice, and what to do; None if it could not."""
    days, age_s = config.retain.lineage_days, config.live.max_age_s
    if not days or days * 86_400.0 >= age_s:
        return None
    reason = f"retain.lineage_days = {days:g} is shorter than live.max_age_s = {age_s:g} s, so an "
    reason += "answer could be trained on twice"
    return reason, f"set retain.lineage_days to {age_s / 86_400.0:.3g} or more"


def _sharing_fault(config: RunConfig) -> tuple[str, str] | None:
    """Why episodes cannot share a beginning, or thoughts cannot be compared at each budget, and
    what to do; None if they can."""
    rollout, thinking = config.rollout, config.rollout.thinking
    turns, varies = turn_limit(rollout), rollout.allocation.policy in ("pilot", "knapsack")
    if found := rollout.reuse.contradiction(rollout.group_size, turns):
        return found
    if thinking is not None and (
        found := thinking.prefix_contradiction(rollout.group_size, turns=turns, varies=varies)
    ):
        return found
    if config.train.loss.advantage == "budget_relative" and (
        thinking is None or thinking.per != "prefix"
    ):
        reason = (
            'train.loss.advantage = "budget_relative" compares answers after parts of a thought'
        )
        return reason, 'set rollout.thinking.per = "prefix"'
    loss = config.train.loss
    if loss.traits.good_or_bad and sharing_of(rollout) > 1:
        reason = f"train.loss.surrogate {loss.surrogate} takes whole answers, and some share tokens"
        return reason, "leave out rollout.reuse and rollout.thinking.per"
    if config.live.baseline == "sign" and not loss.traits.good_or_bad:
        reason = f"live.baseline sign leaves {loss.surrogate} without a baseline"
        return reason, 'set train.loss.surrogate = "kto", or another live.baseline'
    return None


def _tools_fault(config: RunConfig) -> tuple[str, str] | None:
    """Refuses tools whose answers no turn is left to read."""
    tasks = [*config.task.each(), *(one.task for one in config.evaluate.sets)]
    served = any(task.tools for task in tasks)
    if served and config.rollout.max_turns < 2:
        return (
            "task.tools need turns that read their answers, and rollout.max_turns is 1",
            "set rollout.max_turns to the most calls of an episode and one more",
        )
    return None


def _tool_times_fault(config: RunConfig) -> tuple[str, str] | None:
    """Refuses calls of tools that may take all of a step's time."""
    limit = config.rollout.step_limit_s
    tasks = [*config.task.each(), *(one.task for one in config.evaluate.sets)]
    for server in (server for task in tasks for server in task.servers()):
        if max(server.call_limit_s, server.start_limit_s) >= limit:
            reason = (
                f"the tool server {server.name} may take as long as rollout.step_limit_s, "
                f"{limit:g} s, so that a late answer fails the episode"
            )
            return reason, "lower call_limit_s and start_limit_s, or raise rollout.step_limit_s"
    return None


def _scaffold_fault(config: RunConfig) -> tuple[str, str] | None:
    """Why a scaffold has no room, and what to do; None if it has."""
    rollout = config.rollout
    if rollout.scaffold in BUILT_IN_SCAFFOLDS and rollout.max_steps < 2:
        reason = f"rollout.scaffold {rollout.scaffold} takes two turns, and rollout.max_steps is 1"
        return reason, "set rollout.max_steps to 2 or more"
    return None


def _allocation_fault(config: RunConfig) -> tuple[str, str] | None:
    """Why completions cannot be allocated, and what to do; None if they can."""
    allocation, train = config.rollout.allocation, config.train
    if allocation.policy == "fixed":
        return None
    where = f'rollout.allocation.policy = "{allocation.policy}"'
    if train.groups_per_step > MOST_GROUPS // 4:
        reason = (
            f"{where}: a version's manifest has room for the records of {MOST_GROUPS // 4:,} "
            f"prompts, train.groups_per_step is {train.groups_per_step:,}"
        )
        return reason, "lower train.groups_per_step"
    if train.staleness.policy == "windowed_fifo":
        reason = f"{where}: skipped prompts leave no gap-free order for windowed_fifo"
        return reason, 'set train.staleness.policy = "strict" or "requeue"'
    if train.loss.advantage == "given":
        reason = (
            f'{where} compares rewards; train.loss.advantage = "given" takes them as advantages'
        )
        return reason, 'set rollout.allocation.policy = "fixed"'
    return None


def _budgets_fault(config: RunConfig) -> tuple[str, str] | None:
    """Why the budgets of an evaluation cannot be measured, and what to do; None if they can."""
    budgets, thinking = config.evaluate.budgets, config.rollout.thinking
    if not budgets:
        return None
    if thinking is None:
        return "evaluate.budgets are set without rollout.thinking", "add [rollout.thinking]"
    needed = budgets[-1] + thinking.answer_tokens
    if needed >= config.rollout.context:
        reason = f"evaluate.budgets: the largest takes {needed} tokens with its answer"
        hint = "raise rollout.context, or leave out the largest budget"
        return f"{reason}, rollout.context = {config.rollout.context}", hint
    return None


def _proofs_fault(config: RunConfig) -> tuple[str, str] | None:
    """Finds why no interval can be kept for proofs, and what to do; None if it can."""
    if not config.retain.proofs:
        return None
    if config.midtrain is not None:
        return "retain.proofs keeps groups, and mid-training has none", "leave out retain.proofs"
    if config.train.ranks > 1:
        reason = f"retain.proofs: steps of {config.train.ranks} ranks cannot be verified"
        return f"{reason}, as one process adds up in another order", "leave out retain.proofs"
    return None


def _stop_fault(config: RunConfig) -> tuple[str, str] | None:
    """Why a run cannot be ended by its forecast, and what to do; None if it can."""
    if not config.budget.stop_when:
        return None
    if config.midtrain is not None or config.train.adapters:
        kind = "midtrain" if config.midtrain is not None else "train.adapters"
        return f"budget.stop_when does not end a run with {kind}", "leave out budget.stop_when"
    evaluate = config.evaluate
    return config.budget.contradiction(
        evaluated=evaluate.every > 0, budgets=len(evaluate.budgets) > 1
    )


def _controller_fault(config: RunConfig) -> tuple[str, str] | None:
    """Why the controller cannot move what compute is spent on, and what to do; None if it can."""
    if config.budget.controller == "fixed":
        return None
    where, fixed = 'budget.controller = "auto"', 'set budget.controller = "fixed"'
    if config.midtrain is not None or config.train.adapters:
        kind = "midtrain" if config.midtrain is not None else "train.adapters"
        return f"{where} does not move the budget of a run with {kind}", fixed
    if config.evaluate.every == 0 or config.task.heldout < 2:
        lacks = "evaluate.every is 0" if config.evaluate.every == 0 else "task.heldout is below 2"
        return f"{where} needs a held-out set, and {lacks}", "set evaluate.every and task.heldout"
    return _axes_fault(config, where) or _results_fault(config, where)


def _results_fault(config: RunConfig, where: str) -> tuple[str, str] | None:
    """Why an evaluation has more results than one event holds, and what to do; None if it fits."""
    thinking, problems = config.rollout.thinking, min(config.budget.problems, config.task.heldout)
    budgets = 1 if thinking is None else len(thinking.budgets)
    settings = budgets * max(len(config.budget.scaffolds), 1)
    if settings * problems <= MOST_RESULTS:
        return None
    reason = f"{where} would record {settings * problems} results with each evaluation, of "
    reason += f"{problems} problems with {settings} settings; the most is {MOST_RESULTS}"
    return reason, f"set budget.problems to {MOST_RESULTS // settings} or fewer"


def _axes_fault(config: RunConfig, where: str) -> tuple[str, str] | None:
    """Why an axis of the controller cannot be moved, and what to do; None if all can."""
    budget, rollout, thinking = config.budget, config.rollout, config.rollout.thinking
    first = {
        "completions": ("rollout.group_size", rollout.group_size),
        "steps": ("train.minibatches", config.train.minibatches),
        "scaffolds": ("rollout.scaffold", rollout.scaffold),
    }
    if found := budget.controller_fault(first):
        return found
    budgets = thinking.budgets if thinking is not None else []
    if thinking is not None and (thinking.schedule or thinking.weights or thinking.per != "group"):
        reason = f"{where} draws no budgets: rollout.thinking has a schedule, weights or per"
        return reason, 'leave them out, or set budget.controller = "fixed"'
    if budgets != sorted(set(budgets)):
        reason = f"{where} moves between rollout.thinking.budgets, which do not rise"
        return reason, "list each budget once, the smallest first"
    axes = (budgets, budget.completions, budget.steps, budget.scaffolds)
    if all(len(axis) < 2 for axis in axes):
        hint = "list two or more rollout.thinking.budgets, budget.completions, steps or scaffolds"
        return f"{where} has nothing to move between", hint
    if len(budget.completions) > 1 and rollout.allocation.policy != "fixed":
        policy = rollout.allocation.policy
        reason = f'budget.completions: rollout.allocation.policy = "{policy}" decides them'
        return reason, "leave out budget.completions"
    if budget.steps and budget.steps[-1] > config.train.groups_per_step:
        reason = f"budget.steps: {config.train.groups_per_step} groups cannot fill "
        return f"{reason}{budget.steps[-1]} optimizer steps", "raise train.groups_per_step"
    built_in = [one for one in budget.scaffolds if one in BUILT_IN_SCAFFOLDS]
    if built_in and rollout.max_steps < 2:
        reason = f"budget.scaffolds: {built_in[0]} takes two turns, and rollout.max_steps is 1"
        return reason, "set rollout.max_steps to 2 or more"
    return None


def _adapter_fault(config: RunConfig) -> tuple[str, str] | None:
    """Finds a setting that contradicts several adapters: the reason and what to do."""
    train = config.train
    if train.adapters and (found := _lines_fault(config)):
        return f"several adapters {found[0]}", found[1]
    for one in train.adapters:
        if one.task and (found := one.task.contradiction(f"train.adapters.{one.name}.task")):
            return found
    if config.retain.versions and train.exporter == "merged":
        return (
            "retain.versions would delete version 0, the base of train.exporter merged",
            'set retain.versions = 0, or train.exporter = "bf16"',
        )
    if found := _publications_fault(config) or _float16_fault(config):
        return found
    if samples_quantized(config) and (found := _quantized_fault(config)):
        key = "rollout.weights" if config.rollout.weights else "train.exporter"
        return f"{key} {served_exporter(config)} {found[0]}", found[1]
    if config.rollout.engine == "vllm" and train.served_adapter.kind != "none":
        return train.served_adapter.vllm_fault()
    if config.rollout.engine == "sglang":
        return _sglang_fault(config)
    return None


def _sglang_fault(config: RunConfig) -> tuple[str, str] | None:
    """Finds a setting that the engine ``sglang`` does not serve: the reason and what to do."""
    where = 'rollout.engine "sglang" does not'
    if config.train.served_adapter.kind != "none":
        return (
            f"{where} serve adapters",
            'set rollout.engine = "vllm", or train.exporter = "merged"',
        )
    return None


def _quantized_fault(config: RunConfig) -> tuple[str, str] | None:
    """Finds a setting that contradicts an exporter that quantizes: the reason and what to do."""
    train, loss = config.train, config.train.loss
    if train.adapter.kind != "none":
        return "cannot publish an adapter", 'set train.exporter = "bf16" or "merged"'
    if config.midtrain is None and loss.ratio_base == "old" and not loss.corrections:
        return (
            "makes samplers compute with quantized weights, which the loss does not correct for",
            'set loss.ratio_base = "rollout", or add a [[train.loss.corrections]]',
        )
    return None


def _float16_fault(config: RunConfig) -> tuple[str, str] | None:
    """Finds a precision that would change the bits of float16 weights: the reason and what to do.
    The finer steps of float16 are lost in bf16, and so is its parity."""
    if config.train.exporter != "f16" or "bfloat16" not in (
        config.train.compute,
        config.rollout.precision,
    ):
        return None
    return (
        "train.exporter f16: bfloat16 cannot hold float16 weights",
        'set train.compute and rollout.precision to "float32"',
    )


def _publications_fault(config: RunConfig) -> tuple[str, str] | None:
    """Finds a setting that contradicts publishing in several precisions: the reason and what to
    do."""
    train, served = config.train, config.rollout.weights
    known = ", ".join(quantizing())
    for number, name in enumerate(train.also_publish):
        if name in (train.exporter, *train.also_publish[:number]):
            return f"train.also_publish names {name} twice", "name each exporter once"
        if scheme_of(name) is None:
            return f"train.also_publish: {name} does not quantize", f"name any of {known}"
    if train.also_publish and train.exporter != "bf16":
        reason = f"train.also_publish quantizes bf16, and train.exporter is {train.exporter}"
        return reason, 'set train.exporter = "bf16"; rollout.weights chooses what workers serve'
    if train.also_publish and (train.adapter.kind != "none" or train.adapters):
        return "train.also_publish cannot quantize an adapter", "leave it out"
    if served and served not in published(train):
        reason = f"rollout.weights: this run publishes {', '.join(published(train))}, not {served}"
        return reason, "name one of these, or add it to train.also_publish"
    return None


def _lines_fault(config: RunConfig) -> tuple[str, str] | None:
    """Finds a setting that a run of several adapters does not have: the reason and what to do."""
    train = config.train
    if config.midtrain is not None:
        return "are trained on rollouts", "leave out midtrain"
    if config.rollout.engine != "transformers":
        return "need the embedded engine", 'set rollout.engine = "transformers"'
    if train.exporter != "bf16":
        return "are published as they are", 'set train.exporter = "bf16"'
    if max(train.tensor_parallel, train.expert_parallel) > 1:
        hint = "set both to 1; train.ranks and train.replicate shard the base over ranks"
        return "take no train.tensor_parallel and no train.expert_parallel", hint
    if config.reference_mode not in ("none", "adapter_off"):
        return "have the base as reference", 'set reference.mode = "auto"'
    return None


def _reference_fault(config: RunConfig) -> tuple[str, str] | None:
    """Finds a contradiction between the loss and the reference: the reason and what to do."""
    loss, reference = config.train.loss, config.reference
    if not loss.needs_reference and (reference.mode != "auto" or reference.model):
        return "[reference] has no effect without a penalty", "set train.loss.kl"
    if loss.kl == "none" and loss.preference.kind == "none" and not loss.policy_coefficient:
        return (
            "train.loss.policy_coefficient = 0 without a penalty leaves nothing to train on",
            "set train.loss.kl, to distill, or train.loss.preference.kind",
        )
    if reference.mode == "adapter_off":
        if config.train.adapter.kind == "none":
            return "reference.mode adapter_off needs an adapter", "set train.adapter.kind"
        if reference.model:
            return (
                "reference.mode adapter_off is version 0, not reference.model",
                'set reference.mode = "sleeping" or "process"',
            )
    return None


def run_config(raw: dict[str, Any], *, url: str, created_by: str = "") -> RunConfig:
    """Parses the configuration that a run at ``url`` carries, which the build ``created_by`` wrote.

    Raises `InputError` as `load_config` does, and for a run without a configuration.
    """
    if not raw:
        raise InputError(
            "this run holds only weights: deltawire run did not create it",
            hint="use log, status, pull, relay, gateway, replica, export or fsck",
            run=url,
        )
    if isinstance(train := raw.get("train"), dict):
        raw = {**raw, "train": _train_of_before(train)}
    if isinstance(live := raw.get("live"), dict):
        rollout = raw.get("rollout")
        size = rollout.get("group_size") if isinstance(rollout, dict) else None
        raw = {**raw, "live": _live_of_before(live, size)}
    return parse_config(raw, source=f"{url}/run.json", created_by=created_by or UNNAMED)


def _train_of_before(train: dict[str, Any]) -> dict[str, Any]:
    """Returns the section ``train`` of a run that an earlier release created, in today's keys."""
    # Runs of before this key started at the published values, and are replayed from there.
    train = {"masters": "published", **train}
    # Ways of multiplying by packed weights differed in the order of a sum. One is left.
    if isinstance(adapter := train.get("adapter"), dict):
        train["adapter"] = {key: adapter[key] for key in adapter if key != "packed_matmul"}
    return train


def _live_of_before(live: dict[str, Any], group_size: object) -> dict[str, Any]:
    """Returns the section ``live`` of a run that an earlier release created, in today's keys."""
    # Labels that clients choose limit nothing any more.
    kept = {key: value for key, value in live.items() if key not in ("cohort_cap", "outlier_limit")}
    # This was the default, for groups of any size. Those below 21 could not satisfy it, so only an
    # earlier release created runs with both.
    if isinstance(group_size, int) and group_size > SMALLEST_OF_CAP:
        return kept
    return {key: value for key, value in kept.items() if (key, value) != ("user_cap", 0.05)}


def _hint_for(text: str) -> str:
    """Suggests a valid value for msgspec's error; empty if the error already does."""
    if text.startswith("Object missing required field `name`"):
        return 'give the run a name, such as name = "mine"'
    place = re.search(r"at `([^`]+)`", text)
    if place is None:
        return ""
    if "matching regex" in text:
        return "use at most 64 letters, digits, -, _ and .; a letter or digit comes first"
    kind: Any = RunConfig
    for name in re.sub(r"\[[^][]*\]", "", place[1]).split("."):
        kinds = [option for option in (kind, *get_args(kind)) if isinstance(option, type)]
        sections = [option for option in kinds if issubclass(option, Section)]
        if not sections or name not in (hints := get_type_hints(sections[0])):
            return ""
        kind = hints[name]
    return f"one of {', '.join(get_args(kind))}" if get_origin(kind) is Literal else ""


def _refuse_unknown(
    raw: dict[str, Any], kind: type[Any], prefix: str, source: str, created_by: str
) -> None:
    hints = get_type_hints(kind)
    for key, value in raw.items():
        if key not in hints:
            hint = _unknown_hint(key, sorted(hints), prefix, created_by)
            raise InputError(f"{source}: unknown key {prefix}{key}", hint=hint)
        for option in (hints[key], *getattr(hints[key], "__args__", ())):
            if not (isinstance(option, type) and issubclass(option, Section)):
                continue
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, dict):
                    _refuse_unknown(item, option, f"{prefix}{key}.", source, created_by)


def _unknown_hint(key: str, known: list[str], prefix: str, created_by: str) -> str:
    if created_by:
        words = f"the run was created by {created_by}, and this is {build_name()}"
        return f"{words}: upgrade this one (docs/UPGRADING.md)"
    if former := former_key_hint(f"{prefix}{key}"):
        return former
    if near := difflib.get_close_matches(key, known, n=1, cutoff=0.5):
        return f"did you mean {prefix}{near[0]}?"
    return f"valid keys here: {', '.join(known)}"
