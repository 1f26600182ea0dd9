"""The configurations of a run's version lines: one for each of several adapters."""

from __future__ import annotations

import zlib

import msgspec

from deltawire.config.adapters import AdapterConfig, LineConfig
from deltawire.config.sections import RunConfig


def publication_config(config: RunConfig, exporter: str) -> RunConfig:
    """Returns the configuration of the line that holds a run's versions by another exporter."""
    return msgspec.structs.replace(
        config,
        name=f"{config.name[:40]}.{exporter}",
        train=msgspec.structs.replace(config.train, exporter=exporter, also_publish=[]),
        rollout=msgspec.structs.replace(config.rollout, weights=""),
    )


def line_config(config: RunConfig, name: str, *, base: str) -> RunConfig:
    """Returns the configuration of a run's line: that of a run with its adapter and its tasks.

    ``base`` is the digest of the run's version 0. Each line draws its own random numbers.
    """
    own = next(one for one in config.train.adapters if one.name == name)
    adapter = AdapterConfig(**{key: getattr(own, key) for key in AdapterConfig.__struct_fields__})
    train = msgspec.structs.replace(config.train, adapter=adapter, adapters=[])
    return msgspec.structs.replace(
        config,
        name=f"{config.name[:31]}.{name}",
        seed=(config.seed ^ zlib.crc32(name.encode())) & 0x7FFFFFFF,
        task=own.task or config.task,
        train=train,
        line=LineConfig(name=name, base=base),
    )
