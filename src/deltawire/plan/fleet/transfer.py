"""The closed form of one version's way from a trainer's memory to the last reader's weights.

    trainer ranks                 store                 readers of a region
      copy ▶ quantise ▶ encode ─▶ put ▶ commit ─▶ poll ▶ get ▶ decode ▶ stage ▶ swap
                        └ overlap ┘                      └ overlap ┘

Encoding and uploading overlap blob by blob, and so do fetching and decoding: two hops of n blobs
that take a and b seconds in all take ``max(a + b/n, a/n + b)``. Readers on one host share its cores
and its link, readers of a region share the region's. Everything is the expected time of the *last*
of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from deltawire.plan.fleet.rates import BYTES, CoreCost, Precision
from deltawire.store import REQUESTS
from deltawire.store.ranges import AT_ONCE, REQUEST_BYTES
from deltawire.sync.chain.version_poller import LONGEST_PAUSE, PATIENCE_SHARE
from deltawire.sync.follow.blob_cache import LIMIT_BYTES
from deltawire.sync.follow.fetch import AHEAD_BYTES, WHOLE
from deltawire.sync.publish.encoding import BLOB_BYTES, UPLOADS
from deltawire.wire.payload import INLINE_BYTES
from deltawire.wire.run import CHUNK_ELEMENTS, LARGEST_CHUNK, MANY_CHUNKS

PIECE_BYTES = 36.4
"""Bytes of a piece in a piece table, measured."""
MANIFEST_BYTES = 400.0
"""Bytes of a manifest without its piece table, measured."""
APART = 0.5
"""Share of the possible overlap that readers reach whose polls are apart; fitted to simulations."""
INLINED = 4 / 3
"""Bytes of a manifest for each byte of an inline table, which is in base 64."""


def blobs_of(size: float, ranks: int) -> int:
    """Returns how many blobs ``ranks`` ranks make of ``size`` bytes in all."""
    return ranks * max(1, math.ceil(size / ranks / BLOB_BYTES))


@dataclass(frozen=True)
class Amounts:
    """One version: ``values`` stored values of ``width`` bytes, of which ``changes`` changed.

    Example::

        amounts = Amounts.of(10**12, "fp8", share=0.0027, bits_per_change=8.2)
        print(amounts.delta_bytes / amounts.model_bytes)
    """

    values: float
    width: int
    changes: float
    delta_bytes: float
    pieces: int
    blobs: int = 1
    """Blobs of the version: every rank closes its own."""

    @classmethod
    def of(
        cls,
        values: float,
        precision: Precision,
        *,
        share: float,
        bits_per_change: float,
        ranks: int = 1,
    ) -> Amounts:
        """Computes the amounts of a version of which ``share`` of the values changed."""
        chunk = CHUNK_ELEMENTS
        while chunk < LARGEST_CHUNK and values / chunk > MANY_CHUNKS:
            chunk *= 2
        changes = values * share
        return cls(
            values=values,
            width=BYTES[precision],
            changes=changes,
            delta_bytes=changes * bits_per_change / 8,
            pieces=math.ceil(values / chunk),
            blobs=blobs_of(changes * bits_per_change / 8, ranks),
        )

    def sending(self, size: float, ranks: int) -> Amounts:
        """Returns the same version with ``size`` bytes instead of the delta's."""
        return replace(self, delta_bytes=size, blobs=blobs_of(size, ranks))

    def whole(self, ranks: int, share: float) -> Amounts:
        """Returns the same version sent whole, in as many objects as a reader of ``share`` of it
        makes requests, which are of 8 MiB."""
        requests = math.ceil(self.model_bytes * share / REQUEST_BYTES)
        blobs = ranks * max(1, requests // ranks)
        return replace(self, delta_bytes=self.model_bytes, blobs=blobs)

    @property
    def model_bytes(self) -> float:
        """Bytes of the whole model."""
        return self.values * self.width

    @property
    def table_bytes(self) -> float:
        """Bytes of the piece table."""
        return self.pieces * PIECE_BYTES

    @property
    def inline(self) -> bool:
        """True if the manifest holds the piece table."""
        return self.table_bytes <= INLINE_BYTES

    @property
    def manifest_bytes(self) -> float:
        """Bytes of the manifest and its piece table."""
        return MANIFEST_BYTES + self.table_bytes * (INLINED if self.inline else 1.0)

    @property
    def fetched_bytes(self) -> float:
        """Bytes that a reader of the whole model fetches."""
        return self.delta_bytes + self.manifest_bytes


@dataclass(frozen=True)
class Hop:
    """One hop: its time without overlaps, and the bytes and requests that it makes in all.

    Example::

        Hop("get", 1.2, bytes=3e9, requests=400)
    """

    name: str
    seconds: float
    bytes: float = 0.0
    requests: float = 0.0


@dataclass(frozen=True)
class HopTimeline:
    """Hops in order, and the seconds that two of them save by overlapping.

    Example::

        timeline = publish(amounts, writer)
        print(timeline.seconds, timeline.binding)
    """

    hops: tuple[Hop, ...]
    saved: float

    @property
    def seconds(self) -> float:
        """Seconds from the start to the end."""
        return sum(hop.seconds for hop in self.hops) - self.saved

    @property
    def binding(self) -> str:
        """The hop that takes longest."""
        return max(self.hops, key=lambda hop: hop.seconds).name


@dataclass(frozen=True)
class Writer:
    """A trainer of ``ranks`` ranks; costs and rates are those of one rank.

    ``cores`` is how many times faster a rank's threads are than one core. ``copy_bytes_s`` is the
    copy to host memory, ``quantise_bytes_s`` the rate of quantising (0: nothing to do), ``put_s``
    and ``get_s`` are small requests with their latency. ``link_bytes_s`` is a rank's part of its
    host's link to the store.

    Example::

        writer = Writer(ranks=128, cores=12, copy_bytes_s=50e9, quantise_bytes_s=1e12,
                        encode=cost, link_bytes_s=1e9, connection_bytes_s=90e6,
                        put_s=0.05, get_s=0.03, version_s=0.001)
    """

    ranks: int
    cores: float
    copy_bytes_s: float
    quantise_bytes_s: float
    encode: CoreCost
    link_bytes_s: float
    connection_bytes_s: float
    put_s: float
    get_s: float
    version_s: float
    writes_per_s: float = math.inf


@dataclass(frozen=True)
class Readers:
    """Readers of one region, each of which holds ``share`` of the model, for which it fetches and
    decodes ``fetched_share`` of a version: a rank that serves columns of a row-major matrix needs
    all of its chunks.

    ``per_host`` of them share a host, whose threads are together ``cores`` times faster than one
    thread while all decode, and ``serial_cores`` times while each uses one thread. They also share
    ``link_bytes_s``, and all readers share ``region_bytes_s``. ``poll_s`` is the shortest pause
    between polls, ``interval_s`` the time between versions. ``stage_change_s`` and
    ``swap_change_s`` are seconds for each change; ``staged_on_cores`` says that the host's cores do
    this work. ``poll_cost_s`` is the time of the cores of this host that a poll takes, the store's
    included if it runs here. ``reads_per_s`` is the store's limit. With ``blob_cache``, the
    readers of a host fetch each blob once between them, if a cache of ``cache_bytes`` takes two
    deltas.

    Example::

        readers = Readers(count=200, share=1 / 16, per_host=8, cores=96, serial_cores=8,
                          decode=cost, link_bytes_s=12.5e9, region_bytes_s=1e12,
                          connection_bytes_s=90e6, get_s=0.03, poll_s=0.5, interval_s=300,
                          stage_change_s=1e-10, swap_change_s=1e-11, staged_on_cores=False,
                          version_s=0.001)
    """

    count: int
    share: float
    per_host: int
    cores: float
    serial_cores: float
    decode: CoreCost
    link_bytes_s: float
    region_bytes_s: float
    connection_bytes_s: float
    get_s: float
    poll_s: float
    interval_s: float
    stage_change_s: float
    swap_change_s: float
    staged_on_cores: bool
    version_s: float
    poll_cost_s: float = 0.0
    reads_per_s: float = math.inf
    blob_cache: bool = False
    cache_bytes: float = LIMIT_BYTES
    more_fetched: float = 0.0
    """The share of a version that is fetched beyond ``share``."""

    @property
    def fetched_share(self) -> float:
        """The share of a version that a reader fetches and decodes."""
        return min(1.0, self.share + self.more_fetched)

    def caches(self, amounts: Amounts) -> bool:
        """Returns whether readers share a cache that takes this version and the one before."""
        return self.blob_cache and 2 * amounts.delta_bytes <= self.cache_bytes

    def fetching(self, amounts: Amounts) -> Fetching:
        """Returns one reader's requests for a version."""
        together = min(self.per_host, self.count) if self.caches(amounts) else 1
        return Fetching.of(amounts, self.fetched_share, together=together)

    @property
    def pause_s(self) -> float:
        """The pause between polls when the next version appears: a twentieth of the interval,
        within the poller's limits."""
        longest = LONGEST_PAUSE * self.poll_s
        return min(max(PATIENCE_SHARE * self.interval_s, self.poll_s), longest)


@dataclass(frozen=True)
class Fetching:
    """A reader's requests for a version's blobs: ``at_once`` blobs together, each in ``ranges``
    parallel ranges, in ``rounds`` that follow one another; ``requests`` and ``bytes`` in all.

    A reader of a shard needs a part of every blob, since ranks divide tensors otherwise than
    engines do. It gets that part by one request. Readers that share a cache get whole blobs, each
    of them its part of these.

    Example::

        Fetching.of(amounts, share=1 / 16).requests
    """

    at_once: int
    ranges: int
    rounds: int
    requests: int
    bytes: float

    @classmethod
    def of(cls, amounts: Amounts, share: float, *, together: int = 1) -> Fetching:
        """Computes the requests for ``share`` of each blob, or those of one of ``together`` readers
        that share a cache."""
        whole = amounts.delta_bytes / amounts.blobs
        cached = together > 1
        each = whole if cached else whole * share
        parts = math.ceil(each / REQUEST_BYTES) if cached or share > WHOLE else 1
        blobs = math.ceil(amounts.blobs / together) if cached else amounts.blobs
        at_once = max(1, min(REQUESTS, blobs, int(AHEAD_BYTES / max(each, 1.0))))
        return cls(
            at_once=at_once,
            ranges=min(parts, AT_ONCE),
            rounds=math.ceil(blobs / at_once),
            requests=blobs * parts,
            bytes=amounts.delta_bytes * (1 / together if cached else share),
        )


def overlapped(first_s: float, second_s: float, parts: float) -> float:
    """Returns the seconds of two hops that overlap in ``parts`` equal parts."""
    return max(first_s + second_s / parts, first_s / parts + second_s)


def publish(amounts: Amounts, writer: Writer) -> HopTimeline:
    """Returns the hops from the trainer's weights to the commit; every rank has an equal part."""
    ranks = writer.ranks
    values, delta = amounts.values / ranks, amounts.delta_bytes / ranks
    blobs = amounts.blobs // ranks
    encode_s = writer.encode.seconds(values, amounts.changes / ranks) / writer.cores
    rate = min(writer.link_bytes_s, min(blobs, UPLOADS) * writer.connection_bytes_s)
    put_s = writer.put_s + max(delta / rate, ranks * blobs / writer.writes_per_s)
    commits, requests = writer.put_s, ranks * blobs + 1.0
    if not amounts.inline:
        commits += writer.put_s
        requests += 1
    if ranks > 1:  # Every rank stores its part; the leader reads them, many at once.
        commits += writer.put_s + math.ceil(ranks / REQUESTS) * writer.get_s
        requests += 2 * ranks
    quantise_s = 0.0
    if writer.quantise_bytes_s:
        quantise_s = values * amounts.width / writer.quantise_bytes_s
    hops = (
        Hop("copy", values * amounts.width / writer.copy_bytes_s, amounts.model_bytes),
        Hop("quantise", quantise_s, amounts.model_bytes if quantise_s else 0.0),
        Hop("encode", encode_s, amounts.delta_bytes),
        Hop("put", put_s, amounts.delta_bytes, ranks * blobs),
        Hop(
            "commit",
            writer.version_s + commits,
            amounts.manifest_bytes,
            requests - ranks * blobs,
        ),
    )
    return HopTimeline(hops, encode_s + put_s - overlapped(encode_s, put_s, blobs))


def follow(amounts: Amounts, readers: Readers) -> HopTimeline:
    """Returns the hops from the commit to the moment the last reader holds the version.

    Polls of n readers have different phases, so the last finds the version after n/(n+1) of a
    pause. The last reader is done once the shared link and cores have served
    all from the first poll on, or once it has served itself from its own poll on, whichever is
    later; the hop ``poll`` is the wait that this leaves. Readers that poll together use the link
    together and then the cores; the further apart they poll, the more one's decoding overlaps with
    another's transfer.
    """
    on_host = min(readers.per_host, readers.count)
    hops, saved = _work(amounts, readers, on_host=on_host, in_region=readers.count)
    single, single_saved = _work(amounts, readers, on_host=1, in_region=1)
    link_s = hops[0].seconds - single[0].seconds
    cores_s = sum(hop.seconds for hop in hops[1:]) - sum(hop.seconds for hop in single[1:])
    apart_s = readers.pause_s * (on_host - 1) / (on_host + 1)
    apart = min(1.0, apart_s / (hops[0].seconds + 1e-9))
    # Blobs overlap by themselves, so a host's readers gain only what that leaves: one blob's part.
    # More than that would make faster cores or links look slower.
    saved += APART * min(link_s, cores_s) * apart / amounts.blobs
    shared_s = sum(hop.seconds for hop in hops) - saved
    single_s = sum(hop.seconds for hop in single) - single_saved
    hosts = math.ceil(readers.count / readers.per_host)
    # The median, over the hosts, of the latest first poll of a host's readers.
    first_s = readers.pause_s * (1 - (hosts + 1) ** (-1 / on_host))
    last_s = readers.pause_s * readers.count / (readers.count + 1)
    poll_s = max(first_s + shared_s, last_s + single_s) - shared_s
    polls = readers.count * readers.interval_s / readers.pause_s
    return HopTimeline((Hop("poll", poll_s, 0.0, polls), *hops), saved)


def _work(
    amounts: Amounts, readers: Readers, *, on_host: int, in_region: int
) -> tuple[tuple[Hop, ...], float]:
    """Returns the hops after the poll, and the seconds saved, of readers that share."""
    blobs = amounts.blobs
    fetching = readers.fetching(amounts)
    fetched = fetching.bytes
    rate = min(
        fetching.at_once * fetching.ranges * readers.connection_bytes_s,
        readers.link_bytes_s / on_host,
        readers.region_bytes_s / in_region,
    )
    waves = 3 if amounts.inline else 4  # Manifest, the next one's name, table, blobs.
    latency_s = (waves - 1 + fetching.rounds) * readers.get_s
    requests = readers.count * (fetching.requests + waves - 1)
    transfer_s = max(fetched / rate, requests / readers.count * in_region / readers.reads_per_s)
    changes = amounts.changes * readers.share
    polling = min(readers.per_host, readers.count) * readers.poll_cost_s / readers.pause_s
    cores = max(readers.cores - polling, 0.25 * readers.cores)
    fetched_share = readers.fetched_share
    decode_core_s = readers.decode.seconds(
        amounts.values * fetched_share, amounts.changes * fetched_share
    )
    serial = max(1.0, on_host / readers.serial_cores)
    decode_s = serial * readers.version_s + on_host * decode_core_s / cores
    stage_s, swap_s = changes * readers.stage_change_s, changes * readers.swap_change_s
    if readers.staged_on_cores:
        stage_s *= serial
        swap_s *= serial
    listed = amounts.manifest_bytes * (1 if amounts.inline else fetched_share)
    moved = readers.count * changes * (4 + amounts.width)
    hops = (
        Hop("get", latency_s + transfer_s, readers.count * (fetched + listed), requests),
        Hop("decode", decode_s, readers.count * amounts.delta_bytes * fetched_share),
        Hop("stage", stage_s, moved),
        Hop("swap", swap_s, moved),
    )
    return hops, transfer_s + decode_s - overlapped(transfer_s, decode_s, blobs)
