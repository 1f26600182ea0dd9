"""One version's way as events: ranks encode and put, readers poll, get, decode and swap.

The arguments are those of the closed form (`deltawire.plan.fleet.transfer`); here queues form by
themselves, polls have phases, and hosts and readers differ.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator
from dataclasses import replace
from statistics import fmean
from typing import Any

import simpy

from deltawire.plan.fleet.description import TABLE_READS, Relaying
from deltawire.plan.fleet.simulation.shared_rate import SharedRate
from deltawire.plan.fleet.transfer import Amounts, Readers, Writer
from deltawire.store import REQUESTS
from deltawire.store.ranges import AT_ONCE, REQUEST_BYTES
from deltawire.sync.chain.version_poller import JITTER
from deltawire.sync.maintain.blob_copies import copies_at_once
from deltawire.sync.publish.encoding import UPLOADS

Process = Generator[simpy.Event, Any, None]
MOST_PARTS = 4
"""Parts in which a reader's blobs arrive, so that a version of many blobs costs few events."""


class PublishingSide:
    """The trainer's ranks and their links; `publish` is a process that ends with the commit.

    Example::

        side = PublishingSide(env, writer)
        env.process(side.publish(amounts))
    """

    def __init__(self, env: simpy.Environment, writer: Writer) -> None:
        self._env = env
        self._writer = writer
        each = min(writer.link_bytes_s, UPLOADS * writer.connection_bytes_s)
        self.link = SharedRate(env, writer.link_bytes_s * writer.ranks, each)
        self.writes = SharedRate(env, writer.writes_per_s)

    def copy_seconds(self, amounts: Amounts) -> float:
        """Returns how long the trainer waits for the copy and for quantising."""
        mine = amounts.model_bytes / self._writer.ranks
        quantise = self._writer.quantise_bytes_s
        return mine / self._writer.copy_bytes_s + (mine / quantise if quantise else 0.0)

    def publish(self, amounts: Amounts) -> Process:
        """Encodes and puts on every rank, then commits."""
        ranks = self._writer.ranks
        yield simpy.AllOf(self._env, [self._env.process(self._rank(amounts)) for _ in range(ranks)])
        wait = self._writer.put_s
        if not amounts.inline:
            wait += self._writer.put_s
        if ranks > 1:
            wait += self._writer.put_s + math.ceil(ranks / REQUESTS) * self._writer.get_s
        yield self.writes.use(1 if ranks == 1 else 1 + ranks)
        yield self._env.timeout(self._writer.version_s + wait)

    def _rank(self, amounts: Amounts) -> Process:
        ranks = self._writer.ranks
        blobs = amounts.blobs // ranks
        encode_s = self._writer.encode.seconds(amounts.values / ranks, amounts.changes / ranks)
        puts = []
        for _ in range(blobs):
            yield self._env.timeout(encode_s / self._writer.cores / blobs)
            puts.append(self._env.process(self._put(amounts.delta_bytes / amounts.blobs)))
        yield simpy.AllOf(self._env, puts)

    def _put(self, size: float) -> Process:
        yield self.writes.use(1)
        yield self._env.timeout(self._writer.put_s)
        yield self.link.use(size)


class ReadingSide:
    """The readers of one region: their hosts' cores, the region's link, the store's limit.

    ``rng`` draws the phases of polls.

    Example::

        side = ReadingSide(env, readers, random.Random(0))
        env.process(side.read(amounts, number=3))
    """

    def __init__(self, env: simpy.Environment, readers: Readers, rng: random.Random) -> None:
        self._env = env
        self._readers = readers
        self._rng = rng
        on_host = min(readers.per_host, readers.count)
        hosts = math.ceil(readers.count / readers.per_host)
        polling = on_host * readers.poll_cost_s / readers.pause_s
        cores = max(readers.cores - polling, 0.25 * readers.cores)
        self._cores = [SharedRate(env, cores, cores) for _ in range(hosts)]
        self._serial = [SharedRate(env, readers.serial_cores, 1.0) for _ in range(hosts)]
        self._links = [SharedRate(env, readers.link_bytes_s) for _ in range(hosts)]
        self.region = SharedRate(env, readers.region_bytes_s)
        self.reads = SharedRate(env, readers.reads_per_s)
        self.got = 0.0

    def poll_wait(self) -> float:
        """Draws the time from a commit to a reader's next poll."""
        pause = self._readers.pause_s * (1 + JITTER * (2 * self._rng.random() - 1))
        return pause * self._rng.random()

    def read(
        self,
        amounts: Amounts,
        number: int,
        *,
        slowness: float = 1.0,
        whole: bool = False,
    ) -> Process:
        """Polls, gets, decodes, stages and swaps a version as reader ``number``.

        ``slowness`` multiplies its work. ``whole`` gets a whole model instead of the delta.
        """
        readers = self._readers
        host = number // readers.per_host
        yield self._env.timeout(self.poll_wait())
        waves = 2 if amounts.inline else 3
        yield self.reads.use(waves)
        yield self._env.timeout(waves * readers.get_s)
        arrived: simpy.Store = simpy.Store(self._env)
        parts = min(amounts.blobs, MOST_PARTS)
        sent = replace(amounts, delta_bytes=amounts.model_bytes) if whole else amounts
        self._env.process(self._fetch(sent, parts, host, arrived))
        share = readers.fetched_share
        changes = amounts.changes * readers.share
        decode = readers.decode.seconds(amounts.values * share, amounts.changes * share) * slowness
        yield self._serial[host].use(readers.version_s)
        for _ in range(parts):
            yield arrived.get()
            yield self._cores[host].use(decode / parts)
        moving = changes * (readers.stage_change_s + readers.swap_change_s) * slowness
        if readers.staged_on_cores:
            yield self._serial[host].use(moving)
        else:
            yield self._env.timeout(moving)

    def _fetch(self, amounts: Amounts, parts: int, host: int, arrived: simpy.Store) -> Process:
        """Gets a version's blobs in ``parts`` parts through the host's link, the region's and the
        reader's own connections, of which the slowest counts."""
        readers = self._readers
        fetching = readers.fetching(amounts)
        size = fetching.bytes / parts
        latency_s = readers.get_s * fetching.rounds / parts
        connections_bytes_s = fetching.at_once * fetching.ranges * readers.connection_bytes_s
        for _ in range(parts):
            yield self.reads.use(fetching.requests / parts)
            yield self._env.timeout(latency_s)
            yield simpy.AllOf(
                self._env,
                [
                    self._links[host].use(size),
                    self.region.use(size),
                    self._env.timeout(size / connections_bytes_s),
                ],
            )
            self.got += size
            yield arrived.put(None)


class RelayingSide:
    """A relay: it copies blobs, several at once, and commits.

    Example::

        side = RelayingSide(env, described.relays["europe"], random.Random(0))
        env.process(side.relay(amounts))
    """

    def __init__(self, env: simpy.Environment, relay: Relaying, rng: random.Random) -> None:
        self._env = env
        self._relay = relay
        self._source = ReadingSide(env, relay.source, rng)
        self._link = SharedRate(env, relay.source.link_bytes_s)

    def relay(self, amounts: Amounts) -> Process:
        """Takes one version across."""
        relay = self._relay
        yield self._env.timeout(self._source.poll_wait())
        yield self._env.timeout(relay.source.get_s)
        if not amounts.inline:
            yield self._env.timeout(relay.source.get_s + relay.put_s + TABLE_READS * relay.get_s)
        size = amounts.delta_bytes / amounts.blobs
        places = simpy.Resource(self._env, min(copies_at_once(size), amounts.blobs))
        yield simpy.AllOf(
            self._env,
            [self._env.process(self._copy(size, places)) for _ in range(amounts.blobs)],
        )
        yield self._env.timeout(relay.put_s)

    def _copy(self, size: float, places: simpy.Resource) -> Process:
        relay = self._relay
        ranges = min(AT_ONCE, math.ceil(size / REQUEST_BYTES))
        with places.request() as turn:
            yield turn
            yield self._env.timeout(relay.source.get_s)
            connection_s = size / (ranges * relay.source.connection_bytes_s)
            yield simpy.AllOf(self._env, [self._link.use(size), self._env.timeout(connection_s)])
            yield self._env.timeout(relay.put_s + size / relay.put_bytes_s)


def simulate_transfer(
    amounts: Amounts, writer: Writer, readers: Readers, *, seeds: int = 40
) -> float:
    """Returns the mean seconds from the trainer's copy to the last reader, over ``seeds`` runs."""
    found = []
    for seed in range(seeds):
        env = simpy.Environment()
        publishing = PublishingSide(env, writer)
        reading = ReadingSide(env, readers, random.Random(seed))

        def version(
            env: simpy.Environment = env,
            publishing: PublishingSide = publishing,
            reading: ReadingSide = reading,
        ) -> Process:
            yield env.timeout(publishing.copy_seconds(amounts))
            yield env.process(publishing.publish(amounts))
            yield simpy.AllOf(
                env, [env.process(reading.read(amounts, n)) for n in range(readers.count)]
            )

        env.run(env.process(version()))
        found.append(float(env.now))
    return fmean(found)
