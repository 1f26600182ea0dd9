"""One trainer rank that publishes quantized weights, and writes what rank 0 saw.

Run as a script with a JSON list of tasks and the number of ranks, which are forks of the script. A
task has ``model`` and ``sizes`` as `rank_steps` takes them, ``train`` (keys of the section), and
``bucket``, where its last version is published as version 0 and read again.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import rank_steps
import torch
from torch.distributed.tensor import DTensor

from benchmarks.runner import ROOT
from deltawire.export.shards import box_of, local_part
from deltawire.export.source import open_source, wanted_of
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, read_run
from deltawire.train.masters import MasterWeights
from deltawire.train.parallel import open_mesh

MOVES = (0.0, 8.0, 0.1)
"""By how much weights move in each version: so much that no scale stays, and so little that most
do."""


@torch.no_grad()
def move(masters, version):
    """Moves all weights, by the same amounts on any mesh."""
    generator = torch.Generator().manual_seed(version)
    state = masters.state()
    for name in sorted(one for one in state if one.startswith("master/")):
        master = state[name]
        factor = 1 + MOVES[version] * torch.randn(master.shape, generator=generator)
        if isinstance(master, DTensor):
            box = zip(*box_of(master), strict=True)
            factor = factor[tuple(slice(start, start + size) for size, start in box)]
        local = local_part(master)
        local.mul_(factor.view(local.shape))
    masters.restore(state)


def run_task(task):
    """Publishes some versions; returns their digests and what was read again."""
    config = rank_steps.config_of(task)
    mesh = open_mesh(config.train, torch.device("cpu"))
    masters = MasterWeights(rank_steps.model_of(task), config.train, mesh=mesh)
    digests = []
    for version in range(len(MOVES)):
        move(masters, version)
        digests.append(masters.digest().hex())
    rank_steps.publish(masters, task["bucket"])
    bucket = open_bucket(task["bucket"])
    run = read_run(bucket)
    masters.source = open_source(config.train.exporter, masters.model)
    chosen = masters.digest().hex()
    fresh = masters.source = open_source(config.train.exporter, masters.model)
    continued = load_mirror(bucket, run, at=0, wanted=fresh.continued())
    fresh.continue_from(continued)
    resumed = masters.digest().hex()
    masters.source = open_source(config.train.exporter, masters.model)
    for parameter in masters.model.parameters():
        local_part(parameter).zero_()
    mirror = load_mirror(bucket, run, at=0, wanted=wanted_of(masters.source))
    masters.reset(mirror)
    tensors = [[one.name, list(one.shape), one.dtype] for one in run.tensors]
    return {
        "digests": digests,
        "tensors": tensors,
        "chosen": chosen,
        "resumed": resumed,
        "restored": masters.digest().hex(),
        "read": sum(bits.nbytes for bits in mirror.tensors.values()),
        "read_scales": sum(bits.nbytes for bits in continued.tensors.values()),
    }


def main(tasks):
    torch.set_num_threads(1)
    for task in tasks:
        record = run_task(task)
        if os.environ.get("RANK", "0") == "0":
            Path(task["out"]).write_text(json.dumps(record))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def run_ranks(folder, ranks, tasks):
    """Runs tasks by name in ``ranks`` processes of this script; returns rank 0's records."""
    folder.mkdir()
    for name, task in tasks.items():
        task |= {"out": str(folder / f"{name}.json"), "bucket": str(folder / name)}
        (folder / name).mkdir()
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(list(tasks.values())), str(ranks)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in tasks}


if __name__ == "__main__":
    rank_steps.fork_ranks(lambda: main(json.loads(sys.argv[1])), int(sys.argv[2]))
