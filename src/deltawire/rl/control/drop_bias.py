"""Drop bias: measures how far dropping old groups skews the data that is trained on.

Slow episodes are dropped more often than quick ones, so a loop that drops groups trains on a
different distribution of tasks than it samples. The measure counts groups that finished: those
trained on and those that were too old. Groups that failed or were damaged have other reasons and
are counted by cause only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from deltawire.estimates import FamilyCounts
from deltawire.rl.control.rollout_buffer import Batch

MAX_FAMILIES = 64
MAX_CAUSES = 16
OTHERS = "others"


class PolicyCost(msgspec.Struct, frozen=True, kw_only=True):
    """Drops over a run. Lengths are means of the sampled tokens of a group, None without groups.

    ``length_skew`` is the mean length of trained groups over that of all finished ones, minus 1:
    negative if short groups are favored. ``family_distance`` is the total variation distance
    between the families of the trained groups and of all finished ones, 0 … 1. ``episodes_failed``
    counts failed episodes of trained groups.
    """

    dropped: dict[str, int]
    episodes_failed: dict[str, int]
    length_trained: float | None
    length_dropped: float | None
    length_skew: float | None
    family_distance: float | None


def families_of(batch: Batch) -> dict[str, FamilyCounts]:
    """Counts one step's trained and too old groups by family, beyond `MAX_FAMILIES` as `OTHERS`."""
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

    for buffered in batch.taken:
        add(buffered.group.family, 1, 0, buffered.group.tokens)
    for drop in batch.drops:
        if drop.cause == "stale":
            add(drop.family, 0, 1, drop.tokens)
    return found


def causes_of(batch: Batch) -> dict[str, int]:
    """Counts one step's dropped groups by cause, with the first failure of a failed one."""
    return _most(
        f"{drop.cause}: {drop.detail}" if drop.detail else drop.cause for drop in batch.drops
    )


def failures_of(batch: Batch) -> dict[str, int]:
    """Counts one step's failed episodes by cause, in groups that were trained on."""
    return _most(
        cause
        for buffered in batch.taken
        for cause in {
            episode: t.cause
            for episode, t in zip(buffered.group.episodes, buffered.group.trajectories, strict=True)
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
    """Sums the counts of `families_of`, `causes_of` and `failures_of` over steps."""
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
