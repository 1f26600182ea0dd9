"""The trainer's allocation of completions: opened after a restart, and told in events."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from deltawire.config import RunConfig
from deltawire.envs import open_tasks
from deltawire.errors import CorruptError
from deltawire.events import Allocated
from deltawire.rl.allocation.allocator import Allocator
from deltawire.rl.control.draws import RUN_STREAM, DrawBook
from deltawire.rl.control.rollout_buffer import Batch, BufferedGroup
from deltawire.rl.control.rollout_reader import read_group
from deltawire.rl.trainer.resume import metadata_at
from deltawire.store import Bucket
from deltawire.wire.run import Run


def open_allocator(
    bucket: Bucket, run: Run, config: RunConfig, draws: DrawBook, *, version: int
) -> Allocator[BufferedGroup] | None:
    """Opens the allocation of a run at ``version``, with what the manifests say was decided; None
    with a fixed group size."""
    rules = config.rollout.allocation
    if rules.policy == "fixed":
        return None
    allocator: Allocator[BufferedGroup] = Allocator(
        config, task_at=_identities(config) if rules.bands else None
    )
    for one in range(max(1, version - allocator.posterior.horizon + 1), version + 1):
        try:
            metadata, _ = metadata_at(bucket, run, one)
        except CorruptError:
            continue  # Pruned: its evidence is lost, its groups are settled.
        allocator.commit(metadata.prompts, version=one)
    allocator.version = version
    allocator.resume(draws.positions)
    return allocator


def _identities(config: RunConfig) -> Callable[[int], str]:
    """Tells the identity of the task at a position of the run's order."""
    tasks = open_tasks(config.task, seed=config.seed)
    return lambda position: tasks.draw(RUN_STREAM, position).identity


def dropped_groups(bucket: Bucket, run: Run, version: int) -> list[BufferedGroup]:
    """Reads the groups that a version dropped, as far as they can be read."""
    metadata, _ = metadata_at(bucket, run, version)
    groups = []
    for worker, sequence in metadata.dropped_groups():
        try:
            found = read_group(bucket, worker, sequence)
        except CorruptError:
            continue
        if found is not None:
            groups.append(BufferedGroup(sequence, *found))
    return groups


def allocation_event(batch: Batch, config: RunConfig, *, process: str, version: int) -> Allocated:
    """The event of what was decided since the previous step."""
    verdicts = Counter(one.verdict for one in batch.prompts)
    judged = [one for one in batch.prompts if one.verdict != "pass"]
    trained = [one for one in judged if one.verdict in ("train", "partial")]
    dropped = [one for one in judged if one.verdict in ("skip", "defer")]
    tokens = sum(one.tokens for one in batch.drops if one.cause in ("skipped", "deferred"))
    sampled = sum(one.completions for one in dropped)
    spared = sum(max(0, config.rollout.group_size - one.completions) for one in dropped)
    return Allocated(
        process=process,
        at=time.time(),
        version=version,
        judged=len(judged),
        trained=len(trained),
        partial=verdicts["partial"],
        skipped=verdicts["skip"],
        deferred=verdicts["defer"],
        passed=verdicts["pass"],
        equal=sum(one.successes in (0, one.finished) for one in judged),
        completions=dict(Counter(str(one.completions) for one in trained)),
        dropped_tokens=tokens,
        saved_tokens=round(spared * tokens / sampled) if sampled else 0,
    )
