"""Starts a run from a training shape: the settings that follow from its profile.

A profile says how a model is laid out over accelerators. Here it becomes settings of a run's
configuration, and is checked against the run's model and the settings that its file has already.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from deltawire.config import RunConfig, check_config
from deltawire.errors import InputError
from deltawire.packed_formats import packed_format
from deltawire.plan.architecture import Model
from deltawire.plan.catalogue import find_model
from deltawire.plan.configuration import decode_config
from deltawire.plan.families import describe
from deltawire.plan.profile import Profile, read_profile
from deltawire.plan.resolver import SHAPE, resolve_shape, unsupported_parts


def find_profile(shape: str) -> Profile:
    """Reads the profile of a file, or resolves a named shape.

    Raises `InputError` if it is neither.
    """
    if Path(shape).is_file():
        return read_profile(Path(shape))
    if SHAPE.fullmatch(shape.lower()):
        return resolve_shape(shape)
    raise InputError(
        f"--shape {shape} is neither a file nor the name of a shape",
        hint="name one such as qwen3-30b-a3b-lora-8xh200, or write a file with "
        "deltawire shapes MODEL --on NxNAME --out FILE.json",
    )


def model_of(config: RunConfig) -> Model:
    """Describes the model of a run from its directory's config.json, or from what it builds.

    Raises `InputError` for a missing directory and a model that the plan does not describe.
    """
    if config.model.path:
        return find_model(config.model.path)[0]
    assert config.model.build is not None
    fields = msgspec.json.encode(config.model.build.architecture())
    return describe(decode_config(fields, where="model.build"), name=config.name)


def settings_of(profile: Profile) -> dict[str, Any]:
    """Returns the settings that follow from a profile, by dotted key.

    Raises `InputError` for a shape that is not a trainer's, and for one with parts that the trainer
    lacks, naming them.
    """
    layout = profile.as_layout()
    if layout.mode == "reference":
        raise InputError(
            f"shape {profile.name} is a reference's, not a trainer's",
            hint="give the shape of the policy, in mode full or lora",
        )
    # The list in the profile may come from another release.
    if missing := unsupported_parts(layout):
        raise InputError(
            f"shape {profile.name}: the trainer cannot do {', '.join(missing)} so far",
            hint="plan with deltawire shapes --startable, which leaves such layouts out",
        )
    settings: dict[str, Any] = {
        "train.ranks": layout.ranks,
        "train.replicate": layout.replicate,
        "train.tensor_parallel": layout.tensor,
        "train.expert_parallel": layout.expert,
        "train.compute": "bfloat16",
        "train.packing": "auto",
        "train.max_tokens_per_batch": layout.context * layout.sequences,
        "train.activation_checkpointing": layout.checkpointing,
        "train.offload": layout.offload,
        "train.optimizer.kind": layout.optimizer,
        "train.adapter.kind": "lora" if layout.mode == "lora" else "none",
    }
    if layout.mode == "lora":
        settings["train.adapter.rank"] = layout.lora_rank
        settings["train.adapter.packed"] = packed_format(layout.packing)
    if profile.device:
        settings["train.device"] = profile.device
    return settings


def shaped_config(values: dict[str, Any], profile: Profile, *, source: str) -> RunConfig:
    """Checks a file's values with the settings of a profile, which the configuration then carries.

    Raises `InputError` for settings of the file that contradict the profile, for sequences that are
    longer than it plans for, and for a profile of another model; and as `settings_of` does.

    Example::

        config = shaped_config(read_values(path), find_profile("shape.json"), source=str(path))
    """
    plain = check_config(values, source=source)
    settings = settings_of(profile)
    if (price := _reference_of(plain, profile)) is not None:
        settings["reference.mode"] = price
    given = {key: value for key in settings if (value := _given(values, key)) is not None}
    if wrong := [key for key, value in given.items() if value != settings[key]]:
        said = "; ".join(f"{key} is {given[key]!r}, not {settings[key]!r}" for key in wrong)
        raise InputError(
            f"{source} contradicts the shape {profile.name}: {said}",
            hint="leave these keys out, or choose another shape",
        )
    _require_context(plain, profile, source=source)
    _require_model(plain, profile, source=source)
    shaped = msgspec.json.decode(msgspec.json.encode(values))
    for key, value in settings.items():
        *tables, last = key.split(".")
        table = shaped
        for name in tables:
            table = table.setdefault(name, {})
        table[last] = value
    config = check_config(shaped, source=f"{source} with the shape {profile.name}")
    return msgspec.structs.replace(config, shape=msgspec.to_builtins(profile))


def _reference_of(config: RunConfig, profile: Profile) -> str | None:
    """Returns the value of ``reference.mode`` that the profile chooses; None if it does not decide.

    Raises `InputError` for a mode of the configuration that the profile found not to fit.
    """
    if config.reference_mode == "none" or config.reference.model or not profile.references:
        return None
    prices = {price.mode: price for price in profile.references}
    if config.reference.mode == "auto":
        choice = profile.references[0]
        if not choice.fits:
            raise InputError(
                f"shape {profile.name} has no room for a reference: {choice.note}",
                hint='set train.loss.kl = "none", or choose another shape',
            )
        return choice.mode
    asked = prices.get(config.reference.mode)
    if asked is not None and not asked.fits:
        raise InputError(
            f"reference.mode {asked.mode} does not fit the shape {profile.name}: {asked.note}",
            hint="leave reference.mode out, or choose another shape",
        )
    return config.reference.mode


def _given(values: dict[str, Any], key: str) -> Any:
    """Returns a file's value of a dotted key, None if the file does not set it."""
    found: Any = values
    for name in key.split("."):
        if not isinstance(found, dict) or name not in found:
            return None
        found = found[name]
    return None if key == "reference.mode" and found == "auto" else found


def _require_context(config: RunConfig, profile: Profile, *, source: str) -> None:
    """Raises `InputError` if the run's sequences may be longer than the shape's."""
    longest = profile.layout.context
    key, asked = "rollout.context", config.rollout.context
    if config.midtrain is not None:
        key, asked = "midtrain.sequence_length", config.midtrain.sequence_length
    if asked > longest:
        raise InputError(
            f"{source}: {key} is {asked}, and the shape {profile.name} plans for sequences of "
            f"{longest} tokens",
            hint=f"lower {key}, or plan with deltawire shapes --context {asked}",
        )


def _require_model(config: RunConfig, profile: Profile, *, source: str) -> None:
    """Raises `InputError` unless the shape was planned for the run's model."""
    model = model_of(config)
    if model.fingerprint != profile.architecture:
        raise InputError(
            f"{source}: the shape {profile.name} is for another model: {profile.model} with "
            f"{profile.parameters:,} parameters; the run's has {model.parameters:,}",
            hint="plan for this one with deltawire shapes, or correct model.path",
        )
