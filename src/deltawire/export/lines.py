"""Models of several adapters over one base, in one process.

A run of several adapters keeps the base in version 0 of its main line, and each adapter in a line
of versions under ``lines/NAME/``, which has all keys of a run::

    RUN/run.json, weights/…                 the base, one version
    RUN/lines/math/run.json, weights/…      adapter "math": version 0, 1, 2, …
    RUN/lines/code/run.json, weights/…      adapter "code": version 0, 1, 2, …

The model of a line has its own modules and adapter, and shares the frozen parameters with every
other one of the process, so that a base lies in memory once.
"""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import torch

from deltawire.config import AdapterConfig, RunConfig
from deltawire.errors import InputError
from deltawire.export.adapter import PREFIX, adapted, open_model
from deltawire.export.models import fetch_model_files, move_to
from deltawire.export.source import open_source
from deltawire.placement.live import publish_only
from deltawire.runtime.lines import run_of_line
from deltawire.runtime.needs import config_of
from deltawire.store import Bucket
from deltawire.sync import load_mirror, read_run
from deltawire.wire.run import Run

_bases: WeakValueDictionary[tuple[str, str], Any] = WeakValueDictionary()
_opening = threading.Lock()


def shared_base(base: Any) -> Any:
    """Returns a model with modules of its own, and the parameters and buffers of ``base``."""
    held = [*base.parameters(), *base.buffers()]
    return copy.deepcopy(base, {id(one): one for one in held})


def line_model(base: Any, config: AdapterConfig, *, seed: int = 0) -> Any:
    """Returns the model of an adapter over ``base``, whose parameters it shares."""
    own = msgspec.structs.replace(config, packed="none", packed_layers=[])
    model = adapted(shared_base(base), own, seed=seed)
    publish_only(model, PREFIX)
    model._line_base = (base,)  # It stays open while a model over it lives.
    return model


def open_base(bucket: Bucket, digest: str, device: torch.device) -> Any:
    """Returns the base of a run of several adapters, frozen and on ``device``; one for a process.

    ``digest`` is what the line says of it. Raises `InputError` if the run has another base, and
    `CorruptError` if its version 0 is gone.
    """
    place = (f"{bucket.url} {digest}", str(device))
    with _opening:
        base = _bases.get(place)
        if base is None:
            base = _bases[place] = _load_base(bucket, digest).to(device)
    return base


def require_base(bucket: Bucket, digest: str) -> Run:
    """Returns the run whose version 0 is the base; raises `InputError` if it is another base."""
    run = read_run(bucket)
    if run.digest != digest:
        raise InputError(
            f"the adapter is of another base: its line names {digest[:16]}, the run's base is "
            f"{run.digest[:16]}",
            hint="start the line's run again with its own base",
            run=bucket.url,
        )
    return run


def _load_base(bucket: Bucket, digest: str) -> Any:
    run = require_base(bucket, digest)
    config = config_of(run, url=bucket.url)
    with fetch_model_files(bucket, run) as folder:
        model = open_model(Path(folder), config.train.base_adapter)
    mirror = load_mirror(bucket, run, at=0)
    open_source("bf16", model).restore(mirror)
    return model.eval().requires_grad_(requires_grad=False)


def empty_line(folder: Path, config: AdapterConfig, *, seed: int = 0) -> Any:
    """Returns the model of a line without values, to be sharded: each rank reads its rows of the
    base, and no rank holds all of it."""
    model = open_model(folder, config, seed=seed, meta=True)
    publish_only(model, PREFIX)
    return model


def holds_base(model: Any) -> bool:
    """Returns whether a line's model has the values of its base."""
    return hasattr(model, "_line_base")


def open_policy(
    bucket: Bucket,
    config: RunConfig,
    folder: Path,
    *,
    adapter: AdapterConfig,
    seed: int = 0,
    device: torch.device | None = None,
) -> Any:
    """Returns the model of a run's files with its adapter, on ``device``, weights unset; of a line,
    the base is loaded already. Raises `InputError`.
    """
    device = device or torch.device("cpu")
    if config.line is None:
        return move_to(open_model(folder, adapter, seed=seed), device)
    above = run_of_line(bucket, config.line.name)
    return line_model(open_base(above, config.line.base, device), adapter, seed=seed)
