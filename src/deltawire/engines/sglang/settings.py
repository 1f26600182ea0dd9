"""Reads deltawire's settings from the environment of SGLang's processes."""

from __future__ import annotations

import json
import os

from deltawire.engines.following.settings import FollowSettings, parse
from deltawire.engines.sglang import FOLLOW
from deltawire.errors import InputError

MAX_BYTES = 1 << 16


def settings_here() -> FollowSettings:
    """Returns the settings in `FOLLOW`; raises `InputError` for what is none."""
    given = os.environ.get(FOLLOW, "")
    if len(given) > MAX_BYTES:
        raise InputError(f"{FOLLOW} has more than {MAX_BYTES} characters")
    if not given.lstrip().startswith("{"):
        return parse({"run": given}, where=FOLLOW)
    try:
        values = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{FOLLOW} is no JSON object: {error}",
            hint='set it to a bucket\'s location, or to {"run": "s3://bucket/run", …}',
        ) from None
    return parse(values, where=FOLLOW)
