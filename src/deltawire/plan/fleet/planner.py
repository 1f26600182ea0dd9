"""Makes the plan of a fleet: each region's hops, requests, memory, bytes and dollars.

A trainer's version goes to the bucket of its region. A region that is away has a relay, which gets
each version once, decodes it to verify it, and puts it into the region's own bucket:

    trainer ─▶ bucket ─▶ readers of the trainer's region
                  └────▶ relay ─▶ bucket ─▶ readers of another region
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from deltawire.plan.architecture import Model
from deltawire.plan.fleet.cold_start import ColdStart, cold_start
from deltawire.plan.fleet.costs import DAY_S, Bill, CostLine, Day, bill_of, engines_of, proof_bytes
from deltawire.plan.fleet.description import (
    Described,
    describe_fleet,
    divided_matrices,
    relay_timeline,
)
from deltawire.plan.fleet.methods import method_seconds, other_methods
from deltawire.plan.fleet.rates import Rates
from deltawire.plan.fleet.request import PlanRequest, RegionSection
from deltawire.plan.fleet.staleness import engines_needed, staleness
from deltawire.plan.fleet.stores import StoreKind
from deltawire.plan.fleet.transfer import Amounts, HopTimeline, follow, publish
from deltawire.sync.publish.encoding import BLOB_BYTES, UPLOAD_BYTES


class HopLine(msgspec.Struct, frozen=True, kw_only=True):
    """One hop of a region's path: seconds without overlaps, bytes and requests of all together."""

    hop: str
    seconds: float
    bytes: float
    requests: float


class MethodLine(msgspec.Struct, frozen=True, kw_only=True):
    """Another method: bytes of a version, the least seconds, dollars of bytes and requests."""

    method: str
    bytes: float
    seconds: float
    dollars_a_day: float
    source: str


class RegionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One region: the path of a version, and what it costs for a day.

    ``reads_share`` is the share of the store's limit that fetching a version takes at its peak,
    ``polls_share`` that of polling. ``keeps_up`` is false if its relay or its readers need longer
    for a version than there is between two. Memory is of one rank, in bytes. ``needed_bytes_s`` is
    the rate that each reader needs to meet the goal, None without a goal or if no rate would do.
    ``version_dollars_a_day`` are those of deltas only, to compare with other methods and whole
    checkpoints; ``dollars_a_day`` are all that the region's processes ask of any bucket.
    ``relay_host_bytes`` is what a relay holds while it makes the region's anchors, 0 without one.
    """

    name: str
    hops: list[HopLine]
    seconds: float
    binding: str
    goal_met: bool | None
    needed_bytes_s: float | None
    keeps_up: bool
    reader_bytes: float
    reads_share: float
    polls_share: float
    host_bytes_per_rank: float
    host_fits: bool
    device_bytes_per_rank: float
    bytes_a_day: float
    crossing_bytes_a_day: float
    version_dollars_a_day: float
    dollars_a_day: float
    whole_bytes_a_day: float
    whole_dollars_a_day: float
    staleness_mean: float
    cold: ColdStart
    relay_host_bytes: float
    methods: list[MethodLine]


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A whole plan. ``period_s`` is the time of a step, longer than asked for if rollouts bind.
    ``costs`` add up to ``dollars_a_day``; of these, ``version_dollars_a_day`` are for deltas, and
    ``kept_days`` those of which everything is stored. ``proof_bytes`` is about what
    ``retain.proofs`` keeps, which no dollars are for. ``warnings`` name keys without effect.

    Example::

        plan = make_plan(read_request(path), model, shipped_rates(), changed=0.03)
        print(plan.seconds, plan.binding)
    """

    name: str
    goal_s: float | None
    model: str
    parameters: int
    precision: str
    changed: float
    model_bytes: float
    delta_bytes: float
    delta_share: float
    bits_per_change: float
    rates: str
    seconds: float
    binding: str
    trainer_blocked_s: float
    trainer_host_bytes_per_rank: float
    staleness_mean: float
    staleness_rollout: float
    staleness_queue: float
    staleness_transfer: float
    max_staleness: int
    rollout_ratio: float
    period_s: float
    engines: int
    engines_needed: int
    versions_a_day: float
    version_dollars_a_day: float
    dollars_a_day: float
    kept_days: float
    proof_bytes: float
    whole_dollars_a_day: float
    accelerators: int
    accelerator_dollars_a_day: float | None
    costs: list[CostLine]
    warnings: list[str]
    regions: list[RegionPlan]


def make_plan(request: PlanRequest, model: Model, rates: Rates, *, changed: float) -> FleetPlan:
    """Makes the plan; raises `InputError` for a price that is needed and missing."""
    described = describe_fleet(request, model, rates, changed=changed)
    amounts, writer = described.amounts, described.writer
    published = publish(amounts, writer)
    rollouts, engines = request.rollouts, engines_of(request)
    paths = {region.name: _path(described, region.name, published) for region in request.regions}
    last = max(paths.values(), key=_seconds_of)

    found = staleness(
        batch=rollouts.batch, concurrent=engines * rollouts.per_engine, seconds=rollouts.seconds,
        tail=rollouts.tail, queue=rollouts.queue, step_s=request.trainer.step_s,
        transfer_s=_seconds_of(last),
    )  # fmt: skip
    period_s = request.trainer.step_s / min(1.0, found.ratio)
    versions = DAY_S / period_s
    bill = bill_of(request, Day(amounts, published, described.readers, paths, period_s))
    regions = [
        _region_plan(
            request, region, model, described, paths[region.name], versions, bill,
            found.rollout + found.queue + _seconds_of(paths[region.name]) / period_s,
        )
        for region in request.regions
    ]  # fmt: skip
    store, whole = request.store(request.trainer.store), amounts.whole(writer.ranks, 1.0)
    own = _own_dollars(store, amounts, published, versions)
    whole_own = _own_dollars(store, whole, publish(whole, writer), versions)
    pauses_s = [follow(amounts, one).hops[-1].seconds for one in described.readers.values()]
    return FleetPlan(
        name=request.name,
        goal_s=request.goal_s,
        model=model.name,
        parameters=model.parameters,
        precision=request.model.precision,
        changed=changed,
        model_bytes=amounts.model_bytes,
        delta_bytes=amounts.delta_bytes,
        delta_share=amounts.delta_bytes / amounts.model_bytes,
        bits_per_change=8 * amounts.delta_bytes / amounts.changes,
        rates=f"{rates.machine}, {rates.measured}",
        seconds=_seconds_of(last),
        binding=_binding(last),
        trainer_blocked_s=published.hops[0].seconds + published.hops[1].seconds,
        trainer_host_bytes_per_rank=2 * amounts.model_bytes / writer.ranks + UPLOAD_BYTES,
        staleness_mean=found.mean,
        staleness_rollout=found.rollout,
        staleness_queue=found.queue,
        staleness_transfer=found.transfer,
        max_staleness=rollouts.max_staleness,
        rollout_ratio=found.ratio,
        period_s=period_s,
        engines=engines,
        engines_needed=engines_needed(
            batch=rollouts.batch, seconds=rollouts.seconds, per_engine=rollouts.per_engine,
            step_s=request.trainer.step_s, pause_s=max(pauses_s),
        ),
        versions_a_day=versions,
        version_dollars_a_day=own + sum(region.version_dollars_a_day for region in regions),
        dollars_a_day=bill.dollars(),
        kept_days=request.kept_days,
        proof_bytes=proof_bytes(request, model.parameters),
        whole_dollars_a_day=whole_own + sum(region.whole_dollars_a_day for region in regions),
        accelerators=request.trainer.accelerators
        + sum(region.accelerators for region in request.regions),
        accelerator_dollars_a_day=_accelerator_dollars(request),
        costs=bill.lines,
        warnings=_warnings(described),
        regions=regions,
    )  # fmt: skip


def _path(described: Described, name: str, published: HopTimeline) -> list[HopTimeline]:
    """Returns the timelines of a version on its way to a region."""
    path = [published]
    if name in described.relays:
        path.append(relay_timeline(described.amounts, described.relays[name]))
    return [*path, follow(described.amounts, described.readers[name])]


def _seconds_of(path: list[HopTimeline]) -> float:
    return sum(timeline.seconds for timeline in path)


def _binding(path: list[HopTimeline]) -> str:
    return max((hop for timeline in path for hop in timeline.hops), key=lambda h: h.seconds).name


def _warnings(described: Described) -> list[str]:
    """Names the keys that have no effect."""
    found = []
    needed = 2 * described.amounts.delta_bytes / 1e9
    for name, readers in described.readers.items():
        if readers.blob_cache and not readers.caches(described.amounts):
            found.append(
                f"{name}: blob_cache has no effect, as two deltas have {needed:.3g} GB and the "
                f"cache {readers.cache_bytes / 1e9:.3g}: raise blob_cache_gb, and "
                "DELTAWIRE_BLOB_CACHE_GB on its hosts"
            )
    return found


def _region_plan(
    request: PlanRequest,
    region: RegionSection,
    model: Model,
    described: Described,
    path: list[HopTimeline],
    versions: float,
    bill: Bill,
    stale: float,
) -> RegionPlan:
    amounts, readers = described.amounts, described.readers[region.name]
    accelerator = request.accelerator(region.accelerator)
    following = path[-1]
    get = next(hop for hop in following.hops if hop.name == "get")
    seconds = _seconds_of(path)
    fetched = readers.fetching(amounts).bytes
    rest_s = seconds - (get.seconds - 4 * readers.get_s)
    needed = None
    if request.goal_s is not None and request.goal_s > rest_s:
        needed = fetched / (request.goal_s - rest_s)
    host = amounts.model_bytes * readers.share + 2 * BLOB_BYTES
    host += amounts.changes * readers.share * (4 + amounts.width)
    if readers.caches(amounts):
        host += 2 * amounts.delta_bytes / min(readers.per_host, readers.count)
    whole = amounts.whole(described.writer.ranks, readers.share)
    day, crossing, dollars = _region_dollars(request, region, described, amounts, versions)
    whole_day, _, whole_dollars = _region_dollars(request, region, described, whole, versions)
    return RegionPlan(
        name=region.name,
        hops=[
            HopLine(hop=h.name, seconds=h.seconds, bytes=h.bytes, requests=h.requests)
            for timeline in path
            for h in timeline.hops
        ],
        seconds=seconds,
        binding=_binding(path),
        goal_met=None if request.goal_s is None else seconds <= request.goal_s,
        needed_bytes_s=needed,
        keeps_up=max(timeline.seconds for timeline in path[1:]) <= DAY_S / versions,
        reader_bytes=fetched,
        reads_share=get.requests / max(get.seconds, 1e-9) / readers.reads_per_s,
        polls_share=readers.count / readers.pause_s / readers.reads_per_s,
        host_bytes_per_rank=host,
        host_fits=host <= accelerator.host_bytes,
        device_bytes_per_rank=amounts.model_bytes * readers.share
        + amounts.changes * readers.share * (4 + amounts.width),
        bytes_a_day=day,
        crossing_bytes_a_day=crossing,
        version_dollars_a_day=dollars,
        dollars_a_day=bill.dollars(region.name),
        whole_bytes_a_day=whole_day,
        whole_dollars_a_day=whole_dollars,
        staleness_mean=stale,
        cold=cold_start(
            amounts,
            readers,
            precision=request.model.precision,
            matrices=divided_matrices(model, region),
            deltas=max(0, request.trainer.anchor_every - 1) / 2,
        ),
        relay_host_bytes=_relay_bytes(request, region, amounts),
        methods=_method_lines(request, region, described, versions),
    )


def _relay_bytes(request: PlanRequest, region: RegionSection, amounts: Amounts) -> float:
    """Returns the memory of a region's relay: blobs under way, and with anchors a whole model."""
    if not (region.away and region.relay):
        return 0.0
    held = amounts.model_bytes if request.trainer.anchor_every else 0.0
    return held + 2 * UPLOAD_BYTES


def _region_dollars(
    request: PlanRequest,
    region: RegionSection,
    described: Described,
    amounts: Amounts,
    versions: float,
) -> tuple[float, float, float]:
    """Returns bytes that readers get in a day, bytes from another region, and dollars."""
    readers = described.readers[region.name]
    source = request.store(request.trainer.store)
    following = follow(amounts, readers)
    got = next(hop for hop in following.hops if hop.name == "get")
    day = got.bytes * versions
    requests = got.requests * versions + readers.count * DAY_S / readers.pause_s
    if not region.away:
        dollars = requests / 1e6 * source.price("get_per_million")
        return day, 0.0, dollars + day / 1e9 * source.price("same_region_gb")
    if not region.relay:
        dollars = requests / 1e6 * source.price("get_per_million")
        return day, day, dollars + day / 1e9 * source.price("other_region_gb")
    store = request.store(region.store)
    relay = relay_timeline(amounts, described.relays[region.name])
    hops = {hop.name: hop for hop in relay.hops}
    crossing = hops["relay copy"].bytes * versions
    relay_gets = hops["relay copy"].requests * versions + DAY_S / readers.pause_s
    requests += hops["relay get"].requests * versions
    puts = (hops["relay put"].requests + hops["relay commit"].requests) * versions
    dollars = requests / 1e6 * store.price("get_per_million")
    dollars += day / 1e9 * store.price("same_region_gb")
    dollars += relay_gets / 1e6 * source.price("get_per_million")
    dollars += crossing / 1e9 * source.price("other_region_gb")
    dollars += puts / 1e6 * store.price("put_per_million")
    dollars += crossing / 1e9 * store.price("gb_month") / 30
    return day, crossing, dollars


def _own_dollars(
    store: StoreKind, amounts: Amounts, published: HopTimeline, versions: float
) -> float:
    """Returns dollars of a day of the trainer's bucket: requests, and its bytes kept for a day."""
    puts = sum(hop.requests for hop in published.hops) * versions
    written = amounts.delta_bytes * versions
    return puts / 1e6 * store.price("put_per_million") + written / 1e9 * (
        store.price("gb_month") / 30
    )


def _method_lines(
    request: PlanRequest, region: RegionSection, described: Described, versions: float
) -> list[MethodLine]:
    amounts, readers = described.amounts, described.readers[region.name]
    found = []
    for method in other_methods(amounts):
        sent = method.amounts(amounts, described.writer.ranks, readers.share)
        fleet = described
        if not method.sharded:
            hosts = -(-readers.count // readers.per_host)
            one = replace(readers, count=hosts, per_host=1, share=1.0)
            fleet = replace(described, readers={**described.readers, region.name: one})
        _, _, dollars = _region_dollars(request, region, fleet, sent, versions)
        seconds = method_seconds(method, amounts, described.writer, readers)
        if region.name in described.relays:
            copied = amounts.sending(method.bytes, described.writer.ranks)
            seconds += relay_timeline(copied, described.relays[region.name]).seconds
        found.append(
            MethodLine(
                method=method.name,
                bytes=method.bytes,
                seconds=seconds,
                dollars_a_day=dollars,
                source=method.source,
            )
        )
    return found


def _accelerator_dollars(request: PlanRequest) -> float | None:
    """Returns dollars of all accelerators for a day, None unless the plan has their prices."""
    total = 0.0
    kinds = [(request.trainer.accelerator, request.trainer.accelerators)]
    kinds += [(region.accelerator, region.accelerators) for region in request.regions]
    for name, count in kinds:
        price = request.accelerator_hour.get(name)
        if price is None:
            return None
        total += 24 * price * count
    return total
