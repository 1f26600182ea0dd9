"""Makes the plan of a fleet: each region's hops, requests, memory, bytes and dollars.

A trainer's version goes to the bucket of its region. A region that is away has a relay, which gets
each version once, decodes it to verify it, and puts it into the region's own bucket:

    trainer ─▶ bucket ─▶ readers of the trainer's region
                  └────▶ relay ─▶ bucket ─▶ readers of another region
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import msgspec

from deltawire.plan.architecture import Model
from deltawire.plan.fleet.methods import FREE, method_seconds, other_methods
from deltawire.plan.fleet.rates import Rates
from deltawire.plan.fleet.request import PlanRequest, RegionSection
from deltawire.plan.fleet.staleness import engines_needed, staleness
from deltawire.plan.fleet.stores import StoreKind
from deltawire.plan.fleet.transfer import (
    Amounts,
    Hop,
    HopTimeline,
    Readers,
    Writer,
    follow,
    publish,
)
from deltawire.store.ranges import AT_ONCE, REQUEST_BYTES
from deltawire.sync.maintain.blob_copies import copies_at_once
from deltawire.sync.publish.encoding import BLOB_BYTES, UPLOAD_BYTES

DAY_S = 86_400.0
QUANTISE_BYTES = 5
"""Bytes of device memory that quantising moves for each code: a float32 in, a code out."""
DEVICE_UTILIZATION = 0.5
"""Assumed share of a device's bandwidth that quantising and scattered writes reach."""
CORE_UTILIZATION = 0.8
"""Assumed share of a linear speed-up that all cores of a server reach."""
TABLE_READS = 2
"""Requests by which a relay reads the list of blobs from the piece table that it copied."""
LINE_BYTES = 64
"""Bytes of device memory that one scattered write moves: a line of 32 bytes in and out."""


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
    dollars_a_day: float
    whole_bytes_a_day: float
    whole_dollars_a_day: float
    staleness_mean: float
    methods: list[MethodLine]


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A whole plan. ``period_s`` is the time of a step, longer than asked for if rollouts bind.

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
    dollars_a_day: float
    whole_dollars_a_day: float
    accelerators: int
    accelerator_dollars_a_day: float | None
    regions: list[RegionPlan]


@dataclass(frozen=True)
class Relaying:
    """A relay: how it reads the trainer's bucket, and how it writes its region's.

    Example::

        relay_timeline(amounts, described.relays["europe"])
    """

    source: Readers
    get_s: float
    put_s: float
    put_bytes_s: float


@dataclass(frozen=True)
class Described:
    """A fleet as the arguments of the formulas and of the simulation.

    Example::

        described = describe_fleet(request, model, rates, changed=0.0027)
    """

    amounts: Amounts
    writer: Writer
    relays: dict[str, Relaying]
    readers: dict[str, Readers]


def describe_fleet(
    request: PlanRequest, model: Model, rates: Rates, *, changed: float
) -> Described:
    """Turns a plan's sections into the arguments of `publish` and `follow`."""
    precision = request.model.precision
    codec = rates.codec(precision)
    amounts = Amounts.of(
        model.parameters,
        precision,
        share=changed,
        bits_per_change=request.model.bits_per_change or codec.bits_per_change(changed),
        ranks=request.trainer.accelerators,
    )
    trainer = request.trainer
    accelerator, store = request.accelerator(trainer.accelerator), request.store(trainer.store)
    per_host = min(accelerator.per_node, trainer.accelerators)
    quantise = accelerator.bandwidth_gb_s * 1e9 * DEVICE_UTILIZATION / QUANTISE_BYTES
    writer = Writer(
        ranks=trainer.accelerators,
        cores=max(1.0, trainer.cores_per_host / per_host) * CORE_UTILIZATION,
        copy_bytes_s=accelerator.host_link_gb_s * 1e9,
        quantise_bytes_s=quantise if precision == "fp8" else 0.0,
        encode=codec.encode,
        link_bytes_s=trainer.link_gb_s * 1e9 / per_host,
        connection_bytes_s=store.connection_mb_s * 1e6,
        put_s=store.put_ms / 1e3,
        get_s=store.get_ms / 1e3,
        version_s=rates.publish_s,
        writes_per_s=store.writes_per_s,
    )
    readers = {
        region.name: _readers(request, region, model, rates, amounts) for region in request.regions
    }
    relays = {
        region.name: _relay(request, region, readers[region.name])
        for region in request.regions
        if region.away and region.relay
    }
    return Described(amounts, writer, relays, readers)


def reader_share(model: Model, region: RegionSection) -> float:
    """Returns the share of the model's values that one rank of an engine holds."""
    experts = model.expert_parameters
    divided = max(region.tensor_parallel, region.expert_parallel)
    rest = (model.parameters - experts) / region.tensor_parallel
    return (rest + experts / divided) / model.parameters


def _readers(
    request: PlanRequest,
    region: RegionSection,
    model: Model,
    rates: Rates,
    amounts: Amounts,
) -> Readers:
    accelerator = request.accelerator(region.accelerator)
    direct = region.away and not region.relay
    store = request.store(request.trainer.store if direct else region.store)
    per_host = min(accelerator.per_node, region.accelerators)
    change_bytes = 4 + amounts.width
    line_s = (change_bytes + LINE_BYTES) / (accelerator.bandwidth_gb_s * 1e9 * DEVICE_UTILIZATION)
    return Readers(
        count=region.accelerators,
        share=reader_share(model, region),
        per_host=per_host,
        cores=max(1.0, region.cores_per_host * CORE_UTILIZATION),
        serial_cores=min(float(per_host), float(region.cores_per_host)),
        decode=rates.codec(request.model.precision).decode,
        link_bytes_s=region.link_gb_s * 1e9,
        region_bytes_s=(region.cross_gb_s if direct else region.total_gb_s) * 1e9,
        connection_bytes_s=store.connection_mb_s * 1e6,
        get_s=store.get_ms / 1e3,
        poll_s=region.poll_s,
        interval_s=request.trainer.step_s,
        stage_change_s=change_bytes / (accelerator.host_link_gb_s * 1e9),
        swap_change_s=line_s,
        staged_on_cores=False,
        version_s=rates.follow_s,
        reads_per_s=store.reads_per_s,
        blob_cache=region.blob_cache,
    )


def _relay(request: PlanRequest, region: RegionSection, readers: Readers) -> Relaying:
    """Describes the relay of a region, which gets whole blobs and decodes none."""
    source, target = request.store(request.trainer.store), request.store(region.store)
    crossing = replace(
        readers,
        count=1,
        share=1.0,
        per_host=1,
        serial_cores=1.0,
        link_bytes_s=region.cross_gb_s * 1e9,
        connection_bytes_s=source.connection_mb_s * 1e6,
        get_s=source.get_ms / 1e3,
        decode=FREE,
        stage_change_s=0.0,
        swap_change_s=0.0,
        reads_per_s=source.reads_per_s,
        blob_cache=False,
    )
    return Relaying(
        source=crossing,
        get_s=target.get_ms / 1e3,
        put_s=target.put_ms / 1e3,
        put_bytes_s=target.connection_mb_s * 1e6,
    )


def relay_timeline(amounts: Amounts, relay: Relaying) -> HopTimeline:
    """Returns the hops of a relay.

    It copies the piece table and reads it back, copies blobs, several at once, each got and put
    whole, and creates the manifest. It decodes nothing before that; anchors and compacted deltas
    are made later, and no reader waits for them.
    """
    crossing = {hop.name: hop for hop in follow(amounts, relay.source).hops}
    size = amounts.delta_bytes
    at_once = min(copies_at_once(size / amounts.blobs), amounts.blobs)
    waves = math.ceil(amounts.blobs / at_once)
    ranges = min(AT_ONCE, math.ceil(size / amounts.blobs / REQUEST_BYTES))
    # One blob after another in each of the threads: a connection gets it, then puts it.
    per_thread = size / at_once
    serial_s = per_thread / (ranges * relay.source.connection_bytes_s)
    serial_s += per_thread / relay.put_bytes_s
    copy_s = relay.source.get_s + waves * (relay.source.get_s + relay.put_s)
    copy_s += max(serial_s, size / relay.source.link_bytes_s)
    table_gets = 0
    if not amounts.inline:
        copy_s += relay.source.get_s + relay.put_s + TABLE_READS * relay.get_s
        table_gets = TABLE_READS
    puts = amounts.blobs + (0 if amounts.inline else 1)
    hops = (
        Hop("relay poll", crossing["poll"].seconds, 0.0, crossing["poll"].requests),
        Hop("relay copy", copy_s, crossing["get"].bytes, crossing["get"].requests),
        Hop("relay get", 0.0, 0.0, table_gets),
        Hop("relay put", 0.0, size, puts),
        Hop("relay commit", relay.put_s, amounts.manifest_bytes, 1),
    )
    return HopTimeline(hops, 0.0)


def make_plan(request: PlanRequest, model: Model, rates: Rates, *, changed: float) -> FleetPlan:
    """Makes the plan; raises `InputError` for a price that is needed and missing."""
    described = describe_fleet(request, model, rates, changed=changed)
    amounts, writer = described.amounts, described.writer
    published = publish(amounts, writer)
    rollouts = request.rollouts
    engines = sum(region.accelerators // region.tensor_parallel for region in request.regions)
    paths = {region.name: _path(described, region.name, published) for region in request.regions}
    last = max(paths.values(), key=_seconds_of)

    found = staleness(
        batch=rollouts.batch, concurrent=engines * rollouts.per_engine, seconds=rollouts.seconds,
        tail=rollouts.tail, queue=rollouts.queue, step_s=request.trainer.step_s,
        transfer_s=_seconds_of(last),
    )  # fmt: skip
    period_s = request.trainer.step_s / min(1.0, found.ratio)
    versions = DAY_S / period_s
    regions = [
        _region_plan(
            request, region, described, paths[region.name], versions,
            found.rollout + found.queue + _seconds_of(paths[region.name]) / period_s,
        )
        for region in request.regions
    ]  # fmt: skip
    own = _own_dollars(request.store(request.trainer.store), amounts, published, versions)
    whole = amounts.whole(writer.ranks, 1.0)
    whole_own = _own_dollars(
        request.store(request.trainer.store), whole, publish(whole, writer), versions
    )
    pause_s = max(
        follow(amounts, readers).hops[-1].seconds for readers in described.readers.values()
    )
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
            step_s=request.trainer.step_s, pause_s=pause_s,
        ),
        versions_a_day=versions,
        dollars_a_day=own + sum(region.dollars_a_day for region in regions),
        whole_dollars_a_day=whole_own + sum(region.whole_dollars_a_day for region in regions),
        accelerators=request.trainer.accelerators
        + sum(region.accelerators for region in request.regions),
        accelerator_dollars_a_day=_accelerator_dollars(request),
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


def _region_plan(
    request: PlanRequest,
    region: RegionSection,
    described: Described,
    path: list[HopTimeline],
    versions: float,
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
    if readers.blob_cache:
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
        dollars_a_day=dollars,
        whole_bytes_a_day=whole_day,
        whole_dollars_a_day=whole_dollars,
        staleness_mean=stale,
        methods=_method_lines(request, region, described, versions),
    )


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
