"""Refuses engines whose weights could not be kept equal to the run's, before they serve."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from deltawire.errors import InputError
from deltawire.placement.placement import Placement
from deltawire.wire.run import TensorSpec


def refuse_older(engine: str, found: str, least: str, *, because: str) -> None:
    """Raises `InputError` for a version of ``engine`` below ``least``, which ``because`` explains.
    Only the first three numbers count."""

    def numbers(version: str) -> list[int]:
        return [int(part) for part in version.split(".")[:3] if part.isdecimal()]

    if numbers(found) < numbers(least):
        raise InputError(f"{engine} {found} {because}", hint=f"use {least} or a later version")


def refuse_flags(engine: str, flags: Mapping[str, bool]) -> None:
    """Raises `InputError` for the first of ``flags`` that is in use: a swap was not tested with
    it."""
    for flag, used in flags.items():
        if used:
            raise InputError(
                f"deltawire does not follow a run under {engine}'s {flag}",
                hint=f"serve without {flag}",
            )


def refuse_untested(engine: str, arguments: Any, tested: Mapping[str, Any]) -> None:
    """Raises `InputError` for the first of a server's ``arguments`` that has another value than
    the ``tested`` one. An argument that this version of the engine lacks is left out."""
    refuse_flags(
        engine,
        {
            f"--{name.replace('_', '-')}": getattr(arguments, name, value) != value
            for name, value in tested.items()
        },
    )


def refuse_adapters(engine: str, tensors: Iterable[TensorSpec]) -> None:
    """Raises `InputError` for the first tensor of an adapter, where ``engine``'s slots are not
    written to."""
    for spec in tensors:
        if ".lora_" in spec.name:
            raise InputError(
                f"the run holds an adapter ({spec.name}), which deltawire does not put into "
                f"{engine}'s slots",
                hint="serve the adapter with vLLM or the embedded engine",
            )


def refuse_derived(engine: str, model: torch.nn.Module, names: Collection[str]) -> None:
    """Raises `InputError` if a module has a tensor of ``names``, which ``engine`` derives from
    weights after loading, outside of parameters: no swap would reach it."""
    for name, module in model.named_modules():
        if any(getattr(module, derived, None) is not None for derived in names):
            raise InputError(
                f"{engine} derived weights of latent attention from others in {name}, as copies "
                "that deltawire does not update",
                hint="serve this model with vLLM",
            )


def refuse_changed(changes: Mapping[str, str] | None, *, engine: str, hint: str) -> None:
    """Raises `InputError` if weights changed or moved after the loader wrote them, according to
    `parameter_sums.differences`; None stands for not observed.
    """
    if changes is None:
        raise InputError(
            f"{engine}'s post-processing of the loaded weights was not observed",
            hint="choose a load format that loads a checkpoint itself",
        )
    if changes:
        name, how = next(iter(sorted(changes.items())))
        others = f", and {len(changes) - 1} more" if len(changes) > 1 else ""
        raise InputError(
            f"{engine} changed weights for its kernels after loading: {name} {how}{others}",
            hint=hint,
        )


def refuse_unreached(placement: Placement, model: torch.nn.Module) -> None:
    """Raises `InputError` for parameters that no tensor of the run is loaded into, since they would
    stay at unknown values. Not checked where the loader computes tensors: what those reach is
    unknown."""
    if placement.unplaced:
        return
    sizes = {n: held.numel() for n, held in model.named_parameters(remove_duplicate=False)}
    unreached = sorted(
        name for name, count in placement.uncovered.items() if sizes.get(name, 0) == count > 1
    )
    if unreached:
        others = f" and {len(unreached) - 1} more" if len(unreached) > 1 else ""
        raise InputError(
            f"no tensor of the run is loaded into the parameter {unreached[0]}{others}",
            hint="publish those tensors too (unchanged tensors cost nothing), and serve without "
            "quantization",
        )
