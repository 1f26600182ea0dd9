"""The processes that serve live users, for the table of processes: gateways, replicas, decider.

They hold no lease, so what they store themselves says whether they are alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.captures import MAX_GATEWAY_BYTES, GatewayState
from deltawire.wire.decider_state import MAX_DECIDER_BYTES, DeciderState
from deltawire.wire.objects import decode_json

SILENT_AFTER_S = 60.0
"""Gateways store their state every 10 s, deciders every 15 s."""
FORGOTTEN_AFTER_S = 86_400.0
"""A gateway that was silent for so long is not listed any more."""
MAX_GATEWAYS = 1024
LiveRole = Literal["gateway", "replica", "decider"]
State = Literal["alive", "silent", "ended", "stalled"]


class LiveProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One such process. ``age_s`` is the time since it said something last, of a replica since its
    gateway did."""

    name: str
    role: LiveRole
    state: State
    doing: str = ""
    version: int | None = None
    age_s: float
    host: str = ""


def read_gateways(bucket: Bucket) -> list[GatewayState]:
    """Returns the states of a run's gateways, ended ones too; raises `RetryError` and
    `CorruptError`."""
    found = []
    for key in bucket.list(keys.LIVE_GATEWAYS)[:MAX_GATEWAYS]:
        data = bucket.get(key, limit=MAX_GATEWAY_BYTES)
        if data is not None:
            found.append(decode_json(data, GatewayState, run=bucket.url, key=key))
    return found


def read_decider(bucket: Bucket) -> DeciderState | None:
    """Returns the state of the decider that looked last; None if none ever did. Raises
    `RetryError` and `CorruptError`."""
    data = bucket.get(keys.LIVE_DECIDER, limit=MAX_DECIDER_BYTES)
    if data is None:
        return None
    return decode_json(data, DeciderState, run=bucket.url, key=keys.LIVE_DECIDER)


def gateway_totals(gateways: Sequence[GatewayState]) -> dict[str, float]:
    """Returns the sums of the counters of gateways, and the means of the rates of their detectors,
    by name."""
    totals: dict[str, float] = {}
    rates: dict[str, list[float]] = {}
    for found in gateways:
        for name, count in found.counts.items():
            totals[name] = totals.get(name, 0.0) + count
        for name, rate in found.rates.items():
            rates.setdefault(f"rate_{name}", []).append(rate)
    return totals | {name: sum(values) / len(values) for name, values in rates.items()}


def live_processes(
    gateways: Sequence[GatewayState], decider: DeciderState | None, now: float
) -> list[LiveProcess]:
    """Returns gateways, their replicas and the decider. A replica is listed once, by the gateway
    that spoke last, and only while that is alive."""
    found, replicas = [], dict[str, LiveProcess]()
    for one in sorted(gateways, key=lambda gateway: gateway.at):
        age_s = max(now - one.at, 0.0)
        if age_s > FORGOTTEN_AFTER_S:
            continue
        silent: State = "silent" if age_s > SILENT_AFTER_S else "alive"
        state: State = "ended" if one.ended else silent
        found.append(LiveProcess(name=one.gateway, role="gateway", age_s=age_s, state=state))
        if one.ended or silent == "silent":
            continue
        for replica in one.replicas:
            doing = f"upstream {replica.upstream}, not attested" if replica.upstream else ""
            replicas[replica.name] = LiveProcess(
                name=replica.name,
                role="replica",
                state="stalled" if replica.fault else "alive",
                doing=replica.fault or doing,
                version=replica.version,
                age_s=age_s,
            )
    found += replicas.values()
    if decider is not None:
        age_s = max(now - decider.at, 0.0)
        silent = "silent" if age_s > SILENT_AFTER_S else "alive"
        found.append(
            LiveProcess(
                name=f"decide ({decider.by})",
                role="decider",
                state="ended" if decider.ended else silent,
                doing=decider.alarm,
                age_s=age_s,
                host=decider.host,
            )
        )
    return found
