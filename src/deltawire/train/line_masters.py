"""Masters of several adapters over one base that is sharded over ranks.

Each line of a run (`deltawire.export.lines`) has a model with modules and process groups of its
own. The first one that is opened reads this rank's rows of the base; later ones use the memory of
its frozen shards::

    line "math"    q_proj ── base_layer ─┐
                             lora_A, B   ├──▶ this rank's rows of the base, once
    line "code"    q_proj ── base_layer ─┘
                             lora_A, B

FSDP2 pads a shard whose rows do not divide by the ranks when its model computes for the first time:
of such tensors each line then has a copy.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakValueDictionary

import torch

from deltawire.config import RunConfig
from deltawire.errors import InputError
from deltawire.export.adapter import PREFIX
from deltawire.export.cast import restore_part
from deltawire.export.lines import require_base
from deltawire.export.shards import rows_of_rank
from deltawire.placement.live import module_tensors, publish_only, saved_buffers
from deltawire.runtime.lines import run_of_line
from deltawire.store import Bucket
from deltawire.sync import load_mirror
from deltawire.train.masters import MasterWeights
from deltawire.train.parallel import TrainerMesh

_models: WeakValueDictionary[str, Any] = WeakValueDictionary()
_opening = threading.Lock()


def line_masters(bucket: Bucket, config: RunConfig, model: Any, mesh: TrainerMesh) -> MasterWeights:
    """Returns the masters of a line, whose base has values; the adapter's are unset.

    ``model`` has no values yet, ``config.line`` names the base. All ranks call this together.
    Raises `InputError` if the run has another base, `CorruptError` if its version 0 is gone.
    """
    assert config.line is not None
    above = run_of_line(bucket, config.line.name)
    place = f"{above.url} {config.line.base}"
    with _opening:
        held = _models.get(place)
        masters = MasterWeights(model, config.train, mesh=mesh, frozen=held, seed=config.seed)
        if held is None:
            _read_base(above, config.line.base, model)
        else:
            given = saved_buffers(held)
            for name, buffer in saved_buffers(model).items():
                buffer.copy_(given[name])
        _models[place] = model
    return masters


@torch.no_grad()
def _read_base(bucket: Bucket, digest: str, model: Any) -> None:
    """Sets this rank's rows of all that is not the adapter's."""
    run = require_base(bucket, digest)
    publish_only(model, "")
    held = {name: one for name, one in module_tensors(model).items() if not name.startswith(PREFIX)}
    publish_only(model, PREFIX)
    specs = {spec.name: spec for spec in run.tensors}
    if odd := sorted(held.keys() ^ specs.keys()):
        raise InputError(
            f"the line's model and the run's base name different tensors: {odd[:5]}", run=bucket.url
        )
    rows = {name: rows_of_rank(one) for name, one in held.items()}
    wanted = {name: one for name, one in rows.items() if one is None or one[0] < one[1]}
    mirror = load_mirror(bucket, run, at=0, wanted=wanted)
    for name, tensor in held.items():
        restore_part(tensor, specs[name], mirror)
