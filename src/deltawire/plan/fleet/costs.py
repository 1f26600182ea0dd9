"""Dollars of a day, item by item: what every process of a run asks of its buckets.

A version's bytes are the smallest part of a large run's bill. Each item below is one kind of
object, priced by requests, bytes that are kept, and bytes that leave a region:

    workers  ─▶ heartbeats, groups, events        ◀─ trainer: heartbeats, groups
             ◀─ trainer.json, manifests (idle polls, with listings)
    trainer  ─▶ deltas, anchors, trainer.json     ◀─ readers, relays

Periods and requests are those of the code, not fitted; listings cost as much as writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from deltawire.plan.fleet.cold_start import ANCHOR_SHARE
from deltawire.plan.fleet.request import PlanRequest, RegionSection
from deltawire.plan.fleet.stores import StoreKind
from deltawire.plan.fleet.transfer import Amounts, HopTimeline, Readers
from deltawire.plan.run_memory import TOKEN_BYTES
from deltawire.rl.control.credits import REWRITE_S
from deltawire.rl.control.worker_guard import MOST_LISTED, POLL_EVERY_S
from deltawire.runtime.event_archive import COMPACT_EVERY_S
from deltawire.runtime.event_archive import EVERY_S as ARCHIVE_EVERY_S
from deltawire.runtime.fleet import MOST_READ
from deltawire.runtime.fleet import POLL_S as FLEET_POLL_S
from deltawire.runtime.heartbeat import HEARTBEAT_S
from deltawire.store import REQUESTS
from deltawire.store.bucket import MULTIPART_BYTES, PART_BYTES
from deltawire.sync.chain.version_poller import LIST_EVERY_POLLS, LONGEST_PAUSE, PATIENCE_SHARE
from deltawire.sync.publish.encoding import BLOB_BYTES

DAY_S = 86_400.0
WAIT_S = 0.5
"""The pause of a store's pollers, `deltawire.store.Bucket.poll_s` of one that is not local."""
TRAINER_WAIT_S = WAIT_S / 4
"""The pause between two polls of a trainer that waits for groups."""
STATE_BYTES = 12
"""Bytes of a trainer's state for each parameter: a master and Adam's moments, in float32."""
EVENTS_S = 1.0
"""A process stores its events so often."""
STEP_SEGMENTS = 2
"""Segments of a trainer for each step, besides those of its waits."""
ARCHIVE_READS = 2
"""Each segment that is archived is read until two answers agree."""
DECISIONS_S = 2.0
"""A trainer that waits looks so often for decisions about live versions."""
ROUNDS = 20
"""Of an iteration: the length of a trainer's turn depends on how many there are."""
STATE_OBJECT_BYTES = 256 << 20
"""Bytes of an object of a trainer's state, `deltawire.train.checkpoint_storage.PART_BYTES`."""
STATE_LISTINGS = 10
"""Listings after a state is stored: what is old, and what marks keep, each listed twice."""
CHECK_LISTINGS = 3
"""Listings after a commit: retention's floors, and its announcements of deletions, twice. A relay
makes the last two."""
MODEL_FILES = 9
"""Files of a small model's directory besides its weights, which a relay looks for at each
version."""
VERSION_READS = 3
"""Reads of a version besides its blobs: its manifest, and those of the poll that finds it."""
SEGMENT_BYTES = 300.0
"""Bytes of a segment of events, measured."""
HEARTBEAT_BYTES = 700.0
"""Bytes of a heartbeat, measured."""
GROUP_BYTES = 200.0
"""Bytes of a group without tokens."""
STATUS_BYTES, WORKER_BYTES, DRAW_BYTES = 250.0, 100.0, 11.0
"""Bytes of ``trainer.json``, of each worker and of each group that is not settled in it."""
PAGE = 1000
"""Keys of one answer to a listing."""


class CostLine(msgspec.Struct, frozen=True, kw_only=True):
    """One item of a day: requests, bytes written that are kept, bytes that leave a region.

    ``region`` is empty for what the trainer's bucket takes for all regions. ``writes`` include
    listings, which are priced like them. ``dollars`` are those of the day at whose end everything
    of the plan's ``kept_days`` is stored.
    """

    item: str
    region: str
    reads: float
    writes: float
    kept_bytes: float
    crossing_bytes: float
    dollars: float


@dataclass(frozen=True)
class Polls:
    """Requests of one poller between two versions: reads, and listings.

    Example::

        Polls.between(300.0, poll_s=0.5, request_s=0.1).listings
    """

    reads: float
    listings: float

    @classmethod
    def between(cls, interval_s: float, *, poll_s: float, request_s: float) -> Polls:
        """Counts the polls of ``interval_s`` in which no version appears.

        The pause is a twentieth of the time since the last version, within the poller's limits, so
        that polls first come evenly, then ever rarer, then evenly again. The first poll and each
        `LIST_EVERY_POLLS`-th later one lists the manifests, and looks at ``run.json`` and at the
        version held.
        """
        shortest, longest = poll_s / PATIENCE_SHARE, LONGEST_PAUSE * poll_s / PATIENCE_SHARE
        polls = min(interval_s, shortest) / (poll_s + request_s)
        if interval_s > shortest:
            until = min(interval_s, longest)
            at_first, at_last = (PATIENCE_SHARE * s + request_s for s in (shortest, until))
            polls += math.log(at_last / at_first) / PATIENCE_SHARE
        if interval_s > longest:
            polls += (interval_s - longest) / (LONGEST_PAUSE * poll_s + request_s)
        listings = min(polls, math.ceil(polls / LIST_EVERY_POLLS))
        return cls(reads=polls + 2 * listings, listings=listings)


@dataclass
class Bill:
    """The lines of a plan, each priced as it is added.

    Example::

        bill = Bill(kept_days=30, lines=[])
        bill.add("heartbeats", "", store, reads=1e6, writes=1e6)
    """

    kept_days: float
    lines: list[CostLine]

    def add(
        self,
        item: str,
        region: str,
        store: StoreKind,
        *,
        reads: float = 0.0,
        writes: float = 0.0,
        kept_bytes: float = 0.0,
        stored_bytes: float = 0.0,
        read_bytes: float = 0.0,
        crossing_bytes: float = 0.0,
    ) -> None:
        """Adds an item; raises `InputError` for a price that is needed and missing. Of what
        ``stored_bytes`` are for, as much is deleted as is written."""
        dollars = 0.0
        for amount, scale, price in (
            (reads, 1e6, "get_per_million"),
            (writes, 1e6, "put_per_million"),
            (read_bytes, 1e9, "same_region_gb"),
            (crossing_bytes, 1e9, "other_region_gb"),
            ((kept_bytes * self.kept_days + stored_bytes) / 30, 1e9, "gb_month"),
        ):
            if amount:
                dollars += amount / scale * store.price(price)
        self.lines.append(
            CostLine(
                item=item, region=region, reads=reads, writes=writes, kept_bytes=kept_bytes,
                crossing_bytes=crossing_bytes, dollars=dollars,
            )
        )  # fmt: skip

    def dollars(self, region: str | None = None) -> float:
        """Returns the dollars of a region (empty: the trainer's own), or of all."""
        return sum(one.dollars for one in self.lines if region is None or one.region == region)


@dataclass(frozen=True)
class Day:
    """A day of a planned run: what is published, by which hops, and how it is read.

    Example::

        bill_of(request, day).dollars()
    """

    amounts: Amounts
    published: HopTimeline
    readers: Mapping[str, Readers]
    paths: Mapping[str, list[HopTimeline]]
    period_s: float

    @property
    def versions(self) -> float:
        """Versions of a day."""
        return DAY_S / self.period_s


def bill_of(request: PlanRequest, day: Day) -> Bill:
    """Returns everything that a run's processes ask of its buckets in a day.

    Raises `InputError` for a price that is needed and missing.
    """
    bill = Bill(request.kept_days, [])
    _add_trainer(bill, request, day)
    _add_evaluators(bill, request, day)
    for region in request.regions:
        _add_region(bill, request, region, day)
        _add_workers(bill, request, region, day)
    return bill


def proof_bytes(request: PlanRequest, parameters: int) -> float:
    """Returns about how many bytes ``retain.proofs`` keeps: two states of full training, 12 bytes a
    parameter, and the tokens of each interval's groups. Routes, texts, and the versions from the
    first interval on are not in it."""
    rollouts, trainer = request.rollouts, request.trainer
    group = GROUP_BYTES + rollouts.group_size * rollouts.tokens * TOKEN_BYTES
    groups = trainer.checkpoint_every * rollouts.batch / rollouts.group_size * group
    return trainer.proofs * (2 * STATE_BYTES * parameters + groups)


def unsettled_groups(request: PlanRequest) -> float:
    """Returns the groups that ``trainer.json`` lists: all that the bound lets be granted."""
    rollouts = request.rollouts
    return (rollouts.max_staleness + 1) * rollouts.batch / rollouts.group_size


def engines_of(request: PlanRequest) -> int:
    """Returns the engines of all regions that make rollouts, each of which is one worker."""
    return sum(map(_workers_of, request.regions))


def _workers_of(region: RegionSection) -> int:
    return region.accelerators // region.tensor_parallel if region.rollouts else 0


def status_bytes(request: PlanRequest) -> float:
    """Returns the bytes of ``trainer.json``."""
    return (
        STATUS_BYTES + engines_of(request) * WORKER_BYTES + unsettled_groups(request) * DRAW_BYTES
    )


def _add_trainer(bill: Bill, request: PlanRequest, day: Day) -> None:
    store, amounts, versions = request.store(request.trainer.store), day.amounts, day.versions
    hops = {hop.name: hop for hop in day.published.hops}
    ranks = request.trainer.accelerators
    # Of two requests of a rank in the commit, one writes its part and one reads it.
    parts = ranks if ranks > 1 else 0
    puts = hops["put"].requests + hops["commit"].requests - parts
    # It is announced, and every rank checks its blobs afterwards, and that retention spares them.
    puts += 1 + ranks * CHECK_LISTINGS
    bill.add(
        "deltas", "", store, reads=(parts + amounts.blobs + 1) * versions, writes=puts * versions,
        kept_bytes=(amounts.delta_bytes + amounts.manifest_bytes) * versions,
    )  # fmt: skip
    _add_anchors(bill, request, "", store, day)
    _add_beats(bill, store, "heartbeats", "", 1)
    turns = _TrainerTurns.of(request, day)
    idle = min(turns.count - versions, turns.waiting_s / max(EVENTS_S, store.put_ms / 1e3))
    segments = idle + STEP_SEGMENTS * versions
    bill.add("events", "", store, writes=segments, kept_bytes=segments * SEGMENT_BYTES)
    workers = engines_of(request)
    known = workers + 1 + request.trainer.evaluators
    groups = request.rollouts.batch / request.rollouts.group_size * versions
    bill.add(
        "trainer's polls", "", store,
        reads=(turns.count - versions) * workers + groups + turns.looks * min(known, MOST_READ)
        + min(turns.count, turns.waiting_s / DECISIONS_S),
        writes=turns.looks * math.ceil(known / PAGE)
        + min(workers * DAY_S / POLL_EVERY_S, turns.count * MOST_LISTED),
    )  # fmt: skip
    bill.add("trainer.json", "", store, writes=turns.writes)
    _add_checkpoints(bill, request, day)
    _add_archive(bill, store, workers + 1 + request.trainer.evaluators)


@dataclass(frozen=True)
class _TrainerTurns:
    """The polls of a trainer in a day: it looks for groups while it has too few for a step, for
    ``waiting_s``, and once for each step. ``looks`` also read heartbeats, and ``writes`` replace
    ``trainer.json``.

    A step's own turn reads most groups, one of each worker after another, since they were stored
    while the trainer was busy. The rest of ``waiting_s`` are turns in which few groups come, and
    together, since those of an engine end together.
    """

    count: float
    waiting_s: float
    looks: float
    writes: float

    @classmethod
    def of(cls, request: PlanRequest, day: Day) -> _TrainerTurns:
        store, workers = request.store(request.trainer.store), engines_of(request)
        rollouts, versions = request.rollouts, day.versions
        get_s, put_s = store.get_ms / 1e3, store.put_ms / 1e3
        known = min(workers + 1 + request.trainer.evaluators, MOST_READ)
        look_s = (1 + math.ceil(known / REQUESTS)) * get_s
        groups = rollouts.batch / rollouts.group_size
        waiting_s = max(0.0, DAY_S - versions * request.trainer.step_s)
        # A round asks each worker for its next group; those that had one are asked again.
        round_s = math.ceil(workers / REQUESTS) * get_s
        step_turn_s = get_s + look_s + (1 + groups / workers) * round_s + put_s
        idle_s = max(0.0, waiting_s - versions * step_turn_s)
        together = max(1.0, rollouts.per_engine / rollouts.group_size)
        arrivals = groups * versions * idle_s / DAY_S / together
        idle, wrote = 1.0, 0.0
        for _ in range(ROUNDS):
            turn_s = TRAINER_WAIT_S + round_s + wrote * put_s
            turn_s += look_s * min(1.0, turn_s / FLEET_POLL_S)
            idle = max(idle_s / turn_s, 1.0)
            # It is written if groups came, and else every few seconds.
            wrote = max(1 - math.exp(-arrivals / idle), min(1.0, idle_s / REWRITE_S / idle))
        # A turn looks at most once, however long it takes.
        looks = min(max(versions, idle_s / (FLEET_POLL_S + look_s)), versions + idle)
        return cls(versions + idle, waiting_s, looks, versions + wrote * idle)


def _segments(store: StoreKind, pause_s: float = 0.0) -> float:
    """Returns the segments of events of a process in a day, which looks whether one is due after
    each pause of its loop."""
    every_s = max(EVENTS_S, store.put_ms / 1e3)
    return DAY_S / (math.ceil(every_s / pause_s) * pause_s if pause_s else every_s)


def _add_beats(
    bill: Bill, store: StoreKind, item: str, region: str, processes: int, *, away: bool = False
) -> None:
    """Adds heartbeats, before each of which a process looks for a successor."""
    beats = processes * DAY_S / (HEARTBEAT_S + store.get_ms / 1e3 + store.put_ms / 1e3)
    bill.add(
        item, region, store, reads=beats, writes=beats,
        crossing_bytes=away * beats * HEARTBEAT_BYTES,
    )  # fmt: skip


def _add_checkpoints(bill: Bill, request: PlanRequest, day: Day) -> None:
    """Adds states of the trainer, of which the newest stay, and the listings after each."""
    trainer = request.trainer
    if not trainer.checkpoints:
        return
    store, states = request.store(trainer.store), day.versions / trainer.checkpoint_every
    size = STATE_BYTES * day.amounts.values
    objects = trainer.accelerators * math.ceil(size / trainer.accelerators / STATE_OBJECT_BYTES)
    puts = objects * _puts_of(size / objects) + 1
    bill.add(
        "checkpoints", "", store, writes=states * (puts + STATE_LISTINGS),
        stored_bytes=trainer.checkpoints * size,
    )  # fmt: skip


def _puts_of(size: float) -> int:
    """Returns the requests that store an object of this size, a large one in parts."""
    return 1 if size <= MULTIPART_BYTES else math.ceil(size / PART_BYTES) + 2


def _add_archive(bill: Bill, store: StoreKind, processes: int) -> None:
    """Adds what moves old events into few objects: all heartbeats and a listing of streams once a
    minute, and from time to time a listing of each stream, whose segments are read."""
    rounds, compactions = DAY_S / ARCHIVE_EVERY_S, DAY_S / COMPACT_EVERY_S
    every = ARCHIVE_READS * processes * _segments(store)
    bill.add(
        "archive", "", store, reads=rounds * processes + every,
        writes=rounds * 2 + compactions * processes,
    )  # fmt: skip


def _add_evaluators(bill: Bill, request: PlanRequest, day: Day) -> None:
    """Adds processes that follow every version whole and look whether the run has ended."""
    count, store = request.trainer.evaluators, request.store(request.trainer.store)
    if not count:
        return
    get_s, versions = store.get_ms / 1e3, day.versions
    item = "evaluator"
    _add_beats(bill, store, item, "", count)
    loop_s = WAIT_S + get_s
    segments = count * _segments(store, loop_s)
    idle = Polls.between(day.period_s, poll_s=WAIT_S, request_s=get_s)
    gets = day.amounts.blobs + VERSION_READS
    bill.add(
        item, "", store, writes=segments + count * versions * idle.listings,
        reads=count * (DAY_S / loop_s + versions * (gets + idle.reads)),
        kept_bytes=segments * SEGMENT_BYTES,
        read_bytes=count * versions * day.amounts.fetched_bytes,
    )  # fmt: skip


def _add_anchors(bill: Bill, request: PlanRequest, region: str, store: StoreKind, day: Day) -> None:
    """Adds whole models, which the trainer stores, and a relay for its region."""
    if not request.trainer.anchor_every:
        return
    anchors = day.versions / request.trainer.anchor_every
    size = ANCHOR_SHARE[request.model.precision] * day.amounts.model_bytes
    blobs = math.ceil(size / BLOB_BYTES)
    # Made from the deltas since the last one, and looked for before and after that.
    reads = blobs + request.trainer.anchor_every * (day.amounts.blobs + 1)
    listings = 2 * CHECK_LISTINGS
    bill.add(
        "anchors", region, store, reads=reads * anchors, writes=(blobs + 1 + listings) * anchors,
        kept_bytes=size * anchors,
    )  # fmt: skip


def _add_region(bill: Bill, request: PlanRequest, region: RegionSection, day: Day) -> None:
    """Adds what readers and a relay fetch, and what the region's bucket keeps."""
    readers, versions = day.readers[region.name], day.versions
    source = request.store(request.trainer.store)
    relayed = region.away and region.relay
    store = request.store(region.store) if relayed else source
    path = day.paths[region.name]
    got = next(hop for hop in path[-1].hops if hop.name == "get")
    away = region.away and not relayed
    bill.add(
        "deltas", region.name, store, reads=got.requests * versions,
        **{"crossing_bytes" if away else "read_bytes": got.bytes * versions},
    )  # fmt: skip
    idle = Polls.between(day.period_s, poll_s=region.poll_s, request_s=readers.get_s)
    each = readers.count * versions
    bill.add("idle polls", region.name, store, reads=each * idle.reads, writes=each * idle.listings)
    if not relayed:
        return
    hops = {hop.name: hop for hop in path[1].hops}
    copied = hops["relay copy"].bytes * versions
    bill.add(
        "relay", region.name, source,
        reads=(hops["relay copy"].requests + idle.reads) * versions,
        writes=(idle.listings + 1) * versions, crossing_bytes=copied,
    )  # fmt: skip
    puts = hops["relay put"].requests + hops["relay commit"].requests + CHECK_LISTINGS - 1
    bill.add(
        "relay", region.name, store, writes=puts * versions,
        reads=(hops["relay get"].requests + day.amounts.blobs + MODEL_FILES) * versions,
        kept_bytes=copied,
    )  # fmt: skip
    _add_anchors(bill, request, region.name, store, day)


def _add_workers(bill: Bill, request: PlanRequest, region: RegionSection, day: Day) -> None:
    """Adds what workers ask of the trainer's bucket; what leaves or enters another region is
    priced as crossing."""
    store, rollouts = request.store(request.trainer.store), request.rollouts
    workers = _workers_of(region)
    if not workers:
        return
    get_s = store.get_ms / 1e3
    crossing = float(region.away)
    _add_beats(bill, store, "heartbeats", region.name, workers, away=region.away)
    turn_s = WAIT_S + get_s
    turn_s += get_s * min(1.0, turn_s / HEARTBEAT_S)  # Now and then, the trainer's heartbeat too.
    polls = workers * DAY_S / turn_s
    looks = workers * DAY_S / max(turn_s * math.ceil(HEARTBEAT_S / turn_s), turn_s)
    size = status_bytes(request)
    bill.add(
        "trainer.json", region.name, store, reads=polls + looks,
        crossing_bytes=crossing * (polls * size + looks * HEARTBEAT_BYTES),
        read_bytes=(1.0 - crossing) * (polls * size + looks * HEARTBEAT_BYTES),
    )  # fmt: skip
    share = workers / engines_of(request)
    groups = share * rollouts.batch / rollouts.group_size * day.versions
    stored = groups * (GROUP_BYTES + rollouts.group_size * rollouts.tokens * TOKEN_BYTES)
    bill.add(
        "groups", region.name, store, reads=groups, writes=groups, kept_bytes=stored,
        crossing_bytes=crossing * stored,
    )  # fmt: skip
    segments = workers * _segments(store)
    kept = segments * SEGMENT_BYTES
    bill.add(
        "events", region.name, store, writes=segments, kept_bytes=kept,
        crossing_bytes=crossing * kept,
    )  # fmt: skip
