"""Groups that a test makes up, with the nonces that a trainer grants to their worker, and runs that
begin with them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from heartbeats import put_heartbeat

from benchmarks.training.seeded_groups import seeded_group
from deltawire.config import BuildConfig, parse_config
from deltawire.export.models import save_model
from deltawire.rl.control.challenges import nonce_of
from deltawire.rl.trainer.bootstrap import start_run
from deltawire.store import Bucket, open_bucket
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.rollouts import Group, encode_group
from deltawire.wire.status import Challenge

SECRET = "5e" * 16
UNCHECKED = {"rescore_share": 0.0}
"""For ``[trust]``: made-up rewards and log-probabilities would not agree with the trainer's."""


def put_group(bucket: Bucket, number: int, group: Group, *, worker: str = "w0") -> bytes:
    """Store a group as the worker's ``number``-th, under its first lease; returns its bytes."""
    if number == 0 or bucket.get(keys.challenge(worker), limit=4096) is None:
        bucket.put(keys.challenge(worker), encode_json(Challenge(worker=worker, secret=SECRET)))
    data = encode_group(replace(group, nonce=nonce_of(SECRET, 0, number)))
    bucket.put(keys.rollout(worker, number), data)
    return data


def made_up_group(
    number: int, *, tokens: int = 6, episodes: int = 4, failed: tuple[int, int] | None = None
) -> Group:
    """A group of random tokens; ``failed`` names the number and the episode that failed."""
    episode = failed[1] if failed is not None and failed[0] == number else None
    return seeded_group(number, tokens=tokens, episodes=episodes, failed=episode)


def start_with_groups(
    folder: Path,
    *,
    groups: int,
    train: dict[str, Any],
    group: Callable[[int], Group] = made_up_group,
    layers: int = 1,
    sizes: BuildConfig | None = None,
    attention_dropout: float = 0.0,
    run_id: str = "",
    directory: Path | None = None,
    **config: Any,
) -> Bucket:
    """Start a run in ``folder / "bucket"``, with groups of a worker that lives; of a tiny model,
    or of the one in ``directory``."""
    sizes = sizes or BuildConfig(
        hidden_size=32, layers=layers, head_size=16, feed_forward_size=48, context=64
    )
    if directory is None:
        model = build_model(sizes, seed=0)
        model.config.attention_dropout = attention_dropout
        save_model(model, byte_tokenizer(), folder / "model")
    directory = directory or folder / "model"
    bucket = open_bucket(str(folder / "bucket"), create=True)
    raw = {
        "name": "granted",
        "model": {"path": str(directory)},
        "train": train,
        "trust": UNCHECKED,
        **config,
    }
    start_run(bucket, parse_config(raw, source="test"), directory, run_id=run_id)
    for number in range(groups):
        put_group(bucket, number, group(number))
    put_heartbeat(bucket, "w0", stored=groups, at=time.time())
    return bucket


def copied(bucket: Bucket, url: str) -> Bucket:
    """A copy of a small bucket in a folder: tests change it, and the original is trained once."""
    copy = open_bucket(url, create=True)
    for key in bucket.list(""):
        if (data := bucket.get(key, limit=1 << 30)) is not None:
            copy.put(key, data)
    return copy
