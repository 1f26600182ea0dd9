"""Sizes the trainer for a machine: ranks, adapter, checkpointing and offload, by the plan."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from deltawire.errors import InputError
from deltawire.launch.shapes import settings_of
from deltawire.plan.accelerators import accelerator_named, shipped_accelerators
from deltawire.plan.architecture import Model
from deltawire.plan.catalogue import find_model
from deltawire.plan.layout import Mode
from deltawire.plan.profile import Profile
from deltawire.plan.resolver import Accelerators, resolve_training_profile
from deltawire.runtime.memory import available_host_bytes

CPU = "cpu"
TRAINER_SHARE = 0.5
"""The trainer's share of a processor's memory: two workers and the evaluator hold the model too."""
GIB = 2.0**30
_ON = re.compile(r"([1-9][0-9]{0,3})x([A-Za-z0-9.-]{1,32})")
_KINDS = ("b300", "b200", "h200", "h100", "a100")


@dataclass(frozen=True)
class Sizing:
    """Settings of the trainer by dotted key, with the reason in one sentence."""

    reason: str
    settings: dict[str, Any] = field(default_factory=dict)
    on_gpu: bool = False

    @property
    def lora(self) -> bool:
        """True if an adapter is trained, not the whole model."""
        return self.settings.get("train.adapter.kind") == "lora"


def this_machine() -> str:
    """This machine's accelerators as ``--on`` names them; ``cpu`` if it has none that are known."""
    try:
        import torch
    except ImportError:
        return CPU
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return CPU
    name = torch.cuda.get_device_name(0).lower()
    kind = next((kind for kind in _KINDS if kind in name), "")
    return f"{count}x{'a100-80gb' if kind == 'a100' else kind}" if kind else CPU


def size_trainer(
    path: str, *, on: str, mode: Literal["auto", "full", "lora"], context: int
) -> Sizing:
    """Sizes the trainer of the model in directory ``path``, for sequences of ``context`` tokens.

    ``on`` is ``cpu`` or accelerators such as ``8xh200``; ``auto`` trains the whole model if that
    fits, otherwise a LoRA adapter. Raises `InputError` if nothing fits, or the plan does not
    describe the model.
    """
    model, _ = find_model(str(Path(path)))
    accelerators = _accelerators(on)
    modes: tuple[Mode, ...] = ("full", "lora") if mode == "auto" else (mode,)
    profile = _first_that_fits(model, modes, accelerators, context)
    peak = profile.peak_with_allowance / GIB
    usable = profile.usable_bytes / GIB
    kind = "the whole model" if profile.mode == "full" else "a LoRA adapter"
    reason = (
        f"Trains {kind} of {model.parameters / 1e9:.2f} B parameters: {peak:.1f} of {usable:.0f} "
        f"GiB {'of memory' if on == CPU else f'on each of {on}'}, predicted by deltawire shapes."
    )
    settings = settings_of(profile)
    if on != CPU:
        return Sizing(reason, settings, on_gpu=True)
    # One process computes in float32; offload would move memory to where it already is.
    kept = ("train.adapter.kind", "train.adapter.rank", "train.activation_checkpointing")
    return Sizing(reason, {key: settings[key] for key in kept if key in settings})


def _first_that_fits(
    model: Model, modes: tuple[Mode, ...], accelerators: Accelerators, context: int
) -> Profile:
    context = min(context, model.context or context)
    for mode in modes[:-1]:
        try:
            return _resolve(model, mode, accelerators, context)
        except InputError:
            continue
    return _resolve(model, modes[-1], accelerators, context)


def _resolve(model: Model, mode: Mode, accelerators: Accelerators, context: int) -> Profile:
    return resolve_training_profile(
        model,
        mode=mode,
        accelerators=accelerators,
        context=context,
        startable=True,
        alternatives=False,
    )


def _accelerators(on: str) -> Accelerators:
    if on == CPU:
        gib = TRAINER_SHARE * min(available_host_bytes(), 1 << 50) / GIB
        cpu = shipped_accelerators()[CPU]
        return Accelerators(msgspec.structs.replace(cpu, memory_gib=gib, per_node=1), 1)
    match = _ON.fullmatch(on)
    if match is None:
        raise InputError(
            f"--on {on} names no accelerators",
            hint="write 8xh200 for eight of them, or cpu",
        )
    return Accelerators(accelerator_named(match[2].lower(), shipped_accelerators()), int(match[1]))
