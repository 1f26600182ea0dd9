"""Trains a run step by step in this process, from groups and settings that a world chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from deltawire.config import RunConfig, with_settings
from deltawire.export.lines import open_policy
from deltawire.export.source import bits_of
from deltawire.rl.control.rollout_buffer import BufferedGroup
from deltawire.rl.trainer.bootstrap import start_run
from deltawire.rl.trainer.resume import Resumed, repeat_step, resume
from deltawire.store import Bucket, open_bucket
from deltawire.sync.publish.sources import continue_publisher
from deltawire.train.arithmetic import arithmetic_of
from deltawire.train.checkpoint import save_checkpoint
from deltawire.wire import keys
from deltawire.wire.ledger import GROUP_HASH_DIGITS, CommitMetadata
from deltawire.wire.rollouts import Group, encode_group

WORKER = "w0"

Groups = Callable[[int, Resumed], Sequence[Group]]
"""Makes the groups of a step from its number and the state before it."""


def trained_run(
    folder: Path,
    config: RunConfig,
    groups_of_step: Groups,
    *,
    settings_of_step: Callable[[int], Mapping[str, Any]] = lambda _: {},
) -> Bucket:
    """Starts a run of ``folder / "model"`` and makes the steps of ``train.versions``, with a stored
    state at every ``train.checkpoint_every``-th version."""
    torch.set_num_threads(config.threads)
    bucket = open_bucket(str(folder / "bucket"), create=True)
    run = start_run(bucket, config, folder / "model")
    model = open_policy(bucket, config, folder / "model", adapter=config.train.adapter)
    state = resume(bucket, run, config, model, newest=0)
    shapes = {spec.name: spec.shape for spec in run.tensors}
    number = 0
    with continue_publisher(bucket, anchor_every=config.train.anchor_every) as publisher:
        for step in range(1, config.train.versions + 1):
            buffered = []
            for group in groups_of_step(step, state):
                data = encode_group(group)
                bucket.put(keys.rollout(WORKER, number), data)
                digest = blake3(data).hexdigest()[:GROUP_HASH_DIGITS]
                buffered.append(BufferedGroup(number, group, digest))
                number += 1
            settings = dict(settings_of_step(step))
            metadata = CommitMetadata(
                step=step,
                consumed=[(WORKER, one.sequence) for one in buffered],
                hashes=[one.hash for one in buffered],
                threads=config.threads,
                ranks=1,
                arithmetic=arithmetic_of(state.masters.mesh.device),
                settings=settings,
            )
            changed = with_settings(config, settings, source=f"step {step}")
            state.follow_settings(changed.train)
            repeat_step(state, changed, buffered, metadata, step)
            state.version = step
            bits = {n: b.reshape(shapes[n]) for n, b in bits_of(state.masters.source).items()}
            publisher.publish(bits, metadata=metadata.to_dict(), wait=True)
            if step % config.train.checkpoint_every == 0:
                digest = state.masters.digest().hex()
                save_checkpoint(
                    bucket, state.masters.state(), state.ledger,
                    version=step, digest=digest, run=run.id,
                )  # fmt: skip
    return bucket
