"""Explains the change of a behavior between two versions: the steps that moved it, then groups."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from deltawire.config import RunConfig
from deltawire.errors import CorruptError, InputError
from deltawire.launch.branches.behavior import (
    Behavior,
    layer_behavior,
    probe_behavior,
    read_behavior,
)
from deltawire.launch.branches.group_effects import GroupEffect, Unexplained, group_effects
from deltawire.launch.branches.path_integral import StepPart, integrate, without_momentum
from deltawire.launch.branches.version_names import VersionName
from deltawire.launch.branches.versioned_model import VersionedModel, open_model_of
from deltawire.rl.trainer.resume import groups_of
from deltawire.runtime.trusted import ReaderTrust
from deltawire.store import Bucket
from deltawire.sync import committed_versions
from deltawire.wire.rollouts import Group

Progress = Callable[[str, int, int], None]


class Question(NamedTuple):
    """The behavior that is asked about: one of a file of answers, a probe, and a layer."""

    file: str = ""
    probe: str = ""
    layer: str = ""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. ``parts`` are the steps of the range in their order, whose ``part`` add up to
    ``after - before`` but for ``residual``; ``steps`` are the single versions with the largest new
    contribution (`without_momentum`), and ``groups`` what their groups did, the largest
    first."""

    run: str
    first: int
    last: int
    unit: str
    before: float
    after: float
    residual: float
    residual_share: float | None
    parts: list[StepPart]
    layers: dict[str, float]
    steps: list[StepPart]
    groups: list[GroupEffect]
    unexplained: list[Unexplained]


def parse_range(text: str, trust: ReaderTrust) -> tuple[Bucket, int | None, int | None]:
    """Opens the run of ``RUN[@A..B]``; A and B are numbers or tags, None stands for the first and
    the newest version. Raises `InputError`."""
    location, mark, words = text.rpartition("@")
    first, dots, last = words.partition("..")
    if not mark or not dots or Path(text).is_dir():
        bucket, _, version = VersionName.parse(text).open(trust)
        if version is not None:
            raise InputError(
                f"{text[:200]!r} names one version", hint="name two: RUN@40..120, or the run only"
            )
        return bucket, None, None
    names = [VersionName.parse(f"{location}@{word}") for word in (first, last)]
    if any((name.version, name.tag) == (None, None) for name in names):
        raise InputError(f"{words[:80]!r} is no range of versions", hint="such as RUN@40..120")
    bucket, _, begin = names[0].open(trust)
    return bucket, begin, names[1].open(trust)[2]


def explain(
    bucket: Bucket,
    first: int | None,
    last: int | None,
    question: Question,
    *,
    every: int = 1,
    steps: int = 3,
    progress: Progress = lambda *_: None,
) -> Explanation:
    """Explains the change from version ``first`` to ``last``.

    ``every`` takes the gradient at every so many versions; the largest parts are then divided
    further. The groups of ``steps`` steps are examined: those with the largest ``fresh``. Raises
    `InputError` if there are no two versions or no such behavior, and `CorruptError` if a version
    cannot be read.
    """
    versions = _versions(bucket, first, last)
    with open_model_of(bucket) as model:
        model.require_memory()
        behavior = _behavior(question, model, versions)
        chosen = sorted({*versions[::every], versions[-1]})
        whole = integrate(model, behavior, chosen, progress=progress)
        parts = without_momentum(whole.steps, _momentum(model.config))
        single = _single_steps(model, behavior, versions, parts, steps, progress)
        groups: list[GroupEffect] = []
        unexplained: list[Unexplained] = []
        asked = [step.version for step in single]
        for one in group_effects(model, behavior, asked, progress=progress):
            if isinstance(one, GroupEffect):
                groups.append(one)
            else:
                unexplained.append(one)
        return Explanation(
            run=model.run.name,
            first=versions[0],
            last=versions[-1],
            unit=behavior.unit,
            before=whole.before,
            after=whole.after,
            residual=whole.residual,
            residual_share=abs(whole.residual / whole.change) if whole.change else None,
            parts=parts,
            layers=whole.layers,
            steps=single,
            groups=sorted(groups, key=lambda one: -abs(one.effect)),
            unexplained=unexplained,
        )


def _versions(bucket: Bucket, first: int | None, last: int | None) -> list[int]:
    found = committed_versions(bucket)
    for wanted in (first, last):
        if wanted is not None and wanted not in found:
            raise InputError(
                f"the run has no version {wanted}", hint="deltawire log lists them", run=bucket.url
            )
    low = min(found, default=0) if first is None else first
    high = max(found, default=0) if last is None else last
    chosen = [version for version in found if low <= version <= high]
    if len(chosen) < 2:
        raise InputError("a change needs two versions, the earlier one first", run=bucket.url)
    return chosen


def _behavior(question: Question, model: VersionedModel, versions: list[int]) -> Behavior:
    if question.layer:
        return layer_behavior(question.layer, model, versions[0], versions[-1])
    if question.probe:
        return probe_behavior(question.probe, _groups(model, versions[1:]))
    return read_behavior(Path(question.file), model.text)


def _groups(model: VersionedModel, versions: list[int]) -> list[Group]:
    """Returns the groups that versions were trained on, as far as they are kept."""
    found = []
    for version in versions:
        with suppress(CorruptError):
            found += [one.group for one in groups_of(model.bucket, model.run, version)]
    return found


def _single_steps(
    model: VersionedModel,
    behavior: Behavior,
    versions: list[int],
    parts: list[StepPart],
    count: int,
    progress: Progress,
) -> list[StepPart]:
    """Returns the steps of one version with the largest new contribution. The largest
    parts of several versions are divided first, from the version before them on."""
    steps = [one for one in parts if one.fresh is not None]
    coarse = [one for one in parts if one.fresh is None]
    for part in sorted(coarse, key=lambda one: -abs(one.part))[:count]:
        start = max((one for one in versions if one < part.base), default=part.base)
        inside = [one for one in versions if start <= one <= part.version]
        divided = integrate(model, behavior, inside, progress=progress).steps
        fine = without_momentum(divided, _momentum(model.config))
        steps += [one for one in fine if one.base >= part.base and one.fresh is not None]
    return sorted(steps, key=lambda one: -abs(one.fresh or 0.0))[:count]


def _momentum(config: RunConfig) -> float:
    """Returns the share of a version's momentum that the next one keeps."""
    optimizer = config.train.optimizer
    beta = optimizer.momentum if optimizer.kind == "muon" else optimizer.beta1
    return float(beta**config.train.minibatches)
