"""Runs a trainer process from its start to its end: rank 0, or one of the others.

::

    rank 0                                       rank k
      take the lease, start or open the run        import the libraries
      join the ranks ◀───────────────────────────▶ join the ranks
      Start ─────────────────────────────────────▶ open the run, at the version that Start names
      Trainer or Midtrainer: orders ─────────────▶ Rank.follow
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from deltawire.config import RunConfig
from deltawire.errors import BugError, DeltawireError, InputError, RetryError
from deltawire.rl.trainer.bootstrap import start_lines, start_run
from deltawire.rl.trainer.group_steps import GroupSteps
from deltawire.rl.trainer.lines import LinesTrainer
from deltawire.rl.trainer.midtraining import DocumentSteps, Midtrainer
from deltawire.rl.trainer.model import open_policy_model
from deltawire.rl.trainer.orders import Start, StartLines, receive
from deltawire.rl.trainer.rank import Rank, translated
from deltawire.rl.trainer.trainer import Trainer
from deltawire.runtime.lines import line_bucket
from deltawire.runtime.memory import release_heap
from deltawire.runtime.process import Process, StopAskedError, open_run
from deltawire.store import Bucket
from deltawire.sync import read_run
from deltawire.train.parallel.ranks import join_ranks, leave_ranks, lost_ranks, world_of
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer


def run_trainer(
    process: Process,
    source: tuple[RunConfig, Path] | None,
    *,
    signer: Signer | None = None,
    run_id: str = "",
) -> None:
    """Run rank 0 of a trainer from its start to the last version or a signal.

    In a signed run ``signer`` holds the owner's key, and a new run gets the id ``run_id``.

    ``source`` is the configuration and the model directory that a new run starts from; None
    continues an existing run. Raises `InputError` if the bucket holds another run.
    """
    started = process.events.now()
    process.record_life("started")
    # Other ranks would wait for one that ends during the start.
    alone = world_of()[1] == 1
    starting = process.interruptible if alone else nullcontext
    try:
        with starting():
            run, config = _start_or_open(process, source, signer=signer, run_id=run_id)
        if config.train.adapters:
            described = _train_lines(process, config, signer=signer, changed=source is not None)
        else:
            with starting():
                model = open_policy_model(process.bucket, run, config)
                kind: type[Trainer | Midtrainer]
                kind = Trainer if config.midtrain is None else Midtrainer
                with lost_ranks():
                    trainer = kind(process, run, config, model, signer=signer)
            process.events.span("start", started)
            with translated(process.bucket, run, trainer.epoch):
                trainer.loop()
            described = f"version {trainer.version}"
    except StopAskedError:
        described = "before it had started"
    except DeltawireError as error:
        _record_error(process, error)
        raise
    process.record_life("stopped", described)
    leave_ranks()


def _start_or_open(
    process: Process,
    source: tuple[RunConfig, Path] | None,
    *,
    signer: Signer | None,
    run_id: str,
) -> tuple[Run, RunConfig]:
    """Publish version 0 of a new run, open the run, and join the other ranks."""
    if source is not None and source[0].train.adapters:
        start_lines(process.bucket, *source, signer=signer, run_id=run_id)
    elif source is not None:
        start_run(process.bucket, *source, signer=signer, run_id=run_id)
    # The model that version 0 was published from is part of cycles.
    gc.collect()
    release_heap()
    run, config = open_run(process.bucket, role="trainer")
    config = config if source is None else source[0]
    _check_layout(config)
    process.heartbeat.faults = config.faults
    with lost_ranks():
        join_ranks()
    return run, config


def _train_lines(
    process: Process, config: RunConfig, *, signer: Signer | None, changed: bool
) -> str:
    """Train a run of several adapters; returns the version of each line."""
    with LinesTrainer(process, config, signer=signer, changed=changed) as trainer:
        trainer.loop()
        return trainer.described


def follow_trainer(
    open_bucket: Callable[[str], Bucket],
    *,
    stopping: Callable[[], bool],
    signer: Signer | None = None,
) -> None:
    """Run another rank than 0 of a trainer, until rank 0 ends.

    ``open_bucket`` opens the bucket of the run with an id as this process may use it.
    """
    with lost_ranks():
        join_ranks()
        first = receive()
    if not isinstance(first.order, Start | StartLines):
        raise BugError("rank 0 did not start with the run")
    bucket = open_bucket(first.order.run)
    _require_same(bucket, first.order)
    ranks: dict[str, Rank[Any]] = {}
    if isinstance(first.order, Start):
        ranks[first.line] = _open_rank(bucket, first.order, stopping, signer)
    opening = not ranks
    while opening or ranks:
        with lost_ranks():
            message = receive()
        line, order = message.line, message.order
        if isinstance(order, Start) and line not in ranks:
            ranks[line] = _open_rank(line_bucket(bucket, line), order, stopping, signer)
            opening = False
        elif isinstance(order, StartLines) or line not in ranks:
            raise BugError(f"rank 0 gave an order to line {line!r}, which it did not start")
        else:
            rank = ranks[line]
            with translated(rank.bucket, rank.run, rank.epoch):
                if not rank.follow(order):
                    del ranks[line]
    leave_ranks()


def _open_rank(
    bucket: Bucket, start: Start, stopping: Callable[[], bool], signer: Signer | None
) -> Rank[Any]:
    """Open this rank's part of the run, or of the line, that rank 0 starts."""
    run, config = _require_same(bucket, start), start.config
    model = open_policy_model(bucket, run, config)
    steps: Any
    if config.midtrain is None:
        steps = GroupSteps(bucket, run, config)
    else:
        steps = DocumentSteps(bucket, run, config)
    with translated(bucket, run, start.epoch):
        return Rank(bucket, run, start, model, steps, signer=signer, stopping=stopping)


def _require_same(bucket: Bucket, start: Start | StartLines) -> Run:
    """Return the run in the bucket; raises `InputError` if rank 0 found another."""
    run = read_run(bucket, public_key=start.public_key)
    if run.id != start.run:
        raise InputError(
            f"rank {world_of()[0]} found the run {run.id[:16]}, rank 0 the run {start.run[:16]}",
            hint="give all ranks the same RUN_URL",
            run=bucket.url,
        )
    return run


def _check_layout(config: RunConfig) -> None:
    """Raise `InputError` if the ranks that were started do not divide into the axes."""
    _, ranks = world_of()
    if found := config.train.layout_contradiction(ranks):
        raise InputError(f"train: {found[0]}", hint=found[1])


def _record_error(process: Process, error: DeltawireError) -> None:
    """Record an error, if the bucket still accepts events."""
    try:
        process.record_life("stopped", str(error))
    except (RetryError, InputError):
        return
