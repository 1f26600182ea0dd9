"""Compares runs: which differ only by their seed, and where their configurations differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from deltawire.config import flatten
from deltawire.display import redact
from deltawire.errors import InputError
from deltawire.runtime.needs import config_of
from deltawire.wire.run import Run

APART = frozenset({"seed", "name"})
"""Settings that runs of one family may differ in."""


class SettingDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that differs, with its value in each run as JSON; None where it has none."""

    key: str
    values: list[str | None]


class RunComparison(msgspec.Struct, frozen=True, kw_only=True):
    """``families`` are runs, by number, that differ in seed and name only: their curves are drawn
    as one band. ``same`` settings are equal in all runs."""

    families: list[list[int]]
    differences: list[SettingDifference]
    same: int


def compare(runs: Sequence[Run]) -> RunComparison:
    """Compares the configurations that runs were started with; credentials are left out."""
    settings = [settings_of(run) for run in runs]
    families: dict[str, list[int]] = {}
    for number, one in enumerate(settings):
        kept = {key: value for key, value in one.items() if key not in APART}
        # Runs without a configuration are not known to be alike.
        name = json.dumps(kept, sort_keys=True) if kept else f"run {number}"
        families.setdefault(name, []).append(number)
    every = sorted({key for one in settings for key in one})
    found = [
        SettingDifference(key=key, values=[one.get(key) for one in settings])
        for key in every
        if len({one.get(key) for one in settings}) > 1
    ]
    return RunComparison(
        families=list(families.values()), differences=found, same=len(every) - len(found)
    )


def settings_of(run: Run) -> dict[str, str]:
    """A run's settings by dotted key, as JSON; defaults included where this release knows them."""
    if not run.config:
        return {}
    try:
        flat: Mapping[str, Any] = flatten(config_of(run, url=""))
    except InputError:
        flat = _flat(run.config)
    return {
        key: json.dumps(value, sort_keys=True, default=str)
        for key, value in redact(dict(flat)).items()
    }


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, member in value.items():
        if isinstance(member, Mapping):
            flat |= _flat(member, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = member
    return flat
