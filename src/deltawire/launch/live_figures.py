"""How users fare by arm and version, as plain data for ``deltawire live status --json``."""

from __future__ import annotations

from typing import Any

import msgspec

from deltawire.dashboard.live_processes import read_gateways
from deltawire.dashboard.users import users_of
from deltawire.errors import CorruptError
from deltawire.runtime.decision_log import DecisionLog
from deltawire.store import Bucket


def users_row(bucket: Bucket, log: DecisionLog, now: float) -> dict[str, Any] | None:
    """Returns the figures of all gateways; None where none has any. Raises `RetryError`; a damaged
    object is named in the member ``fault``."""
    try:
        found = users_of(read_gateways(bucket), log, now)
    except CorruptError as error:
        return {"fault": error.message}
    return None if found is None else msgspec.to_builtins(found)
