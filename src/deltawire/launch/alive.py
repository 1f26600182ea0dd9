"""Examines one process by its heartbeat, for probes that replace processes which hang."""

from __future__ import annotations

import math
import time
from typing import Literal

import msgspec

from deltawire.config import FaultsConfig
from deltawire.dashboard.live_processes import read_decider
from deltawire.errors import InputError, RetryError
from deltawire.runtime.heartbeat import impatient, read_heartbeat
from deltawire.runtime.liveness import Liveness
from deltawire.runtime.trusted import ANY, ReaderTrust, open_trusted
from deltawire.wire import keys

State = Literal["alive", "stalled", "silent", "ended", "unknown"]
DECIDER = "decider"
"""The name of ``deltawire live decide``, which writes its own state and no heartbeat."""


class ExaminedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one process: ``unknown`` if its store does not answer.

    Example::

        examine_process("s3://bucket/run", "trainer").state
    """

    process: str
    state: State
    reason: str
    age_s: float | None
    """Seconds since its last heartbeat, by the clock of this machine."""


def examine_process(
    location: str,
    name: str,
    *,
    silence_s: float | None = None,
    trust: ReaderTrust = ANY,
    now: float | None = None,
) -> ExaminedProcess:
    """Reads a process's heartbeat once and decides as every part of a run does.

    Its age counts by the clocks of the process and of this machine, which are one where a probe
    runs. An outage of the store is no reason to replace a process: it waits too. Raises
    `InputError` for a name that no process can have, or a wrong ``silence_s``.
    """
    if not keys.valid_name(name):
        raise InputError(f"{name[:80]!r} is no name of a process", hint="such as trainer")
    allowed_s = FaultsConfig().silence_s if silence_s is None else silence_s
    if not 0 < allowed_s < math.inf:
        raise InputError(f"--silence {allowed_s} is not a number of seconds above 0")
    try:
        bucket = impatient(open_trusted(location, trust))
        heartbeat = read_heartbeat(bucket, name)
        decider = read_decider(bucket) if heartbeat is None and name == DECIDER else None
    except RetryError as error:
        return ExaminedProcess(process=name, state="unknown", reason=str(error), age_s=None)
    if decider is not None:
        age_s = max(0.0, (time.time() if now is None else now) - decider.at)
        silent = "" if age_s <= allowed_s else f"it looked {age_s:.0f} s ago"
        state: State = "ended" if decider.ended else "silent" if silent else "alive"
        return ExaminedProcess(
            process=name, state=state, reason="" if decider.ended else silent, age_s=age_s
        )
    if heartbeat is None:
        reason = "no heartbeat under this name"
        return ExaminedProcess(process=name, state="silent", reason=reason, age_s=None)
    age_s = max(0.0, (time.time() if now is None else now) - heartbeat.at)
    judge = Liveness(silence_s=allowed_s)
    state = judge.observe(heartbeat, 0.0, age_s=age_s)
    return ExaminedProcess(process=name, state=state, reason=judge.reason, age_s=age_s)
