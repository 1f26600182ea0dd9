"""Scores stored trajectories again, and trains a fork on them, without sampling.

The fork makes one version for each of the parent's, from the same groups in the same order, with
the new rewards. Its groups are stored in its own bucket and named in its manifests, so every tool
that reads a run reads it, and ``replay`` computes it again. With the rewards that were stored it
makes the parent's bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from deltawire.chat.requests import text_of
from deltawire.config.sections import RunConfig
from deltawire.errors import InputError
from deltawire.export.lines import open_policy
from deltawire.export.models import fetch_model_files, load_tokenizer
from deltawire.export.source import bits_of, is_lossy
from deltawire.launch.branches.forking import Fork, fork_run
from deltawire.placement.device import resolve_device
from deltawire.rl.control.rollout_buffer import BufferedGroup, read_consumed
from deltawire.rl.control.rollout_reader import read_group
from deltawire.rl.trainer.resume import (
    Resumed,
    metadata_at,
    recompute_step,
    reference_for,
    resume,
    seed_step,
)
from deltawire.runtime.process import open_run
from deltawire.store import Bucket, open_bucket
from deltawire.sync import committed_versions, newest_readable
from deltawire.sync.publish.sources import continue_publisher
from deltawire.train.arithmetic import arithmetic_of
from deltawire.train.checkpoint import save_checkpoint
from deltawire.train.step import StepResult, train_step
from deltawire.wire import keys
from deltawire.wire.ledger import GROUP_HASH_DIGITS, CommitMetadata, Ledger
from deltawire.wire.rollouts import LIVE_TASK, Group, Trajectory, encode_group
from deltawire.wire.run import Run

WORKER = "rescored"
"""The name under which the fork's groups are stored."""
UNFIT = 0.5
"""Share of a step's tokens without weight from which answers do not fit the policy any more."""

Reward = Callable[[str, dict[str, Any]], float | None]


@dataclass(frozen=True)
class RescoredStep:
    """One version that was trained on new rewards: the parent's version whose groups it has, the
    means of old and new rewards, and the share of tokens that the corrections left no gradient."""

    version: int
    origin: int
    before: float
    after: float
    without_weight: float

    @property
    def unfit(self) -> bool:
        """Returns whether the answers no longer fit the policy."""
        return self.without_weight >= UNFIT


def rescore_run(
    parent: Bucket,
    run: Run,
    name: str,
    reward: Reward,
    *,
    first: int,
    last: int,
    settings: Mapping[str, Any] | None = None,
    report: Callable[[RescoredStep], None] = lambda _: None,
) -> Fork:
    """Makes the fork ``name`` of the version before ``first``, and trains it on the groups of
    versions ``first`` to ``last`` with new rewards.

    ``reward`` gets the text of an episode's last answer and a row with ``task``, ``prompt``,
    ``reward`` (the old one; None of an episode that failed), ``cause`` (why it failed), ``finish``
    and ``probes``. With None an episode that failed stays so. A repeated call continues. Raises
    `InputError` for versions without groups, for groups of users and for rewards that are no
    finite numbers, and as `fork_run`.
    """
    origins = _origins(parent, first, last)
    made = fork_run(parent, run, first - 1, name, settings=settings)
    place = open_bucket(made.url)
    forked, config = open_run(place)
    newest = newest_readable(place, forked)
    assert newest is not None  # `fork_run` has written it.
    torch.set_num_threads(config.threads)
    with fetch_model_files(parent, run) as folder:
        model = open_policy(
            place, config, Path(folder), adapter=config.train.adapter, seed=config.seed,
            device=resolve_device(config.device_of("trainer")),
        )  # fmt: skip
        text = text_of(config, load_tokenizer(Path(folder)), bucket=parent.url)
    state = resume(place, forked, config, model, newest=newest.version)
    if is_lossy(state.masters.source):
        raise InputError("a run that publishes quantized weights only cannot be rescored")
    while state.version < newest.version:
        recompute_step(place, forked, state)
    scorer = _Scorer(reward, text.decode)
    with continue_publisher(place, anchor_every=config.train.anchor_every) as publisher:
        for version in origins[newest.version - (first - 1) :]:
            metadata, _ = metadata_at(parent, run, version)
            groups = [scorer.score(one) for one in read_consumed(parent, metadata)]
            buffered = _store(place, state.ledger, groups)
            result, step = _train(state, config, buffered, metadata)
            shapes = {spec.name: spec.shape for spec in forked.tensors}
            bits = bits_of(state.masters.source)
            publisher.publish(
                {key: array.reshape(shapes[key]) for key, array in bits.items()},
                metadata=step.to_dict(),
                wait=True,
            )
            report(scorer.step(state.version, version, result))
    digest = state.masters.digest().hex()
    save_checkpoint(
        place, state.masters.state(), state.ledger, version=state.version, digest=digest,
        run=forked.id,
    )  # fmt: skip
    return made


def _origins(parent: Bucket, first: int, last: int) -> list[int]:
    """Returns the parent's versions whose groups are scored."""
    found = [v for v in committed_versions(parent, newer_than=first - 1) if v <= last]
    if not 1 <= first <= last or found != list(range(first, last + 1)):
        raise InputError(
            f"the run does not have all versions from {first} to {last}",
            hint="deltawire log RUN lists the versions",
            run=parent.url,
        )
    return found


class _Scorer:
    """Gives groups new rewards, and sums up those of a step."""

    def __init__(self, reward: Reward, decode: Callable[[Any], str]) -> None:
        self._reward, self._decode = reward, decode
        self._before: list[float] = []
        self._after: list[float] = []

    def score(self, buffered: BufferedGroup) -> Group:
        group = buffered.group
        if LIVE_TASK in (group.task, group.family):
            raise InputError(
                "these groups hold answers of users, whose erasure would not reach the copies",
                hint="score versions whose groups the run's workers sampled",
            )
        episodes = group.episodes
        segments: dict[int, list[Trajectory]] = {}
        for episode, one in zip(episodes, group.trajectories, strict=True):
            segments.setdefault(episode, []).append(one)
        values = {episode: self._value(group, many) for episode, many in segments.items()}
        scored = [
            one if (value := values[episode]) is None else replace(one, reward=value, cause="")
            for episode, one in zip(episodes, group.trajectories, strict=True)
        ]
        return replace(group, worker=WORKER, trajectories=scored)

    def _value(self, group: Group, segments: list[Trajectory]) -> float | None:
        """Returns the reward of an episode; None for one that stays a failed one."""
        last = segments[-1]
        cause = next((one.cause for one in segments if one.cause), "")
        if not all(one.mask_T.any() for one in segments):
            return None  # It ended before the model drew a token.
        drawn = last.tokens_T[last.mask_T == 1].tolist()
        row = {
            "task": group.task,
            "prompt": self._decode(group.prompt_of(segments[0]).tolist()),
            "reward": None if cause else last.reward,
            "cause": cause,
            "finish": last.finish,
            "probes": dict(last.probes),
        }
        value = self._reward(self._decode(drawn), row)
        if value is None and cause:
            return None
        if value is None or not abs(float(value)) < float("inf"):
            raise InputError(
                f"the reward of an answer to {group.task[:80]!r} is {value}",
                hint="return a finite number; None only where row['cause'] is not empty",
            )
        if not cause:
            self._before.append(last.reward)
        self._after.append(float(value))
        return float(value)

    def step(self, version: int, origin: int, result: StepResult) -> RescoredStep:
        before, after = (sum(one) / max(len(one), 1) for one in (self._before, self._after))
        self._before, self._after = [], []
        without = result.clipped + result.rejected
        return RescoredStep(version, origin, before, after, without)


def _store(place: Bucket, ledger: Ledger, groups: list[Group]) -> list[BufferedGroup]:
    """Stores groups as the next of the fork, and reads them back as a replay will."""
    found = []
    for number, group in enumerate(groups, ledger.count(WORKER)):
        data = encode_group(group)
        place.put(keys.rollout(WORKER, number), data)
        digest = blake3(data).hexdigest()[:GROUP_HASH_DIGITS]
        read = read_group(place, WORKER, number, expected=digest)
        assert read is not None  # It was stored a moment ago.
        found.append(BufferedGroup(number, *read))
    return found


def _train(
    state: Resumed, config: RunConfig, groups: list[BufferedGroup], origin: CommitMetadata
) -> tuple[StepResult, CommitMetadata]:
    """Makes the next step of the fork; returns its measurements and its record."""
    base, version = state.version, state.version + 1
    seed_step(config, version, rank=state.masters.mesh.data_rank)
    result = train_step(
        state.masters,
        [one.group for one in groups],
        config,
        reference=reference_for(state.reference, groups),
        version=base,
        parts=origin.parts,
    )
    for one in groups:
        state.ledger.settle(WORKER, one.sequence)
    state.version = version
    step = CommitMetadata(
        step=version,
        consumed=[(WORKER, one.sequence) for one in groups],
        hashes=[one.hash for one in groups],
        threads=torch.get_num_threads(),
        position=origin.position,
        ranks=1,
        arithmetic=arithmetic_of(state.masters.mesh.device),
        parts=origin.parts,
    )
    return result, step


def load_reward(path: Path) -> Reward:
    """Loads the function ``reward`` of a Python file. Raises `InputError` if there is none."""
    import runpy

    try:
        found = runpy.run_path(str(path)).get("reward")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    if not callable(found):
        raise InputError(
            f"{path} has no function reward",
            hint="write: def reward(completion: str, row: dict) -> float",
        )
    return found  # type: ignore[no-any-return]
