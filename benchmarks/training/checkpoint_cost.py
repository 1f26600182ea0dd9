"""How long a trainer waits for a checkpoint, over a copy of the same bytes in memory.

A save copies the state while the trainer waits, and writes it next to training. The time of the
call is compared with the faster of two copies of as many bytes into memory that is there already:
one by one thread, one by as many threads as the checkpoint's own copy has. They take turns; the
fastest of each counts, because other programs of a shared machine only ever slow a copy. The time
until a save is stored is in the details: a trainer waits for it only if the next save comes sooner.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from benchmarks.training.keys import Measured, Options
from deltawire.config import BuildConfig, TrainConfig
from deltawire.export.shards import local_part
from deltawire.store import open_bucket
from deltawire.sync.publish.parallel_copy import Copier
from deltawire.train.build import build_model
from deltawire.train.checkpoint import CheckpointWriter
from deltawire.train.checkpoint_storage import bytes_of
from deltawire.train.masters import MasterWeights
from deltawire.wire.ledger import Ledger

SIZES = BuildConfig(
    hidden_size=512, layers=6, head_size=64, feed_forward_size=1536, vocabulary=8192
)


def measure(options: Options) -> Measured:
    """Saves a model's state of a few hundred MiB several times."""
    masters = MasterWeights(build_model(SIZES, seed=0), TrainConfig())
    for parameter in masters.model.parameters():
        parameter.grad = parameter.detach() * 1e-3
    masters.step()
    state = masters.state()
    sources = [bytes_of(local_part(tensor)) for tensor in state.values()]
    size = sum(source.nbytes for source in sources)
    targets = [np.ones_like(source) for source in sources]
    copier = Copier()
    times: dict[str, list[float]] = {"save": [], "one thread": [], "threads": [], "stored": []}

    def one_thread() -> None:
        for target, source in zip(targets, sources, strict=True):
            np.copyto(target, source)

    def timed(name: str, call: Callable[[], Any]) -> None:
        started = time.perf_counter()
        call()
        times[name].append(time.perf_counter() - started)

    with tempfile.TemporaryDirectory(prefix="deltawire-bench-") as folder:
        writer = CheckpointWriter(open_bucket(folder), None)
        for turn in range(2 * options.repeats + 1):
            timed(
                "save",
                lambda turn=turn: writer.save(  # type: ignore[misc]
                    state, Ledger(), version=turn, digest="0" * 32, keep=1
                ),
            )
            timed("stored", writer.flush)
            timed("one thread", one_thread)
            timed("threads", lambda: copier.copy(zip(targets, sources, strict=True)))
        writer.close()
    copier.close()
    # The first save allocates what later ones keep.
    found = {name: min(seconds[1:]) for name, seconds in times.items()}
    memcpy = min(found["one thread"], found["threads"])
    return Measured(
        {"trainer_blocked_checkpoint_vs_memcpy": round(found["save"] / memcpy, 3)},
        {
            "bytes": size,
            "fastest_ms": {name: round(seconds * 1e3, 2) for name, seconds in found.items()},
            "median_ms": {
                name: round(median(seconds[1:]) * 1e3, 2) for name, seconds in times.items()
            },
            "first_save_ms": round(times["save"][0] * 1e3, 2),
        },
    )
