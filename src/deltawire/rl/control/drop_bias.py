"""What a staleness policy costs: what it dropped, and how far that skewed what is trained on.

Slow episodes are dropped more often than quick ones, so a loop that drops learns from a mix of
tasks other than the one that was drawn. Counted is what finished: the trained groups and the ones
that were too old. Groups that failed or were damaged were lost to something else; they are counted
by cause alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from deltawire.events import FamilyCounts
from deltawire.rl.control.rollout_buffer import Batch

MAX_FAMILIES = 64
MAX_CAUSES = 16
OTHERS = "others"


class PolicyCost(msgspec.Struct, frozen=True, kw_only=True):
    """Over a run. Lengths are the mean of the tokens that the model drew in a group, None where
    nothing was counted.

    ``length_skew`` is the trained groups' length over that of all that finished, minus 1: below 0
    is towards the short. ``family_distance`` is the total variation distance between the families
    of the trained groups and of all that finished, 0 … 1. ``episodes_failed`` counts episodes that
    trained groups went without.
    """

    dropped: dict[str, int]
    episodes_failed: dict[str, int]
    length_trained: float | None
    length_dropped: float | None
    length_skew: float | None
    family_distance: float | None


def families_of(batch: Batch) -> dict[str, FamilyCounts]:
    """One step's trained and too old groups by family; those past `MAX_FAMILIES` as `OTHERS`."""
    found: dict[str, FamilyCounts] = {}

    def add(family: str, trained: int, dropped: int, tokens: int) -> None:
        name = family if family in found or len(found) < MAX_FAMILIES else OTHERS
        before = found.get(name, FamilyCounts())
        found[name] = FamilyCounts(
            trained=before.trained + trained,
            trained_tokens=before.trained_tokens + trained * tokens,
            dropped=before.dropped + dropped,
            dropped_tokens=before.dropped_tokens + dropped * tokens,
        )

    for pooled in batch.taken:
        add(pooled.group.family, 1, 0, pooled.group.tokens)
    for drop in batch.drops:
        if drop.cause == "stale":
            add(drop.family, 0, 1, drop.tokens)
    return found


def causes_of(batch: Batch) -> dict[str, int]:
    """One step's dropped groups by cause, a failed one's with what failed first."""
    return _most(
        f"{drop.cause}: {drop.detail}" if drop.detail else drop.cause for drop in batch.drops
    )


def failures_of(batch: Batch) -> dict[str, int]:
    """One step's episodes that failed, by cause, in groups that had enough others."""
    return _most(
        cause
        for pooled in batch.taken
        for cause in {
            episode: t.cause
            for episode, t in zip(pooled.group.episodes, pooled.group.trajectories, strict=True)
            if t.cause
        }.values()
    )


def _most(causes: Iterable[str]) -> dict[str, int]:
    counts = Counter(cause[:120] for cause in causes)
    named = dict(counts.most_common(MAX_CAUSES))
    if rest := counts.total() - sum(named.values()):
        named[OTHERS] = named.get(OTHERS, 0) + rest
    return named


def cost_of(
    families: Sequence[dict[str, FamilyCounts]],
    dropped: Sequence[dict[str, int]],
    failed: Sequence[dict[str, int]],
) -> PolicyCost:
    """The sum over steps of what `families_of`, `causes_of` and `failures_of` counted."""
    trained: Counter[str] = Counter()
    finished: Counter[str] = Counter()
    tokens_trained = tokens_dropped = 0
    for step in families:
        for name, counts in step.items():
            trained[name] += counts.trained
            finished[name] += counts.trained + counts.dropped
            tokens_trained += counts.trained_tokens
            tokens_dropped += counts.dropped_tokens
    groups, old = trained.total(), finished.total() - trained.total()
    length = tokens_trained / groups if groups else None
    whole = (tokens_trained + tokens_dropped) / (groups + old) if groups else None
    return PolicyCost(
        dropped=_sum(dropped),
        episodes_failed=_sum(failed),
        length_trained=length,
        length_dropped=tokens_dropped / old if old else None,
        length_skew=length / whole - 1 if length is not None and whole else None,
        family_distance=None
        if not groups
        else sum(abs(trained[n] / groups - finished[n] / (groups + old)) for n in finished) / 2,
    )


def _sum(counted: Sequence[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for step in counted:
        total.update(step)
    return dict(total.most_common())
