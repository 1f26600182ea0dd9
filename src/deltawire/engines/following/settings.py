"""The settings of an engine that follows a run: which one, and what a swap does to what is in
flight."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from deltawire.errors import InputError

MAX_BYTES = 1 << 16

InFlight = Literal["keep", "recompute", "drain"]


class FollowSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The plugin's settings. ``run`` is a bucket's location; the rest has defaults.

    ``in_flight`` decides what happens to running sequences at a swap: **keep** them on their keys
    and values, **recompute** these under the new weights, or **drain**: let the sequences finish
    first, while new ones wait.
    """

    run: Annotated[str, Meta(min_length=1, max_length=4096)]
    public_key: Annotated[str, Meta(pattern=r"^([0-9a-f]{64}(:[0-9a-f]{32})?)?\Z")] = ""
    in_flight: InFlight = "keep"
    follow: bool = True
    """True to swap to every new version without being asked."""
    threads: Annotated[int, Meta(ge=1, le=64)] = 1
    """Threads that decode, on each rank, in addition to the model's own."""
    report: bool = True
    """True to store in the run which version the ranks hold, once a minute for a host."""
    attest_every_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Seconds between checks of all live bits, which repair any difference; 0 never checks."""


def parse(values: Any, *, where: str) -> FollowSettings:
    """Converts a JSON object; raises `InputError` that names ``where`` and the fault."""
    try:
        return msgspec.convert(values, FollowSettings)
    except msgspec.ValidationError as error:
        raise InputError(
            f"{where}: {error}",
            hint=f"the members are {', '.join(FollowSettings.__struct_fields__)}",
        ) from None


def from_environment(variable: str) -> FollowSettings:
    """Returns the settings in ``variable``: a bucket's location, or a JSON object with the members
    of `FollowSettings`. Raises `InputError` for what is none."""
    given = os.environ.get(variable, "")
    if len(given) > MAX_BYTES:
        raise InputError(f"{variable} has more than {MAX_BYTES} characters")
    if not given.lstrip().startswith("{"):
        return parse({"run": given}, where=variable)
    try:
        values = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{variable} is no JSON object: {error}",
            hint='set it to a bucket\'s location, or to {"run": "s3://bucket/run", …}',
        ) from None
    return parse(values, where=variable)
