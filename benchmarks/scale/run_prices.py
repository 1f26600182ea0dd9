"""Compares the requests and bytes that a server counted of a run with the lines of a plan."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from deltawire.plan.fleet.costs import DAY_S, Bill
from deltawire.plan.fleet.planner import FleetPlan
from deltawire.plan.fleet.request import PlanRequest
from deltawire.testing.throttle import Attempts

MATTERS = 0.03
"""Items below this share of the dollars may be further off."""
REGIONS = {"home": "home", "away": "away", "relay": "copy", "reader": "copy"}
"""The region of each process, whose name may end with a number; those of the trainer's are not
listed."""
OVERWRITTEN = {"heartbeats", "trainer.json", "readers"}
"""Kinds of objects that replace themselves, so that their bytes do not pile up."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A run whose plan is compared: so many workers in the trainer's region (``home``) and in
    another one (``away``), with so many ``slots`` each. The store takes each of ``latencies_s`` for
    a request, one after another."""

    home: int = 1
    away: int = 1
    slots: int = 16
    group_size: int = 4
    groups_per_step: int = 16
    anchor_every: int = 5
    checkpoint_every: int = 5
    hidden_size: int = 192
    latencies_s: tuple[float, ...] = (0.02, 0.15)

    @property
    def cycle(self) -> int:
        """The versions after which anchors and states of the trainer come in the same order."""
        return math.lcm(self.anchor_every, self.checkpoint_every)


FITTED = Setting()
"""The run whose counts corrected the planner's formulas."""
OTHER = Setting(
    home=2, away=1, slots=12, group_size=2, groups_per_step=24, anchor_every=6, checkpoint_every=4,
    hidden_size=256, latencies_s=(0.05, 0.3),
)  # fmt: skip
"""A run that differs from it in all of this, and corrected no formula. Anchors and states come
together in every twelfth version only."""


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a run in a window of ``seconds``: ``versions``, in which its trainer did not wait
    for ``busy_s``, of so many ``groups`` of so many tokens; and what a server counted."""

    seconds: float
    versions: float
    busy_s: float
    groups: float
    group_tokens: float
    get_s: float
    put_s: float
    delta_bytes: float
    values: int
    attempts: list[Attempts]

    @property
    def changed(self) -> float:
        """A share of changes; the plan's delta has the bytes that were measured in any case."""
        return 0.02


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """An item of a region: what a day was counted to ask for, and what was planned."""

    item: str
    region: str
    reads: float
    planned_reads: float
    writes: float
    planned_writes: float
    kept_bytes: float
    planned_kept_bytes: float
    crossing_bytes: float
    planned_crossing_bytes: float
    dollars: float
    planned_dollars: float

    @property
    def error(self) -> float:
        """The relative error of the planned dollars."""
        return self.planned_dollars / self.dollars - 1 if self.dollars else 0.0


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """A run's day, counted and planned."""

    get_s: float
    versions_a_day: float
    dollars: float
    planned_dollars: float
    rows: list[Row]

    @property
    def error(self) -> float:
        """The relative error of all dollars."""
        return self.planned_dollars / self.dollars - 1

    @property
    def largest(self) -> float:
        """The largest error of an item that matters."""
        return max(abs(one.error) for one in self.rows if one.dollars > MATTERS * self.dollars)


def request_of(seen: Observed, model: str, setting: Setting = FITTED) -> PlanRequest:
    """Returns the plan's request that describes the run of `benchmarks.scale.run_costs`."""
    period_s, per_group = seen.seconds / seen.versions, setting.group_size
    under_way = (setting.home + setting.away) * setting.slots
    batch = round(seen.groups * per_group)
    region: dict[str, Any] = {"accelerator": "h100", "accelerators": 1, "tensor_parallel": 1}
    plan = {
        "name": "costs",
        "model": {
            "config": model, "precision": "bf16", "changed": seen.changed,
            "bits_per_change": 8 * seen.delta_bytes / (seen.values * seen.changed),
        },
        "trainer": {
            "accelerator": "h100", "accelerators": 1, "step_s": seen.busy_s / seen.versions,
            "anchor_every": setting.anchor_every, "checkpoint_every": setting.checkpoint_every,
        },
        "rollouts": {
            "batch": batch, "seconds": under_way * period_s / batch, "per_engine": setting.slots,
            "max_staleness": 2, "group_size": per_group,
            "tokens": max(1, round(seen.group_tokens / per_group)),
        },
        "regions": [
            {**region, "name": "home", "accelerators": setting.home},
            {**region, "name": "away", "accelerators": setting.away, "away": True, "relay": False},
            {**region, "name": "copy", "away": True, "rollouts": False},
        ],
        "prices": {"s3": {"get_ms": 1e3 * seen.get_s, "put_ms": 1e3 * seen.put_s}},
    }  # fmt: skip
    request = msgspec.convert(plan, PlanRequest)
    request.check()
    return request


def item_of(one: Attempts) -> tuple[str, str]:
    """Returns the plan's item and region of requests."""
    region = REGIONS.get(one.client.rstrip("0123456789"), "")
    if one.client in ("evaluator", "relay"):
        return one.client, region
    if one.kind == "retained.json":
        return "retention", region
    if one.kind in ("live/decisions", "") or (one.kind == "events" and one.verb != "PUT"):
        return ("archive" if one.kind != "live/decisions" else "trainer's polls"), region
    if one.kind.startswith("weights") or one.kind == "run.json":
        return ("following" if region else "weights"), region
    if one.kind in ("leases", "events"):
        return {"leases": "heartbeats"}.get(one.kind, one.kind), region
    if one.kind == "heartbeats" and one.verb != "PUT":
        return ("trainer.json" if region else "trainer's polls"), region
    if one.kind == "rollouts":
        return ("groups" if region else "trainer's polls"), region
    return one.kind, region


def planned_item(name: str, region: str) -> str:
    """Returns the item that a plan's line is compared under."""
    if name in ("deltas", "anchors", "idle polls"):
        if region == "copy" and name == "anchors":
            return "relay"
        return "following" if region else "weights"
    return name


def counted_bill(seen: Observed, request: PlanRequest) -> Bill:
    """Prices what was counted, as if it went on for a day."""
    bill, day = Bill(request.kept_days, []), DAY_S / seen.seconds
    for one in seen.attempts:
        item, region = item_of(one)
        if one.client in ("bench", "maker") or item == "archive":
            continue
        reads = one.made * day if one.verb in ("GET", "HEAD") else 0.0
        writes = one.made * day if one.verb in ("PUT", "POST", "LIST") else 0.0
        crosses = region == "away" or (one.client == "relay" and one.run == "runs/run")
        states = one.kind == "checkpoints"
        kept = one.verb in ("PUT", "POST") and one.kind not in OVERWRITTEN and not states
        stored = request.trainer.checkpoints * request.trainer.checkpoint_every
        bill.add(
            item, region, request.store("s3"), reads=reads, writes=writes,
            kept_bytes=one.received * day * kept,
            stored_bytes=states * stored * one.received / seen.versions,
            crossing_bytes=(one.sent + one.received) * day * crosses,
        )  # fmt: skip
    return bill


def compare(seen: Observed, plan: FleetPlan, request: PlanRequest) -> Counted:
    """Puts what was counted next to the plan, by item and region."""
    bill = counted_bill(seen, request)
    counted: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * 5)
    planned: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * 5)
    for line in bill.lines:
        _add(counted[line.item, line.region], line)
    # Archiving begins after ten minutes, so none of it is counted here.
    for line in (one for one in plan.costs if one.item != "archive"):
        _add(planned[planned_item(line.item, line.region), line.region], line)
    rows = []
    for item, region in sorted(counted.keys() | planned.keys()):
        was, will = counted[item, region], planned[item, region]
        rows.append(
            Row(
                item=item, region=region, reads=was[0], planned_reads=will[0], writes=was[1],
                planned_writes=will[1], kept_bytes=was[2], planned_kept_bytes=will[2],
                crossing_bytes=was[3], planned_crossing_bytes=will[3], dollars=was[4],
                planned_dollars=will[4],
            )
        )  # fmt: skip
    return Counted(
        get_s=seen.get_s, versions_a_day=seen.versions * DAY_S / seen.seconds,
        dollars=bill.dollars(), planned_dollars=sum(one.planned_dollars for one in rows), rows=rows,
    )  # fmt: skip


def _add(sums: list[float], line: Any) -> None:
    amounts: Sequence[float] = (
        line.reads, line.writes, line.kept_bytes, line.crossing_bytes, line.dollars,
    )  # fmt: skip
    for place, amount in enumerate(amounts):
        sums[place] += amount
