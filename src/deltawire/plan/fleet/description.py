"""Turns a PLAN.toml into the arguments of the formulas and of the simulation.

A trainer's version goes to the bucket of its region. A region that is away has a relay, which gets
each version once and puts it into the region's own bucket.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from deltawire.plan.architecture import Model
from deltawire.plan.fleet.rates import FREE, Rates
from deltawire.plan.fleet.request import PlanRequest, RegionSection
from deltawire.plan.fleet.transfer import Amounts, Hop, HopTimeline, Readers, Writer, follow
from deltawire.store.ranges import AT_ONCE, REQUEST_BYTES
from deltawire.sync.maintain.blob_copies import copies_at_once

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


def column_share(model: Model, region: RegionSection) -> float:
    """Returns the share of the model's values that a rank reads and does not serve.

    It serves columns of output projections, whose rows are stored one after another, so that it
    reads all chunks of its matrices. Experts that are divided by expert parallelism are whole.
    """
    experts, others = model.column_parameters
    tensor = region.tensor_parallel
    split = max(1, tensor // region.expert_parallel)
    divided = max(tensor, region.expert_parallel)
    extra = others * (1 - 1 / tensor) + experts * (split - 1) / divided
    return extra / model.parameters


def divided_matrices(model: Model, region: RegionSection) -> int:
    """Returns how many matrices a rank has a part of; experts that are whole do not count."""
    experts, others = model.matrices
    split = region.tensor_parallel // region.expert_parallel
    return others + (experts // region.expert_parallel if split > 1 else 0)


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
        cache_bytes=region.blob_cache_gb * 1e9,
        more_fetched=column_share(model, region),
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
        more_fetched=0.0,
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
