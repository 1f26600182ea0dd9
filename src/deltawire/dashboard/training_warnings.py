"""Warnings about a run's training: a rate that is too high, and updates that readers do not get.

Each rule reads events only. Status, page, report and the closing screen show the same sentences.
"""

from __future__ import annotations

from collections import Counter
from statistics import median

from deltawire.dashboard.state import RunState
from deltawire.events import Step

SERVED_VERSIONS = 3
"""Versions in a row with a served share below `SERVED_ENOUGH` before that is a warning."""
SERVED_ENOUGH = 0.5
MOST_CHANGED = 0.1
"""The share of a pretrained model's weights that a step may change without a warning."""
PRETRAINED_ELEMENTS = 10_000_000
"""Smaller models are toys that learn from nothing: steps that change a third of them are normal."""
K3_STEPS = 5
"""Steps whose median k3 is compared with that of as many later ones."""
K3_GROWTH = 10.0
K3_HARMLESS = 1e-3
"""A divergence below this, in nats a token, is no reason for a warning, however it grew."""


def training_warnings(state: RunState, *, warmup: int = 0) -> list[str]:
    """Returns what is wrong with a run's training, a sentence each.

    ``warmup`` is the number of steps in which the learning rate rises: k3 rises with it.

    Example::

        training_warnings(state, warmup=config.train.schedule.warmup_steps)
    """
    found = (_served(state), _changed(state), _divergence(state.steps_in_order, warmup))
    return [words for words in found if words]


def _served(state: RunState) -> str:
    """Describes training that does not reach the published weights."""
    served = [one.served for one in state.deltas[-SERVED_VERSIONS:] if one.served is not None]
    if len(served) < SERVED_VERSIONS or max(one.share for one in served) >= SERVED_ENOUGH:
        return ""
    newest = served[-1]
    worst = ", ".join(f"{name} {share:.0%}" for name, share in list(newest.layers.items())[:3])
    return (
        f"published weights contain {newest.share:.0%} of the training since version "
        f"{newest.since} (least: {worst}): updates are smaller than the published format's steps; "
        'train.masters = "dithered" or a higher rate brings them through'
    )


def _changed(state: RunState) -> str:
    """Describes steps that change too many weights of a pretrained model.

    Only versions of 16-bit weights state a served share. Of float32 weights each step changes all.
    """
    shares = {
        one.version: one.changed / one.elements
        for one in state.deltas
        if one.elements >= PRETRAINED_ELEMENTS and one.served is not None
    }
    many = {version: share for version, share in shares.items() if share > MOST_CHANGED}
    if not many:
        return ""
    worst = max(many, key=many.__getitem__)
    return (
        f"{len(many)} of {len(shares)} steps changed more than {MOST_CHANGED:.0%} of the weights, "
        f"version {worst} {many[worst]:.0%}: the learning rate is high for a pretrained model; "
        "lower train.optimizer.learning_rate"
    )


def _divergence(steps: list[Step], warmup: int) -> str:
    """Describes a divergence of sampler and trainer that grows within the run.

    Staleness adds to k3, so only steps of one largest staleness are compared, the most frequent.
    """
    steps = [step for step in steps if step.version > warmup and step.staleness]
    if not steps:
        return ""
    [(usual, _)] = Counter(max(step.staleness) for step in steps).most_common(1)
    like = [step for step in steps if max(step.staleness) == usual]
    if len(like) < 2 * K3_STEPS:
        return ""
    first, last = like[:K3_STEPS], like[-K3_STEPS:]
    before, now = (median(step.k3 for step in part) for part in (first, last))
    if now < K3_HARMLESS or now < K3_GROWTH * before:
        return ""
    return (
        f"k3 between sampler and trainer has grown from {before:.2g} (versions {first[0].version} "
        f"to {first[-1].version}) to {now:.2g} nats a token (versions {last[0].version} to "
        f"{last[-1].version}) at the same staleness: the policy changes faster from step to step; "
        "lower train.optimizer.learning_rate or train.max_staleness"
    )
