"""Lists the machine that `deltawire shapes` runs on, with what the trainer would take of it."""

from __future__ import annotations

import os
from pathlib import Path

from deltawire.config import run_config
from deltawire.errors import InputError
from deltawire.launch.new_config.size import CPU, GIB, accelerators_of, this_machine
from deltawire.plan.architecture import Model
from deltawire.plan.layout import Mode, Packing
from deltawire.plan.resolver import default_context, resolve_startable_first, summarize
from deltawire.plan.run_memory import trainer_memory
from deltawire.plan.tables import LACKING
from deltawire.runtime.memory import UNLIMITED, available_host_bytes

TOKENS = 2048
"""Tokens of a batch on processors; more make no step faster there."""
TRAINED: tuple[Mode, ...] = ("full", "lora")
GPU_DEVICE = Path("/dev/nvidia0")
"""Without this file no torch is imported to look for GPUs."""


def machine_rows(model: Model, packing: Packing, context: int | None) -> list[dict[str, str]]:
    """Returns one row for each way to train ``model`` on this machine, in the form of
    `deltawire.plan.tables.needs_rows`.

    Example::

        machine_rows(model, "none", 2048)[0]["GiB each"]  # "4.1"
    """
    on = this_machine() if GPU_DEVICE.exists() else CPU
    if on == CPU:
        return [_on_processors(model, mode) for mode in TRAINED]
    return [_on_accelerators(model, mode, packing, on, context) for mode in TRAINED]


def _on_processors(model: Model, mode: Mode) -> dict[str, str]:
    adapter = {"kind": "lora"} if mode == "lora" else {}
    train = {"adapter": adapter, "compute": "float32", "max_tokens_per_batch": TOKENS}
    config = run_config({"name": "shapes", "train": train}, url="")
    needed, free = trainer_memory(model, config, tokens=TOKENS).total, available_host_bytes()
    known = "" if free == UNLIMITED else f"; {free / GIB:.1f} GiB are free"
    fits = "" if free >= needed else "does not fit: "
    cores = os.cpu_count() or 1
    return _row(
        mode,
        f"this machine, {cores} {'core' if cores == 1 else 'cores'}",
        f"{needed / GIB:.1f}",
        f"{fits}one process in float32, batches of {TOKENS:,} tokens{known}",
    )


def _on_accelerators(
    model: Model, mode: Mode, packing: Packing, on: str, context: int | None
) -> dict[str, str]:
    where = f"this machine, {on}"
    try:
        profile = resolve_startable_first(
            model,
            mode=mode,
            accelerators=accelerators_of(on),
            context=context or default_context(model),
            packing=packing if mode != "full" else "none",
            alternatives=False,
        )
    except InputError as error:
        return _row(mode, where, "", error.message)
    layout = summarize(profile.as_layout())
    speed = f"{profile.estimated_tokens_per_second:,.0f}"
    row = _row(mode, where, f"{profile.peak_with_allowance / GIB:.0f}", layout, speed)
    return row | {LACKING: ", ".join(profile.unsupported)}


def _row(mode: Mode, where: str, memory: str, layout: str, speed: str = "") -> dict[str, str]:
    return {
        "mode": mode,
        "accelerators": where,
        "GiB each": memory,
        "tokens/s (estimate)": speed,
        "layout": layout,
        LACKING: "",
        "reference": "",
    }
