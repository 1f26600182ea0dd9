"""Decides from successive heartbeats whether a process is alive.

This is the only place that makes the decision. The trainer's credits, the watchdog, the audit,
workers and views all call `Liveness.observe`, with the thresholds of ``[faults]``.
"""

from __future__ import annotations

from typing import Literal

from deltawire.wire.status import Heartbeat

Liveliness = Literal["alive", "stalled", "silent", "ended"]


class Liveness:
    """Decides whether one process is alive, from nothing but the heartbeats and times that it is
    given.

    Silence is measured by the observer's clock, and only while a heartbeat could have been
    noticed, so that an outage of the store marks no process as dead. ``first_s`` is the time
    allowed until the first heartbeat, if that is more than ``silence_s``.

    Example::

        liveness = Liveness(silence_s=config.faults.silence_s)
        liveness.observe(read_heartbeat(bucket, "w0"), elapsed_s=0.0)   # "alive"
    """

    def __init__(self, *, silence_s: float, first_s: float = 0.0) -> None:
        self.silent_s = 0.0
        self._silence_s = silence_s
        self._first_s = max(first_s, silence_s)
        self._seen: tuple[str, int] | None = None
        self._reason = ""

    def observe(
        self,
        heartbeat: Heartbeat | None,
        elapsed_s: float,
        *,
        age_s: float = 0.0,
        replaced: bool = False,
    ) -> Liveliness:
        """Decides by the heartbeat that is stored now, None if there is none.

        ``elapsed_s`` is the time since the previous call in which a heartbeat could have been
        noticed. ``age_s`` is the age of the heartbeat by its own clock; it counts as silence only
        at the first observation, when nothing else is known. ``replaced`` says that a newer
        heartbeat was stored since the previous call, and not read yet.
        """
        sign = None if heartbeat is None else (heartbeat.nonce, heartbeat.number)
        if sign is not None and sign != self._seen:
            self.silent_s = max(0.0, age_s) if self._seen is None else 0.0
            self._seen = sign
        elif replaced:
            self.silent_s = 0.0
        else:
            self.silent_s += elapsed_s
        self._reason = ""
        if heartbeat is not None and heartbeat.ended:
            return "ended"
        if self.silent_s > (self._first_s if self._seen is None else self._silence_s):
            self._reason = f"no sign of life for {self.silent_s:.0f} s"
            return "silent"
        if heartbeat is not None and heartbeat.stalled:
            self._reason = f"no progress for {heartbeat.quiet_s:.0f} s at: {heartbeat.doing[:40]!r}"
            return "stalled"
        return "alive"

    @property
    def reason(self) -> str:
        """Why the process must be replaced; empty if it need not be."""
        return self._reason
