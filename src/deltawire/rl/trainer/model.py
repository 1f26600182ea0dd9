"""Opens the model that a trainer trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from deltawire.config import RunConfig
from deltawire.export.adapter import open_model
from deltawire.export.lines import empty_line, open_policy
from deltawire.export.models import fetch_model_files
from deltawire.placement.device import resolve_device
from deltawire.store import Bucket
from deltawire.train.parallel import is_sharded, to_device
from deltawire.train.parallel.ranks import local_rank, world_of
from deltawire.wire.run import Run


def open_policy_model(bucket: Bucket, run: Run, config: RunConfig) -> Any:
    """Returns the policy's model on this rank's device, weights unset; if they will be sharded,
    they have no memory yet. Of a line that is not sharded, the base is loaded.
    """
    torch.set_num_threads(config.threads)
    device = resolve_device(config.device_of("trainer"), index=local_rank())
    with fetch_model_files(bucket, run) as folder:
        sharded = is_sharded(config.train, world_of()[1])
        if config.line is not None and sharded:
            model = empty_line(Path(folder), config.train.adapter, seed=config.seed)
            return to_device(model, device)
        if config.line is not None:
            return open_policy(
                bucket, config, Path(folder), adapter=config.train.adapter, device=device
            )
        # A merged adapter is in no version, so it starts with the values that its seed gives.
        meta = sharded and config.train.exporter != "merged"
        model = open_model(Path(folder), config.train.adapter, seed=config.seed, meta=meta)
    return to_device(model, device)
