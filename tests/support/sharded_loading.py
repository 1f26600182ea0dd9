"""One rank of several, alone in a process: opens a run's model and restores its shards.

Run as a script with a bucket's URL and the number of ranks. The other ranks are made up (torch's
fake process group), so nothing is exchanged. Prints as JSON the most bytes of tensors that existed
together, and the sizes to compare that with: for a model without memory, and for a whole one.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from deltawire.config import parse_config
from deltawire.export.adapter import open_model
from deltawire.export.models import fetch_model_files
from deltawire.export.shards import local_part
from deltawire.export.source import wanted_of
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, read_run
from deltawire.train import dither, served_share
from deltawire.train.masters import MasterWeights


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations made and that still exist, and their peak;
    tensors that alias NumPy arrays, such as a mirror's, are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in tree_iter(result):
            if isinstance(one, torch.Tensor) and not one.is_meta:
                self._count(getattr(one, "values32", one))
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        if hasattr(tensor, "to_local"):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.live -= self._known.pop(key)


def measured(url: str, ranks: int, *, meta: bool) -> dict:
    served_share.SAMPLED = 16  # As below, against a tensor.
    # The intermediate results are small against a tensor here, as those of a real model are.
    dither._CHUNK_ON_CPU = 512
    config = parse_config({"name": "m", "train": {"ranks": ranks}}, source="test")
    bucket = open_bucket(url)
    run = read_run(bucket)
    with fetch_model_files(bucket, run) as folder, LiveBytes() as counted:
        model = open_model(Path(folder), config.train.adapter, meta=meta)
        masters = MasterWeights(model, config.train)
        mirror = load_mirror(bucket, run, at=0, wanted=wanted_of(masters.source))
        masters.reset(mirror)
    parts = [local_part(one).numel() for one in model.parameters()]
    return {
        "peak": counted.peak,
        "share": 4 * sum(parts),
        "whole": 4 * sum(spec.count for spec in run.tensors),
        "largest": 4 * max(spec.count for spec in run.tensors),
        "mirror": sum(one.nbytes for one in mirror.tensors.values()),
    }


def main(url: str, ranks: int) -> list[dict]:
    os.environ |= {"RANK": str(ranks - 1), "WORLD_SIZE": str(ranks)}
    dist.init_process_group("fake", store=FakeStore(), rank=ranks - 1, world_size=ranks)
    return [measured(url, ranks, meta=meta) for meta in (True, False)]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], int(sys.argv[2]))) + "\n")
