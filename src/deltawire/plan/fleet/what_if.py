"""Plans with changed keys: every combination of the values that ``--what-if`` gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import msgspec

from deltawire.errors import InputError
from deltawire.plan.fleet.planner import FleetPlan

MOST = 256


class WhatIfRow(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of keys, and the plan's main figures.

    Example::

        WhatIfRow(keys={"trainer.step_s": "60"}, seconds=9.1, binding="poll", staleness_mean=2.0,
                 dollars_a_day=12.0, engines_needed=30, delta_bytes=3e9)
    """

    keys: dict[str, str]
    seconds: float
    binding: str
    staleness_mean: float
    dollars_a_day: float
    engines_needed: int
    delta_bytes: float


def parse_what_if(given: Sequence[str]) -> dict[str, list[str]]:
    """Parses ``KEY=VALUE,VALUE`` options; raises `InputError` for others, and for too many."""
    found: dict[str, list[str]] = {}
    count = 1
    for one in given:
        key, separator, values = one.partition("=")
        listed = [value.strip() for value in values.split(",") if value.strip()]
        if not separator or not key.strip() or not listed:
            raise InputError(
                f"--what-if {one!r} is not a key, an equals sign and values",
                hint="for example --what-if trainer.step_s=60,120 or 'regions.*.poll_s=0.1,0.5'",
            )
        found[key.strip()] = listed
        count *= len(listed)
    if count > MOST:
        raise InputError(f"--what-if asks for {count} plans; at most {MOST} are made")
    return found


def plan_what_if(
    keys: dict[str, list[str]], plan: Callable[[dict[str, str]], FleetPlan]
) -> list[WhatIfRow]:
    """Returns a row for each combination; ``plan`` makes a plan with some keys changed."""
    rows = []
    for values in product(*keys.values()):
        changes = dict(zip(keys, values, strict=True))
        made = plan(changes)
        rows.append(
            WhatIfRow(
                keys=changes,
                seconds=made.seconds,
                binding=made.binding,
                staleness_mean=made.staleness_mean,
                dollars_a_day=made.dollars_a_day,
                engines_needed=made.engines_needed,
                delta_bytes=made.delta_bytes,
            )
        )
    return rows
