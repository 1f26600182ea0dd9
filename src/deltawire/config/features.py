"""Names the settings that not every release has, and those that earlier releases called otherwise.

A setting of `FEATURES` is a feature. A run that uses one states it under ``needs`` in ``run.json``,
with the release that has it first and the roles that must know it. A process of an earlier release
joins if its role is not among them, and otherwise says which release the run needs. A feature that
a run does not use is left out of ``run.json``, because an earlier release would refuse the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from deltawire.config.base import Section


class Feature(NamedTuple):
    """The release that has a setting first, and the roles that act on it. The trainer acts on every
    setting, so it is not among them."""

    since: str
    roles: tuple[str, ...] = ()


FEATURES: Final[dict[str, Feature]] = {}
"""Settings that came after release 0.1, by dotted key. A key with a value after ``=``, such as
``rollout.engine=new``, is a new value of an older setting."""

RENAMED: Final[dict[str, str]] = {
    "train.learning_rate": "train.optimizer.learning_rate",
    "train.adam_beta1": "train.optimizer.beta1",
    "train.adam_beta2": "train.optimizer.beta2",
    "train.weight_decay": "train.optimizer.weight_decay",
    "train.max_grad_norm": "train.optimizer.max_grad_norm",
    "train.warmup_steps": "train.schedule.warmup_steps",
    "train.micro_batch_groups": "train.max_tokens_per_batch",
}
"""Keys of before, and what they are called now."""

REMOVED: Final[dict[str, str]] = {
    "train.adapter.packed_matmul": "there is one way to multiply by packed weights",
    "train.adapters.packed_matmul": "there is one way to multiply by packed weights",
    "live.cohort_cap": "live.user_cap limits every user's influence",
    "live.outlier_limit": "live.user_cap limits every user's influence",
}
"""Keys of before that nothing replaces, and why."""


def former_key_hint(key: str) -> str:
    """Says what became of a key that an earlier release had; empty for any other key."""
    if key in RENAMED:
        return f"it is called {RENAMED[key]} now"
    return f"leave it out: {REMOVED[key]}" if key in REMOVED else ""


def features_of(config: Section, known: Mapping[str, Feature] = FEATURES) -> list[str]:
    """Returns the features of ``known`` that a configuration uses, by name."""
    found = []
    for name in known:
        key, _, wanted = name.partition("=")
        holders = list(_holders(config, key.split(".")[:-1]))
        last = key.split(".")[-1]
        if any(_uses(one, last, wanted) for one in holders):
            found.append(name)
    return found


def stored_settings(config: Section, known: Mapping[str, Feature] = FEATURES) -> dict[str, Any]:
    """Returns the values of ``run.json``: every setting that all releases have, stated even at its
    default, which may change, and the features that the run uses."""
    raw: dict[str, Any] = msgspec.to_builtins(config)
    used = set(features_of(config, known))
    return without_features(raw, [name for name in known if name not in used and "=" not in name])


def without_features(raw: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Returns the values of a configuration without those that belong to features."""
    for name in names:
        raw = _without(raw, name.partition("=")[0].split("."))
    return raw


def _without(raw: dict[str, Any], path: list[str]) -> dict[str, Any]:
    """Copies the tables on the way to one key, and leaves the key out."""
    top = dict(raw)
    tables = [top]
    for name in path[:-1]:
        found: list[dict[str, Any]] = []
        for table in tables:
            below = table.get(name)
            if isinstance(below, dict):
                table[name] = dict(below)
                found.append(table[name])
            elif isinstance(below, list):
                table[name] = [dict(one) if isinstance(one, dict) else one for one in below]
                found += [one for one in table[name] if isinstance(one, dict)]
        tables = found
    for table in tables:
        table.pop(path[-1], None)
    return top


def _holders(config: Section, tables: list[str]) -> Iterator[Section]:
    """Yields the sections that a path of tables leads to: several if it passes a list of them."""
    sections = [config]
    for name in tables:
        below: list[Any] = []
        for value in (getattr(one, name, None) for one in sections):
            below += value if isinstance(value, list) else [value]
        sections = [one for one in below if isinstance(one, Section)]
    yield from sections


def _uses(section: Section, name: str, wanted: str) -> bool:
    """Returns whether a setting has the wanted value or, without one, another than its default."""
    fields = {one.name: one for one in msgspec.structs.fields(section)}
    if name not in fields:
        return False
    value, field = getattr(section, name), fields[name]
    if wanted:
        return str(value) == wanted
    if field.default_factory is not msgspec.NODEFAULT:
        return bool(value != field.default_factory())
    return bool(value != field.default)
