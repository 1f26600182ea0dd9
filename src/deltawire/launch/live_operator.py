"""Begins a canary by hand, and pauses, freezes and resumes decisions."""

from __future__ import annotations

import time
from typing import Any

from deltawire.errors import InputError
from deltawire.launch.live import ReleaseOptions, open_releaser, state_of
from deltawire.launch.upstreams import target_of
from deltawire.live.release.next_decision import canary_by_hand
from deltawire.wire.operator_state import Mode

CANARY_ATTEMPTS = 8


def begin_canary(location: str, share: float, options: ReleaseOptions) -> dict[str, Any]:
    """Shows a version to a share of users, and returns the state after it; raises as
    `canary_by_hand`."""
    releaser = open_releaser(location, options, writes=True)
    target = target_of(options.version, options.upstream, releaser.served)
    if target is None:
        raise InputError("a canary needs a version", hint="give --version N or --upstream NAME")
    for _ in range(CANARY_ATTEMPTS):  # A process may decide in between.
        decision = canary_by_hand(
            releaser.log,
            target,
            share,
            by=releaser.by,
            now=time.time(),
            reason=options.reason,
            generation=releaser.generation(),
        )
        if decision is None:
            return state_of(releaser, time.time())
        releaser.log.append(decision)
        releaser.log.poll()
    raise InputError(
        "other decisions came first", hint="look at deltawire live status, and decide again"
    )


def set_mode(location: str, mode: Mode, options: ReleaseOptions) -> dict[str, Any]:
    """Pauses canaries, freezes decisions, or lets them go on; returns the state after it."""
    releaser = open_releaser(location, options, writes=True)
    releaser.set_mode(mode, time.time(), options.reason)
    return state_of(releaser, time.time())
