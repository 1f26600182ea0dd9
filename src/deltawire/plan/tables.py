"""Rows and lines for `deltawire shapes`: the catalogue, a model's needs and one profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from deltawire.plan.accelerators import shipped_accelerators
from deltawire.plan.architecture import Model
from deltawire.plan.catalogue import catalogue, shipped_profiles
from deltawire.plan.layout import MODES, Mode, Packing
from deltawire.plan.profile import Alternative, Profile
from deltawire.plan.resolver import (
    DEFAULT_RANK,
    GIB,
    Accelerators,
    Wish,
    default_context,
    resolve_training_profile,
    smallest_count,
    summarize,
)

LACKING = "cannot start: lacks"
"""The column of the parts that the trainer does not have so far."""


def catalogue_rows() -> list[dict[str, str]]:
    """One row for every shipped profile: each model as full policy, LoRA policy and reference."""
    models = catalogue()
    return [
        {
            "shape": profile.name,
            "parameters": f"{profile.parameters / 1e9:,.1f} B",
            "GiB per accelerator": f"{profile.peak_with_allowance / GIB:.0f}",
            "layout": summarize(profile.as_layout()),
            LACKING: ", ".join(profile.unsupported),
            "config.json": "seen" if models[profile.model].verified else "from memory",
        }
        for profile in shipped_profiles()
    ]


def needs_rows(model: Model, packing: Packing, context: int | None) -> list[dict[str, str]]:
    """Returns the fewest accelerators of each shipped kind that hold a model in each mode, in a
    layout that the trainer can start if any number does."""
    rows = []
    for mode in MODES:
        for name, kind in shipped_accelerators().items():
            if kind.device == "cpu":
                continue
            profile = smallest_profile(model, mode, packing, name, context)
            rows.append(
                {
                    "mode": mode,
                    "accelerators": f"{profile.accelerators} x {kind.name}" if profile else "none",
                    "GiB each": f"{profile.peak_with_allowance / GIB:.0f}" if profile else "",
                    "tokens/s (estimate)": (
                        f"{profile.estimated_tokens_per_second:,.0f}" if profile else ""
                    ),
                    "layout": summarize(profile.as_layout()) if profile else "",
                    LACKING: ", ".join(profile.unsupported) if profile else "",
                    "reference": (
                        profile.references[0].mode.replace("_", " ")
                        if profile and profile.references
                        else ""
                    ),
                }
            )
    return rows


def smallest_profile(
    model: Model, mode: Mode, packing: Packing, accelerator: str, context: int | None = None
) -> Profile | None:
    """Resolves the profile with the fewest accelerators of one shipped kind, if any number does.

    Layouts that the trainer cannot start are considered if there is no other.
    """
    kind = shipped_accelerators()[accelerator]
    wish = Wish(
        mode=mode,
        context=context or default_context(model),
        packing=packing if mode != "full" else "none",
        lora_rank=DEFAULT_RANK if mode == "lora" else 0,
    )
    for startable in (True, False):
        count = smallest_count(model, dataclasses.replace(wish, startable=startable), kind)
        if count is not None:
            return resolve_training_profile(
                model,
                mode=mode,
                accelerators=Accelerators(kind, count),
                context=wish.context,
                packing=wish.packing,
                startable=startable,
                alternatives=False,
            )
    return None


def make_catalogue_profiles(accelerator: str) -> Iterator[Profile]:
    """Resolves every model of the catalogue in every mode on the fewest of one accelerator."""
    for entry in catalogue().values():
        for mode in MODES:
            found = smallest_profile(entry.describe(), mode, entry.native_packing, accelerator)
            if found is not None:
                yield found


def profile_lines(profile: Profile) -> list[str]:
    """Describes one profile in lines of text."""
    memory = (
        f"{profile.peak_with_allowance / GIB:,.1f} of {profile.usable_bytes / GIB:,.1f} GiB on the "
        f"most loaded rank (predicted; {profile.peak_bytes / GIB:,.1f} without the allowance for "
        f"fragmentation), in the phase {profile.peak_phase}"
    )
    time = (
        f"{profile.estimated_seconds_per_step:,.2f} s per micro-batch of every rank, "
        f"{profile.estimated_tokens_per_second:,.0f} tokens/s (estimate, not measured)"
    )
    lines = [
        f"{profile.name} (profile version {profile.version})",
        f"  parameters    {profile.parameters:,}, trained {profile.trained_parameters:,}",
        f"  layout        {summarize(profile.as_layout())}",
        f"  memory        {memory}",
    ]
    lines += [
        f"    {part:<13} {size / GIB:>9,.2f} GiB" for part, size in profile.bytes_per_rank.items()
    ]
    lines += [
        f"  host          {profile.host_bytes_per_rank / GIB:,.1f} GiB per accelerator",
        *_rescoring_lines(profile),
        f"  time          {time}",
        f"  binding       {profile.binding}",
        f"  next cheaper  {_alternative_line(profile.cheaper)}",
        f"  next faster   {_alternative_line(profile.faster)}",
    ]
    lines += _reference_lines(profile)
    if profile.unsupported:
        lines.append(f"  not yet       the trainer lacks: {', '.join(profile.unsupported)}")
    return lines


def _rescoring_lines(profile: Profile) -> list[str]:
    if not profile.rescoring_host_bytes:
        return []
    size = profile.rescoring_host_bytes / GIB
    where = "of host memory on rank 0's machine, for workers' log-probabilities"
    return [f"  re-scoring    {size:,.1f} GiB {where} (trust.rescore_share)"]


def _reference_lines(profile: Profile) -> list[str]:
    """Returns a table of the ways to compute a reference, the choice first."""
    if not profile.references:
        return []
    lines = ["  reference     GiB a rank  host GiB  accelerators  s a micro-batch (estimate)"]
    for number, price in enumerate(profile.references):
        choice = "chosen: " if number == 0 and price.fits else ""
        memory = f"{price.device_bytes / GIB:>10,.1f} {price.host_bytes / GIB:>9,.1f}"
        added = f"+{price.accelerators}"
        lines.append(
            f"    {price.mode:<11} {memory} {added:>13} {price.estimated_seconds_per_step:>10,.2f}"
            f"  {choice}{price.note}"
        )
    return lines


def _alternative_line(other: Alternative | None) -> str:
    if other is None:
        return "not computed"
    if other.layout is None:
        return (
            f"{other.accelerators} accelerators: {other.note}" if other.accelerators else other.note
        )
    return (
        f"{other.accelerators} accelerators: {other.note}, "
        f"{other.peak_with_allowance / GIB:,.1f} GiB each, "
        f"{other.estimated_tokens_per_second:,.0f} tokens/s (estimate)"
    )
