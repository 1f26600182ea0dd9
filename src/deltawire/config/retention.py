"""Section of what a run keeps, and for how long."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from deltawire.config.base import Section


class RetainConfig(Section, frozen=True, kw_only=True):
    """Retention of a run's objects; 0 keeps everything.

    Example::

        [retain]
        versions = 50
        checkpoints = 3
    """

    rollouts: Annotated[int, Meta(ge=0, le=10**9)] = 0
    """Keep the groups of this many versions, and always those after the oldest checkpoint."""
    versions: Annotated[int, Meta(ge=0, le=10**9)] = 0
    """Keep this many versions readable, and always those from the oldest checkpoint on. Older ones
    are deleted a day after that, so that readers can finish."""
    events_days: Annotated[float, Meta(ge=0, le=1e5)] = 0.0
    """Keep archives of events for this many days; they hold events older than ten minutes."""
    captures_days: Annotated[float, Meta(ge=0, le=1e5)] = 0.0
    """Keep answers of live users for this many days, and at most one more."""
    feedback_days: Annotated[float, Meta(ge=0, le=1e5)] = 0.0
    """Keep reports about answers that were served in the last so many days, and one more."""
    lineage_days: Annotated[float, Meta(ge=0, le=1e5)] = 0.0
    """Keep for so many days of which answers each group was made, and longer while anything of the
    group is stored. An erasure after that names no versions that were trained on those answers."""
    checkpoints: Annotated[int, Meta(ge=0, le=10**9)] = 2
    """Keep this many states of the trainer."""
    proofs: Annotated[int, Meta(ge=0, le=1_000)] = 0
    """Also keep what ``deltawire verify-training`` needs for this many intervals between states of
    the trainer: their groups, and the states at both ends. A hash chooses them among all intervals
    of the run. Versions from the first of them on stay readable."""
