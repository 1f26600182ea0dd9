"""Measures what each group of a step did to a behavior, by the exact replay of the step without it.

The trainer's state before the step comes from a checkpoint, and from steps that are computed again.
From that state the step is made once with all groups, which must give the published bits, and once
without each of them. The behavior at the weights with it, less that at the weights without it, is
the group's effect. Effects of a step's groups do not add up to that of the step: advantages, the
mean over tokens, clipping and the optimizer depend on all of them. Where a run publishes quantized
weights, effects are those on the trainer's own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from deltawire.config import RunConfig
from deltawire.errors import CorruptError, InputError, UnreadableError
from deltawire.export.lines import open_policy
from deltawire.launch.branches.behavior import Behavior
from deltawire.launch.branches.versioned_model import VersionedModel
from deltawire.rl.control.rollout_buffer import BufferedGroup, read_consumed
from deltawire.rl.trainer.resume import (
    Resumed,
    metadata_at,
    recompute_step,
    repeat_step,
    resume,
    settings_of_step,
)
from deltawire.wire.ledger import CommitMetadata

Progress = Callable[[str, int, int], None]


class GroupEffect(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of a group on the behavior in the step that made ``version``. ``exact`` says
    whether the step with all groups gave the published bits."""

    version: int
    worker: str
    sequence: int
    task: str
    rewards: list[float]
    effect: float
    exact: bool


class Unexplained(msgspec.Struct, frozen=True, kw_only=True):
    """A step whose groups could not be examined, and why."""

    version: int
    reason: str


def group_effects(
    model: VersionedModel,
    behavior: Behavior,
    versions: Sequence[int],
    *,
    progress: Progress = lambda *_: None,
) -> Iterator[GroupEffect | Unexplained]:
    """Yields the effects of the groups of each of these versions, in ascending order.

    A step that cannot be computed again is yielded as `Unexplained`, and so are all later ones that
    would be computed from it.
    """
    bucket, run, config = model.bucket, model.run, model.config
    state: Resumed | None = None
    for version in sorted(versions):
        try:
            if not metadata_at(bucket, run, version)[0].consumed:
                raise InputError(
                    "it was not made from groups; a further precision has those of its run"
                )
            if state is None or state.version > version - 1:
                policy = open_policy(
                    bucket, config, model.folder, adapter=config.train.adapter, seed=config.seed,
                    device=model.device,
                )  # fmt: skip
                state = resume(bucket, run, config, policy, newest=version - 1)
            start = state.version
            while state.version < version - 1:
                progress("steps before", state.version - start, version - 1 - start)
                recompute_step(bucket, run, state)
            yield from _effects(model, state, behavior, version, progress)
        except (CorruptError, InputError, UnreadableError) as error:
            state = None
            yield Unexplained(version=version, reason=error.message)


def _effects(
    model: VersionedModel, state: Resumed, behavior: Behavior, version: int, progress: Progress
) -> Iterator[GroupEffect]:
    """Yields the effects of one step's groups, and leaves ``state`` after the step."""
    bucket, run = model.bucket, model.run
    metadata, _ = metadata_at(bucket, run, version)
    groups = read_consumed(bucket, metadata)
    config = settings_of_step(bucket, run, metadata, version)
    state.follow_settings(config.train)
    saved = {name: one.clone() for name, one in state.masters.state().items()}
    without = []
    for place in range(len(groups)):
        progress(f"version {version} without a group", place, len(groups))
        if len(groups) > 1:
            _train_without(state, config, groups, metadata, version, place)
        without.append(_measure(state, behavior))
        state.masters.restore(saved)
    step = recompute_step(bucket, run, state)
    whole = _measure(state, behavior)
    progress(f"version {version} without a group", len(groups), len(groups))
    for buffered, value in zip(groups, without, strict=True):
        yield GroupEffect(
            version=version,
            worker=buffered.worker,
            sequence=buffered.sequence,
            task=buffered.group.task,
            rewards=[one.reward for one in buffered.group.trajectories],
            effect=whole - value,
            exact=step.equal,
        )


def _train_without(
    state: Resumed,
    config: RunConfig,
    groups: Sequence[BufferedGroup],
    metadata: CommitMetadata,
    version: int,
    place: int,
) -> None:
    """Makes the step on all groups but one."""
    kept = [one for number, one in enumerate(groups) if number != place]
    parts = metadata.parts
    if parts:
        prompt, parts = _prompt_at(parts, place), list(parts)
        parts[prompt] -= 1
        parts = [count for count in parts if count]
    repeat_step(state, config, kept, msgspec.structs.replace(metadata, parts=parts), version)


def _prompt_at(parts: Sequence[int], place: int) -> int:
    """Returns the prompt that the group at ``place`` belongs to."""
    for prompt, count in enumerate(parts):
        if place < count:
            return prompt
        place -= count
    raise CorruptError("the parts of prompts do not add up to the groups")


def _measure(state: Resumed, behavior: Behavior) -> float:
    module = state.masters.model
    training = module.training
    module.eval()
    try:
        return behavior.measure(module, gradient=False)
    finally:
        module.train(training)
