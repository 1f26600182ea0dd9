"""Applies settings that changed since the run was started, and records the change."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from deltawire.config import RunConfig, changed_settings, flatten
from deltawire.estimates import BudgetSetting
from deltawire.events import SettingsChanged
from deltawire.rl.trainer.resume import metadata_at
from deltawire.runtime.fleet import known_trainer
from deltawire.runtime.needs import config_of
from deltawire.runtime.process import Process
from deltawire.store import Bucket
from deltawire.sync import newest_version
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.run import Run

STEPS_KEY: Final = "train.minibatches"
"""The setting of a step that a controller moves."""


def announce_settings(process: Process, run: Run, config: RunConfig) -> dict[str, Any]:
    """Return the settings in which ``config`` differs from ``run.json``.

    If they are not those that the run had last, record the change, and put them into the trainer's
    status at once, so that processes that start now read them.
    """
    bucket = process.bucket
    origin = config_of(run, url=bucket.url)
    settings = changed_settings(config, origin)
    before = last_settings(bucket, run)
    if before == settings:
        return settings
    flat = flatten(origin)
    old, new = {**flat, **before}, {**flat, **settings}
    changes = {
        key: (old[key], new[key])
        for key in sorted(before.keys() | settings.keys())
        if old[key] != new[key]
    }
    process.events.record(
        SettingsChanged(
            process=process.name,
            at=time.time(),
            version=newest_version(bucket) or 0,
            changes=changes,
        )
    )
    if (status := known_trainer(bucket)) is not None:
        process.lease.confirm()
        bucket.put(keys.TRAINER, encode_json(msgspec.structs.replace(status, settings=settings)))
    return settings


def last_settings(bucket: Bucket, run: Run) -> dict[str, Any]:
    """The changed settings that the run had last: the trainer's status's, or the newest step's."""
    if (status := known_trainer(bucket)) is not None:
        return status.settings
    head = newest_version(bucket)
    found = metadata_at(bucket, run, head)[0].settings if head else {}
    if config_of(run, url=bucket.url).budget.controller == "auto":
        return {key: value for key, value in found.items() if key != STEPS_KEY}
    return found


def moved_settings(setting: BudgetSetting | None, config: RunConfig) -> dict[str, Any]:
    """The settings of a step that a controller moved, so that it can be computed again."""
    if setting is None or setting.steps in (0, config.train.minibatches):
        return {}
    return {STEPS_KEY: setting.steps}


def config_of_step(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The configuration of a step whose recorded ``settings`` a controller may have moved."""
    steps = settings.get(STEPS_KEY, config.train.minibatches)
    if config.budget.controller == "fixed" or steps == config.train.minibatches:
        return config
    train = msgspec.structs.replace(config.train, minibatches=steps)
    return msgspec.structs.replace(config, train=train)
