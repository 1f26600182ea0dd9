"""Sizes the trainer for a machine: ranks, adapter, checkpointing and offload, by the plan."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from deltawire.config import RunConfig, check_config
from deltawire.errors import InputError
from deltawire.launch.shapes import settings_of
from deltawire.plan.accelerators import accelerator_named, shipped_accelerators
from deltawire.plan.architecture import Model
from deltawire.plan.catalogue import find_model
from deltawire.plan.layout import Mode
from deltawire.plan.profile import Profile
from deltawire.plan.resolver import Accelerators, resolve_training_profile
from deltawire.plan.run_memory import RunMemory, run_memory
from deltawire.runtime.memory import available_host_bytes

CPU = "cpu"
TRAINER_SHARE = 0.5
"""The trainer's share of a processor's memory: two workers and the evaluator hold the model too."""
SHARE_OF_FREE = 0.9
"""The share of the free memory that a new run may take: predictions err."""
WORKERS = 2
"""Workers that a new run starts on this machine."""
SHARE_OF_SAMPLERS = 0.4
"""The share of that which workers and evaluator may take."""
BATCHES = (4096, 2048, 1024, 512, 256)
"""Tokens of a batch to choose from. More make no step faster on processors."""
SLOTS = (64, 32, 16, 8)
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
    accelerators = accelerators_of(on)
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
    found = {key: settings[key] for key in kept if key in settings}
    fitted, prediction = fit_processors(path, model, found, context=context)
    return Sizing(prediction or reason, found | fitted)


def fit_processors(
    path: str, model: Model, settings: dict[str, Any], *, context: int
) -> tuple[dict[str, Any], str]:
    """Chooses what makes a run fit into this machine's memory: the tokens of a batch, and the
    sequences that samplers decode at a time. Returns the settings, and the prediction in words.

    Threads are those of one process: trainer and workers compute at the same time, and threads of
    more processes than there are cores wait for each other.
    """
    free = SHARE_OF_FREE * min(available_host_bytes(), 1 << 50)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = max(1, (cores or 1) // (1 + WORKERS))
    fixed: dict[str, Any] = {"threads": threads, "train.compute": "float32"}
    sizes = {
        "train.max_tokens_per_batch": BATCHES[-1],
        "rollout.slots": SLOTS[-1],
        "evaluate.slots": SLOTS[-1],
    }

    def predicted() -> RunMemory | None:
        return run_memory(model, _config(path, settings | fixed | sizes, context))

    found = predicted()
    if found is None:
        return fixed, ""
    for slots in SLOTS:
        sizes["rollout.slots"] = sizes["evaluate.slots"] = slots
        found = predicted() or found
        if found.total - found.processes[0].total <= SHARE_OF_SAMPLERS * free:
            break
    for tokens in BATCHES:
        sizes["train.max_tokens_per_batch"] = tokens
        found = predicted() or found
        if found.total <= free:
            break
    adapter = settings.get("train.adapter.kind") == "lora"
    parts = (f"{one.count} x {one.process} {one.total / GIB:.1f}" for one in found.processes)
    words = (
        f"Trains {'a LoRA adapter' if adapter else 'the whole model'} of "
        f"{model.parameters / 1e9:.2f} B parameters. Predicted, in GiB: {', '.join(parts)}; "
        f"{free / SHARE_OF_FREE / GIB:.1f} are free."
    )
    return fixed | sizes, words


def _config(path: str, settings: dict[str, Any], context: int) -> RunConfig:
    """Returns the run that `deltawire.launch.new_config.new_run` will write, as far as memory
    depends on it."""
    values: dict[str, Any] = {"name": "sizes", "model": {"path": path}}
    values["rollout"] = {"workers": WORKERS, "group_size": 8, "context": context}
    for key, value in settings.items():
        place, *parts = values, *key.split(".")
        for part in parts[:-1]:
            place = place.setdefault(part, {})
        place[parts[-1]] = value
    return check_config(values, source="the sizes")


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


def accelerators_of(on: str) -> Accelerators:
    """Returns the accelerators that ``--on`` names; raises `InputError` for others."""
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
