"""Twenty lies about a run's training: each changes a finished run, or was told by its trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import torch
from blake3 import blake3
from granted_groups import made_up_group

from deltawire.rl.trainer import group_steps
from deltawire.store import Bucket
from deltawire.sync import read_manifest, read_run
from deltawire.train.checkpoint import load_checkpoint, save_checkpoint
from deltawire.wire import keys
from deltawire.wire.ledger import GROUP_HASH_DIGITS, STEP_RECORD
from deltawire.wire.manifest import Manifest, encode_manifest
from deltawire.wire.rollouts import Group, decode_group, encode_group
from deltawire.wire.seal import seal

LIE_AT = 3
"""The version that most lies are about; groups 4 and 5 made it."""

Metadata = dict[str, Any]


def _edit_manifest(bucket: Bucket, version: int, edit: Callable[[Manifest], Manifest]) -> None:
    manifest = read_manifest(bucket, read_run(bucket), version)
    assert manifest is not None
    bucket.put(keys.manifest(version), encode_manifest(edit(manifest)))


def _edit_step(bucket: Bucket, version: int, edit: Callable[[Metadata], Metadata]) -> None:
    def change(manifest: Manifest) -> Manifest:
        step = edit(dict(manifest.metadata[STEP_RECORD]))
        return msgspec.structs.replace(manifest, metadata={**manifest.metadata, STEP_RECORD: step})

    _edit_manifest(bucket, version, change)


def _edit_group(bucket: Bucket, edit: Callable[[Group], Group], *, hashed: bool = True) -> None:
    """Replaces the second group of version `LIE_AT`, and its hash too."""
    key = keys.rollout("w0", 2 * LIE_AT - 1)
    data = bucket.get(key, limit=1 << 24)
    assert data is not None
    changed = encode_group(edit(decode_group(data, run=bucket.url, key=key)))
    bucket.put(key, changed)
    if hashed:
        name = blake3(changed).hexdigest()[:GROUP_HASH_DIGITS]
        _edit_step(bucket, LIE_AT, lambda step: {**step, "hashes": [step["hashes"][0], name]})


def _other(group: Group) -> Group:
    return replace(made_up_group(77), nonce=group.nonce, worker=group.worker)


def _episode(group: Group, **changes: Any) -> Group:
    first, *others = group.trajectories
    return replace(group, trajectories=[replace(first, **changes), *others])


def _better(group: Group) -> Group:
    return _episode(group, reward=group.trajectories[0].reward + 1.0)


def _surer(group: Group) -> Group:
    return _episode(group, logprobs_T=group.trajectories[0].logprobs_T - 1.0)


def _masked(group: Group) -> Group:
    mask = group.trajectories[0].mask_T.copy()
    mask[-1] = 0
    return _episode(group, mask_T=mask)


def _exchange_steps(bucket: Bucket) -> None:
    """States the groups of two versions for each other."""
    found = {}
    for version in (LIE_AT, LIE_AT + 1):
        manifest = read_manifest(bucket, read_run(bucket), version)
        assert manifest is not None
        step = manifest.metadata[STEP_RECORD]
        found[version] = {"consumed": step["consumed"], "hashes": step["hashes"]}
    for version in found:
        other = found[2 * LIE_AT + 1 - version]
        _edit_step(bucket, version, lambda step, other=other: {**step, **other})


def _edit_run(bucket: Bucket, edit: Callable[[Metadata], None]) -> None:
    run = read_run(bucket)
    config = msgspec.json.decode(msgspec.json.encode(run.config))
    edit(config)
    changed = msgspec.structs.replace(run, config=config)
    bucket.put(keys.RUN, seal(changed, key=keys.RUN))


def _edit_state(
    bucket: Bucket, version: int, edit: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    """Replaces a stored state by an edited one."""
    from pathlib import Path

    from deltawire.export.models import empty_model, fetch_model_files
    from deltawire.runtime.process import open_run
    from deltawire.train.masters import MasterWeights

    run, config = open_run(bucket)
    with fetch_model_files(bucket, run) as folder:
        state = MasterWeights(empty_model(Path(folder)), config.train).state()
    commit = load_checkpoint(bucket, state, newest=version, run=run.id)
    assert commit is not None
    assert commit.version == version
    edit(state)
    save_checkpoint(
        bucket, state, commit.ledger, version=version, digest=commit.digest, run=run.id, keep=0
    )


def _nudge_master(state: dict[str, torch.Tensor]) -> None:
    """Moves one master by a bit that rounding hides."""
    name = min(name for name in state if "master" in name)
    flat = state[name].view(torch.int32).reshape(-1)
    flat[0] ^= 1


def _no_moments(state: dict[str, torch.Tensor]) -> None:
    name = min(name for name in state if "exp_avg" in name or "moment" in name)
    state[name].zero_()


def _set_rate(config: Metadata) -> None:
    config["train"]["optimizer"]["learning_rate"] = 2e-3


def _set_seed(config: Metadata) -> None:
    config["seed"] = 99


def patch_optimizer(bucket: Bucket, version: int) -> None:
    """Sets the moments in the stored state of a version to 0."""
    _edit_state(bucket, version, _no_moments)


EDITS: dict[str, Callable[[Bucket], None]] = {
    "an exchanged group": lambda b: _edit_group(b, _other, hashed=False),
    "an exchanged group and its hash": lambda b: _edit_group(b, _other),
    "a changed reward": lambda b: _edit_group(b, _better, hashed=False),
    "a changed reward and its hash": lambda b: _edit_group(b, _better),
    "changed log-probabilities": lambda b: _edit_group(b, _surer),
    "a changed mask": lambda b: _edit_group(b, _masked),
    "a group that is not stated": lambda b: _edit_step(
        b,
        LIE_AT,
        lambda step: {**step, "consumed": step["consumed"][:1], "hashes": step["hashes"][:1]},
    ),
    "groups of two versions exchanged": _exchange_steps,
    "another rate of one step": lambda b: _edit_step(
        b, LIE_AT, lambda step: {**step, "settings": {"train.optimizer.learning_rate": 2e-3}}
    ),
    "another rate in run.json": lambda b: _edit_run(b, _set_rate),
    "another seed in run.json": lambda b: _edit_run(b, _set_seed),
    "another digest": lambda b: _edit_manifest(
        b, LIE_AT, lambda one: msgspec.structs.replace(one, digest="1" + one.digest[1:])
    ),
    "a patched master in a stored state": lambda b: _edit_state(b, 2, _nudge_master),
    "a patched optimizer in a stored state": lambda b: patch_optimizer(b, 2),
}
"""Lies told after the run, by name; ``b`` is its bucket."""


def _patch_weights(masters: Any) -> None:
    with torch.no_grad():
        state = masters.state()
        name = min(name for name in state if "master" in name)
        state[name].mul_(1.5)
        masters.restore(state)


class LyingTrainer:
    """Makes the step of version `LIE_AT` otherwise than its metadata says."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._honest = group_steps.train_step

    def __call__(self, masters: Any, groups: list[Group], config: Any, **named: Any) -> Any:
        """Stands in for `train_step`."""
        if named["version"] != LIE_AT - 1:
            return self._honest(masters, groups, config, **named)
        if self._kind == "another seed":
            torch.manual_seed(1)
        if self._kind == "a reward that is not stored":
            groups = [groups[0], _better(groups[1])]
        if self._kind == "a group that nobody stored":
            groups = [groups[0], made_up_group(78)]
        if self._kind == "a forgotten optimizer":
            masters.restart_optimizer()
        result = self._honest(masters, groups, config, **named)
        if self._kind == "a hidden step":
            result = self._honest(masters, groups, config, **named)
        if self._kind == "patched weights":
            _patch_weights(masters)
        return result


TOLD = (
    "another seed",
    "a reward that is not stored",
    "a group that nobody stored",
    "a forgotten optimizer",
    "a hidden step",
    "patched weights",
)
"""Lies that the trainer told: all that the bucket holds is consistent."""


@contextmanager
def lying_trainer(kind: str) -> Iterator[None]:
    """Lets trainers of this process lie."""
    honest = group_steps.train_step
    group_steps.train_step = LyingTrainer(kind)  # type: ignore[assignment]
    try:
        yield
    finally:
        group_steps.train_step = honest
