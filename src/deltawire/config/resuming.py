"""Lists the settings that may change when a run is continued, and applies such changes.

``run.json`` is written once and never changed. A change is a setting of this table with its new
value: the trainer's status carries the present ones for processes that start later, and each
version's commit metadata carries those of its step, so that the step can be computed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, get_type_hints

import msgspec

from deltawire.config.parsing import parse_config
from deltawire.config.sections import ParityLimits, RunConfig
from deltawire.errors import InputError

Effect = Literal["step", "start"]

_LIMITS: Final = {
    f"parity.{action}.{name}": "step"
    for action in ("warn", "mask", "stop")
    for name in get_type_hints(ParityLimits)
}

RESUMABLE: Final[dict[str, str]] = {
    "train.versions": "step",
    "train.optimizer.learning_rate": "step",
    "train.optimizer.max_grad_norm": "step",
    "train.optimizer.weight_decay": "step",
    "train.schedule.steps": "step",
    "train.schedule.decay_steps": "step",
    "train.schedule.floor": "step",
    "train.loss.kl_coefficient": "step",
    "train.loss.entropy_coefficient": "step",
    "train.max_tokens_per_batch": "step",
    "train.activation_checkpointing": "step",
    "train.max_failed_groups": "step",
    "train.checkpoint_every": "step",
    "train.final_checkpoint": "step",
    "train.anchor_every": "step",
    "train.adapter.merge_floor": "step",
    "train.compaction": "step",
    "train.offload": "start",
    "train.publisher_offload": "start",
    "train.device": "start",
    "train.ranks": "start",
    "train.replicate": "start",
    "train.tensor_parallel": "start",
    "train.expert_parallel": "start",
    "device": "start",
    "rollout.device": "start",
    "evaluate.device": "start",
    "rollout.workers": "start",
    "rollout.slots": "start",
    "rollout.concurrent": "start",
    "rollout.step_limit_s": "start",
    "rollout.episode_limit_s": "start",
    "rollout.on_failure": "start",
    "rollout.max_failed": "start",
    "evaluate.every": "start",
    "evaluate.samples": "start",
    "evaluate.slots": "start",
    "live.stop_effective_share": "step",
    "budget.stop_when": "step",
    "budget.measure": "step",
    "probes.action": "step",
    "probes.keep": "step",
    "threads": "start",
    "shape": "start",
    "faults.silence_s": "start",
    "faults.stall_s": "start",
    "faults.long_s": "start",
    "retain.rollouts": "step",
    "retain.versions": "step",
    "retain.events_days": "step",
    "retain.checkpoints": "step",
    "retain.proofs": "step",
    "retain.captures_days": "start",
    "retain.lineage_days": "start",
    "retain.feedback_days": "start",
    "workers.allow": "step",
    "workers.quota": "step",
    "trust.rescore_share": "step",
    "trust.rescore_waiting": "step",
    "trust.logprob_gap": "step",
    **_LIMITS,
}
"""The keys that may differ when a run is continued; with any other change it would be a different
run.

``step``: takes effect at the continued trainer's next step. ``start``: in processes that start from
then on; `deltawire run` restarts all that it started, and a worker that was started by hand keeps
its values.
"""


def flatten(config: msgspec.Struct, prefix: str = "") -> dict[str, Any]:
    """Flattens a configuration to dotted keys and plain values."""
    flat: dict[str, Any] = {}
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, msgspec.Struct):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = msgspec.to_builtins(value)
    return flat


def differences(ours: RunConfig, theirs: RunConfig) -> list[str]:
    """Lists the dotted keys, outside `RESUMABLE`, in which two configurations differ."""
    return sorted(_differing(ours, theirs) - RESUMABLE.keys())


def changed_settings(ours: RunConfig, theirs: RunConfig) -> dict[str, Any]:
    """Returns our values of the `RESUMABLE` keys in which two configurations differ."""
    flat = flatten(ours)
    return {key: flat[key] for key in sorted(_differing(ours, theirs) & RESUMABLE.keys())}


def _differing(ours: RunConfig, theirs: RunConfig) -> set[str]:
    left, right = flatten(ours), flatten(theirs)
    return {key for key in left.keys() | right.keys() if left.get(key) != right.get(key)}


def with_settings(config: RunConfig, settings: Mapping[str, Any], *, source: str) -> RunConfig:
    """Returns the configuration with these settings changed.

    Raises `InputError` naming ``source`` for a key that is not in `RESUMABLE`, and for values that
    make the configuration invalid.
    """
    if not settings:
        return config
    raw: dict[str, Any] = msgspec.to_builtins(config)
    for key, value in settings.items():
        if key not in RESUMABLE:
            raise InputError(f"{source}: {key[:80]!r} cannot change once the run has started")
        *tables, last = key.split(".")
        table = raw
        for name in tables:
            table = table[name]
        table[last] = value
    return parse_config(raw, source=source)


def require_same(ours: RunConfig, theirs: RunConfig, *, url: str) -> None:
    """Raises `InputError` if the run at ``url`` was started with a different configuration; the
    keys of `RESUMABLE` may differ.
    """
    if not (changed := differences(ours, theirs)):
        return
    left, right = flatten(theirs), flatten(ours)
    values = "; ".join(
        f"{key} was {_shown(left.get(key))} and is now {_shown(right.get(key))}"
        for key in changed[:2]
    )
    raise InputError(
        f"the run in this bucket was started with another {', '.join(changed[:4])}: {values}",
        hint="restore that, or choose another --out or --bucket to start a new run; "
        "docs/TRAINING.md lists the keys that may change",
        run=url,
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
