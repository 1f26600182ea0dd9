"""The processes of a simulated run, and what must hold of them at every moment.

Trainers publish, readers follow, and a process prunes: their code is the project's own. Only the
few lines that a program has around it are here: what it does with each error. Half of the runs have
workers, whose groups the trainers consume (`simulated_workers`); their trainers have a lease.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from simulated_faults import Fault, Limits
from simulated_region import Region
from simulated_store import Connection, ReadOnly, SimulatedBucket, Store
from simulated_time import SimulatedProcess, scheduler, sleep
from simulated_workers import BrokenError, Groups, TrainerIntake, metadata_of, work

from deltawire import codec
from deltawire.errors import (
    CorruptError,
    DeltawireError,
    FencedError,
    InputError,
    ResyncError,
    RetryError,
)
from deltawire.runtime.fleet import next_epoch
from deltawire.runtime.process import Process
from deltawire.store import Bucket, RetryingBucket
from deltawire.sync import Mirror, Publisher, Subscriber, create_run, load_mirror
from deltawire.sync.chain.objects import read_manifest, read_run
from deltawire.sync.chain.payloads import all_blobs
from deltawire.sync.chain.retention import prune
from deltawire.sync.chain.version_poller import newest_readable
from deltawire.sync.follow.mirror import empty_mirror
from deltawire.sync.maintain.fsck import check_run
from deltawire.sync.publish.commit import CommitStats
from deltawire.sync.publish.commit_thread import CommittedLateError
from deltawire.wire import keys
from deltawire.wire.manifest import Manifest, decode_manifest
from deltawire.wire.run import Run, TensorSpec

SPECS = [TensorSpec("a", (48,), "BF16"), TensorSpec("b", (4, 8), "BF16")]
MODELS = 5
"""Half of the versions have one of these, so that a new one needs a blob that is about to go."""


@dataclass(frozen=True)
class Settings:
    """The settings of a run, drawn from the seed."""

    local: bool
    every_s: float
    retain: int
    grace_s: float
    anchor_every: int
    strides: tuple[int, ...]
    max_outage: float | None
    readers: int
    latency_s: float
    workers: int
    sample_s: float
    region: bool

    @classmethod
    def drawn(cls, seed: str) -> Settings:
        """Draws the settings of a seed."""
        source = random.Random(f"{seed} settings")
        return cls(
            local=source.random() < 0.3,
            every_s=source.choice([10.0, 30.0, 60.0]),
            retain=source.choice([3, 6, 12]),
            grace_s=source.choice([0.0, 120.0, 600.0]),
            anchor_every=source.choice([2, 4, 8]),
            strides=source.choice([(), (2,), (2, 4)]),
            max_outage=source.choice([0.0, 300.0, None]),
            readers=source.choice([1, 2, 3]),
            latency_s=source.choice([0.002, 0.05, 0.5]),
            workers=source.choice([0, 0, 1, 2]),
            sample_s=source.choice([5.0, 30.0]),
            region=source.random() < 0.3,
        )

    @property
    def roles(self) -> list[str]:
        """The roles of the run's processes."""
        others = ["worker"] * bool(self.workers) + ["relay"] * self.region
        return ["trainer", "reader", "retention", *others]

    @property
    def url(self) -> str:
        """The store's address, whose kind says how late a request may arrive."""
        return "memory://simulated" if self.local else "s3://simulated/run"

    @property
    def limits(self) -> Limits:
        """The longest times that faults may take."""
        return Limits(200.0, 80.0) if self.local else Limits(1200.0, 500.0)


def weights_of(number: int) -> dict[str, Any]:
    """The model of this number."""
    first = np.arange(48, dtype=np.uint16) + 1000
    second = np.arange(32, dtype=np.uint16).reshape(4, 8) + 2000
    first[: number % 48] += 1 + number // 48
    second[number % 4] += number + 1
    return {"a": first, "b": second}


def digest_of(number: int) -> str:
    """The digest of one of the models."""
    return codec.digest_model({n: bits.reshape(-1) for n, bits in weights_of(number).items()}).hex()


class SimulatedRun:
    """One history: the store, the processes, and the invariants."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self.settings = Settings.drawn(seed)
        self.store = Store()
        self.store.watch = self._changed
        self.connections: dict[str, Connection] = {}
        self.roles: dict[str, str] = {}
        self.regional: set[str] = set()
        """The readers of the region."""
        self.named: dict[str, str] = {}
        """By process of a worker, the worker's name in the run."""
        self.counts: Counter[str] = Counter()
        self.groups = Groups(self.store, self.counts)
        self.healed = self.quiet = False
        """The faults have ended; what they left has been waited for too."""
        self._numbers: Counter[str] = Counter()
        self._made: dict[int, Manifest] = {}
        self._closed_from: dict[int, float] = {}
        self._acknowledged: dict[int, str] = {}
        self._blobs: dict[int, set[str]] = {}
        self._fenced: set[str] = set()
        self._held: dict[str, int] = {}
        self._trainers = 0
        self.plain: Bucket = ReadOnly(self.store, self.settings.url, local=self.settings.local)
        self.run: Run = self._create()
        url, local = self.settings.url, self.settings.local
        self.region = Region(
            self.store, self.run, url, self.counts, local=local, grace_s=self.settings.grace_s
        )

    def _create(self) -> Run:
        first = digest_of(0)
        described = Run(
            id="ab" * 16, name="r", created_at=1.0, tensors=SPECS, digest=first, chunk=32
        )
        return create_run(_Setup(self.store, self.settings), described)

    def process(self, role: str, *, region: bool = False) -> tuple[SimulatedProcess, Bucket]:
        """Makes a process with its bucket, that of the ``region`` or the run's."""
        self._numbers[role] += 1
        name = f"{role}-{self._numbers[role]}"
        process = SimulatedProcess(name, self.seed)
        connection = Connection(process, self.settings.latency_s)
        if role == "worker":
            connection.poll_s = 5.0
        self.connections[name], self.roles[name] = connection, role
        return process, self._bucket(connection, region=region)

    def _bucket(self, connection: Connection, *, region: bool) -> Bucket:
        url, local = self.settings.url, self.settings.local
        store = self.store
        if region:
            store, url = self.region.store, self.region.url
        return RetryingBucket(SimulatedBucket(store, connection, url, local=local))

    def begin(self) -> None:
        """Starts the processes."""
        self.start_trainer()
        for _ in range(self.settings.readers):
            self.start_reader()
        self.start_retention()
        for number in range(self.settings.workers):
            self.start_worker(f"w{number}")
        if self.settings.region:
            self.start_relay()
            self.start_reader(region=True)

    def start_trainer(self) -> None:
        process, bucket = self.process("trainer")
        self._trainers += 1
        scheduler().start(process, lambda: self._train(process, bucket))

    def start_reader(self, *, region: bool = False) -> None:
        process, bucket = self.process("reader", region=region)
        if region:
            self.regional.add(process.name)
        scheduler().start(process, lambda: self._follow(process, bucket))

    def start_relay(self) -> None:
        process, source = self.process("relay")
        region = self._bucket(self.connections[process.name], region=True)
        scheduler().start(process, lambda: self._relay(process, source, region))

    def start_retention(self) -> None:
        process, bucket = self.process("retention")
        scheduler().start(process, lambda: self._retain(process, bucket))

    def start_worker(self, name: str) -> None:
        process, bucket = self.process("worker")
        self.named[process.name] = name
        scheduler().start(process, lambda: self._work(process, bucket, name))

    # Faults of processes.

    def strike(self, fault: Fault) -> None:
        """Lets a fault happen, or wait for a request of a process."""
        names = [n for n, role in self.roles.items() if role == fault.role]
        alive = [n for n in names if not self.connections[n].process.dead]
        if fault.kind == "rival" and fault.role != "worker":
            self.start_trainer()
            return
        if not alive:
            return
        connection = self.connections[alive[fault.place(len(alive))]]
        if fault.kind == "rival":
            self.start_worker(self.named[connection.process.name])
            return
        until = scheduler().now + fault.seconds
        match fault.kind:
            case "away":
                connection.away_until = until
            case "slow":
                connection.slow_until = until
            case "full":
                connection.full_until = until
            case "refused":
                connection.refuses_until = until
            case "wall clock":
                connection.process.wall_offset_s += fault.seconds * (1 if fault.draw < 0.5 else -1)
            case _:
                fault.strikes = self._kill
                connection.faults.append(fault)
                return
        self.store.note(f"{connection.process.name}: {fault}")

    def _kill(self, fault: Fault, process: SimulatedProcess) -> None:
        self.store.note(f"{process.name} is killed")
        self.counts["killed"] += 1
        self.store.lose(process.name)
        self._end(process)
        scheduler().after(fault.seconds, lambda: self._again_as(process.name))

    def _end(self, process: SimulatedProcess) -> None:
        if not process.dead:
            scheduler().kill(process)
            self._trainers -= self.roles[process.name] == "trainer"

    def _again_as(self, name: str) -> None:
        """Starts a process in the place of one that ended."""
        match self.roles[name]:
            case "worker":
                self._again_worker(self.named[name])
            case "reader":
                self.start_reader(region=name in self.regional)
            case role:
                self._again(role)

    def _again(self, role: str) -> None:
        """Starts a process of a role; another trainer only if none is alive."""
        match role:
            case "trainer" if not self._trainers:
                self.start_trainer()
            case "relay":
                self.start_relay()
            case "retention":
                self.start_retention()

    def _again_worker(self, worker: str) -> None:
        if worker not in {self.named[one] for one in self.alive("worker")}:
            self.start_worker(worker)

    # The programs.

    def _train(self, process: SimulatedProcess, bucket: Bucket) -> None:
        while True:
            try:
                with self._lease(bucket) as program:
                    self._publish(process, bucket, program)
            except FencedError as error:
                self.store.note(f"{process.name} is fenced: {error}")
                self._check_fenced(process.name, error)
                self.counts["fenced"] += 1
                self._fenced.add(process.name)
                scheduler().after(5.0, lambda: self._end(process))
                scheduler().after(10.0, lambda: self._again("trainer"))
                return
            except InputError as error:
                self._check_refusal(process.name, error)
                sleep(5.0)
            except (RetryError, ResyncError, CorruptError) as error:
                self._tell(process, error)
                sleep(5.0)

    @contextmanager
    def _lease(self, bucket: Bucket) -> Iterator[Process | None]:
        """Holds the trainer's name, in runs with workers."""
        if not self.settings.workers:
            yield None
            return
        program = Process(bucket, "trainer", "trainer", supervised=True, pid=1)
        with program.registered():
            yield program

    def _publish(self, process: SimulatedProcess, bucket: Bucket, program: Process | None) -> None:
        """Publishes models until an error ends it, as a trainer that starts does."""
        settings, name = self.settings, process.name
        run = read_run(bucket)
        newest = newest_readable(bucket, run)
        mirror, epoch = Mirror(empty_mirror(run).tensors, -1, codec.ZERO), 0
        if newest is not None:
            mirror = load_mirror(bucket, run, threads=1)
            head = read_manifest(bucket, run, mirror.version)
            epoch = 0 if head is None else head.epoch + 1
        intake: TrainerIntake | None = None
        if program is not None:
            epoch = max(epoch, next_epoch(bucket, run, max(mirror.version, 0)))
            intake = TrainerIntake(
                program, run, self.groups, version=max(mirror.version, 0), epoch=epoch
            )

        def committed(stats: CommitStats) -> None:
            self._committed(name, stats)
            if intake is not None:
                intake.credits.committed(stats.version, stats.digest)

        publisher = Publisher(
            bucket, run, mirror, epoch=epoch, anchor_every=settings.anchor_every,
            compaction_strides=settings.strides, threads=1, retain=settings.retain,
            grace_s=settings.grace_s, max_outage=settings.max_outage, on_commit=committed,
        )  # fmt: skip
        with publisher:
            self.counts["starts"] += 1
            while True:
                sleep(settings.every_s * (0.5 + process.random.random()))
                number = process.random.randrange(
                    *process.random.choice([(MODELS,), (MODELS, 4000)])
                )
                if publisher.version < 0:
                    number = 0  # The run states the digest of its first version.
                stated: dict[str, Any] = {"by": name, "digest": digest_of(number)}
                wait = process.random.random() < 0.5
                if intake is not None:
                    intake.step(publisher, weights_of(number), stated, wait=wait)
                    continue
                try:
                    publisher.publish(weights_of(number), metadata=stated, wait=wait)
                except CommittedLateError:
                    self.counts["committed late"] += 1
                except RetryError as error:
                    self._tell(process, error)
                except InputError as error:
                    self._check_refusal(name, error)

    def _work(self, process: SimulatedProcess, bucket: Bucket, name: str) -> None:
        """Runs a worker, which its supervisor starts again after an error."""
        while True:
            try:
                work(name, bucket, process.random, self.groups, self.settings.sample_s)
            except FencedError as error:
                self.store.note(f"{process.name} is fenced: {error}")
                self._check_lease(process.name, error)
                self.counts["fenced workers"] += 1
                scheduler().after(5.0, lambda: self._end(process))
                scheduler().after(10.0, lambda: self._again_worker(name))
                return
            except InputError as error:
                self._check_refusal(process.name, error)
                sleep(5.0)
            except (RetryError, CorruptError) as error:
                self._tell(process, error)
                sleep(5.0)

    def _follow(self, process: SimulatedProcess, bucket: Bucket) -> None:
        """Follows the run, as a worker does; an error that is not the store's begins again."""
        sleepy = process.random.random() < 0.3
        while True:
            mirror = None
            try:
                run = read_run(bucket)
                mirror = Mirror(empty_mirror(run).tensors, -1, codec.ZERO)
                reader = Subscriber(bucket, run, mirror, threads=1)
                while True:
                    reader.advance()
                    self._holds(process, reader.mirror)
                    sleep(reader.pause_s)
                    if sleepy and not self.healed and process.random.random() < 0.1:
                        sleep(process.random.random() * 2 * self.settings.grace_s)
            except RetryError as error:
                self._tell(process, error)
                sleep(5.0)
            except (ResyncError, InputError) as error:
                self._tell(process, error)
                sleep(5.0)

    def _relay(self, process: SimulatedProcess, source: Bucket, region: Bucket) -> None:
        """Copies versions to the region; an error begins again, as its supervisor does."""
        while True:
            try:
                self.region.relay(source, region, strides=self.settings.strides, name=process.name)
            except InputError as error:
                self._check_refusal(process.name, error)
                sleep(5.0)
            except (RetryError, ResyncError, CorruptError) as error:
                self._tell(process, error)
                sleep(5.0)

    def _retain(self, process: SimulatedProcess, bucket: Bucket) -> None:
        while True:
            sleep(process.random.uniform(30.0, 400.0))
            try:
                run = read_run(bucket)
                newest = newest_readable(bucket, run)
                if newest is not None:
                    cutoff = newest.version - self.settings.retain + 1
                    done = prune(bucket, run, cutoff=cutoff, grace_s=self.settings.grace_s)
                    self.counts["pruned blobs"] += len(done.blobs)
            except (RetryError, ResyncError, InputError) as error:
                self._tell(process, error)

    def _tell(self, process: SimulatedProcess, error: DeltawireError) -> None:
        """Takes note of an error, which must not come when all is well.

        A reader may ask for a blob between the commit and its writer's check, which stores again
        what retention deleted meanwhile: then the blob is there now.
        """
        self.store.note(f"{process.name}: {type(error).__name__} {error}")
        self.counts[type(error).__name__] += 1
        stores = self.store, self.region.store
        key = error.key or ""
        again = key.startswith(keys.BLOBS) and any(key in store.objects for store in stores)
        if self.quiet and not (again and error.message == "a blob is missing"):
            raise BrokenError(f"{process.name} gets an error long after the last fault: {error}")

    # The invariants.

    def _check_refusal(self, name: str, error: InputError) -> None:
        """Only a store that is full makes a trainer's user change something."""
        self.counts["refused"] += 1
        if scheduler().now > self.connections[name].full_until + 300.0:
            raise BrokenError(f"{name} ended: {error}")

    def _check_lease(self, name: str, error: FencedError) -> None:
        """Only a lease of another process of its name, or what it stored, ends a process."""
        held = self.store.objects.get(error.key or "")
        if held is None or held.by == name:
            raise BrokenError(f"{name} was fenced, although no process replaced it: {error}")

    def _check_fenced(self, name: str, error: FencedError) -> None:
        """Only another one's version or lease, or a floor above its own, ends a trainer."""
        if (error.key or "").startswith(keys.LEASES):
            self._check_lease(name, error)
            return
        found = self._made.get(-1 if error.version is None else error.version)
        floor = max(
            (keys.trailing_number(k) or 0 for k in self.store.listed(keys.RETENTION_FLOORS, None)),
            default=0,
        )
        if found is not None and found.metadata.get("by") == name and floor <= found.version:
            raise BrokenError(f"{name} was fenced by its own version {found.version}")

    def _changed(self, key: str, before: bytes | None, after: bytes | None, by: str) -> None:
        version = keys.trailing_number(key) if key.startswith(keys.MANIFESTS) else None
        if version is not None and before != after:
            self._manifest_changed(version, before, after, by)
        if key.startswith(keys.BLOBS) and after is None:
            self._blob_gone(key, by)
        if key.startswith(keys.ROLLOUTS):
            self.groups.changed(key, before, after, by)

    def _decode(self, data: bytes, version: int) -> Manifest:
        key = keys.manifest(version)
        return decode_manifest(data, version=version, table=self.run, run="", key=key)

    def _manifest_changed(
        self, version: int, before: bytes | None, after: bytes | None, by: str
    ) -> None:
        if after is None:
            raise BrokenError(f"{by} deleted the manifest of version {version}")
        new = self._decode(after, version)
        if before is None:
            if version in self._made:
                raise BrokenError(f"version {version} was lost and made once more")
            self.counts["versions"] += 1
            self._made[version] = new
            if new.pruned:
                return
            if by in self._fenced:
                raise BrokenError(f"{by} committed version {version} although it was fenced")
            if new.base is not None:
                base = self._made.get(new.base)
                if base is None or base.digest != new.base_digest:
                    raise BrokenError(f"version {version} builds on what no manifest names")
            if new.metadata.get("digest") != new.digest:
                raise BrokenError(f"version {version} is not what its trainer published")
            self.groups.committed(version, metadata_of(new))
            return
        old = self._decode(before, version)
        if not new.pruned or (new.digest, new.nonce) != (old.digest, old.nonce):
            raise BrokenError(f"{by} replaced the manifest of version {version}")
        self._check_grace(version, by)

    def _check_grace(self, version: int, by: str) -> None:
        """A version is closed only once its floor is older than the grace period."""
        now = scheduler().now
        floors = [
            held.stored_at
            for key, held in self.store.objects.items()
            if key.startswith(keys.RETENTION_FLOORS) and (keys.trailing_number(key) or 0) > version
        ]
        if not any(now - at >= self.settings.grace_s for at in floors):
            raise BrokenError(f"{by} closed version {version} within the grace of its readers")

    def _blob_gone(self, key: str, by: str) -> None:
        for version in self._acknowledged:
            if key in self._blobs[version] and not self._is_closed(version):
                raise BrokenError(f"{by} deleted a blob of version {version}: {key[-64:][:12]}")

    def _is_closed(self, version: int) -> bool:
        held = self.store.objects.get(keys.manifest(version))
        return held is None or self._decode(held.data, version).pruned

    def _committed(self, name: str, stats: CommitStats) -> None:
        """A trainer says that its version is committed: it is there with all its blobs."""
        held = self.store.objects.get(keys.manifest(stats.version))
        found = None if held is None else self._decode(held.data, stats.version)
        self.counts["committed"] += 1
        if found is None or found.metadata.get("by") != name or found.digest != stats.digest:
            raise BrokenError(f"{name} committed version {stats.version}, which is not its own")
        if found.pruned:
            return
        refs = all_blobs(self.plain, self.run, found)
        self._blobs[stats.version] = {keys.blob(ref.hash) for ref in refs}
        self._acknowledged[stats.version] = name
        for key in sorted(self._blobs[stats.version]):
            if key not in self.store.objects:
                raise BrokenError(f"version {stats.version} was committed without a blob")

    def _holds(self, process: SimulatedProcess, mirror: Mirror) -> None:
        version = mirror.version
        if version < 0:
            return
        if self._held.get(process.name) != version:
            self.counts["reads"] += 1
        self._held[process.name] = version
        made = self._made.get(version)
        if made is None or made.digest != codec.digest_model(mirror.tensors).hex():
            raise BrokenError(f"{process.name} holds bits that version {version} does not have")

    @property
    def newest(self) -> int:
        """The newest version that its trainer takes for committed, -1 without one."""
        return max(self._acknowledged, default=-1)

    def alive(self, role: str) -> list[str]:
        """The processes of a role that run."""
        return [
            n for n, r in self.roles.items() if r == role and not self.connections[n].process.dead
        ]

    def late_groups(self, before: float) -> list[tuple[str, int]]:
        """The groups that were stored before this moment, and that no version settles."""
        return self.groups.unsettled(before)

    def late_readers(self, version: int) -> list[str]:
        """The readers that hold an older version than this."""
        return [n for n in self.alive("reader") if self._held.get(n, -1) < version]

    def heal(self) -> None:
        """Ends all faults. Late requests still arrive, and intents of dead processes count."""
        self.healed = True
        for connection in self.connections.values():
            connection.faults.clear()
            connection.away_until = connection.slow_until = connection.refuses_until = 0.0
            connection.full_until = min(connection.full_until, scheduler().now)
            connection.process.stopped_until = min(
                connection.process.stopped_until, scheduler().now
            )
        for role in self.settings.roles:
            if not self.alive(role):
                self._again(role)
        for region in [False, True] if self.settings.region else [False]:
            if not [one for one in self.alive("reader") if (one in self.regional) == region]:
                self.start_reader(region=region)
        for number in range(self.settings.workers):
            self._again_worker(f"w{number}")

    def check_all(self) -> None:
        """Ends the processes, and reads every object and rebuilds every version, as `deltawire
        fsck` does."""
        for connection in self.connections.values():
            self._end(connection.process)
        scheduler().start(SimulatedProcess("fsck", self.seed), self._check)

    def _check(self) -> None:
        for store in [self.store, self.region.store][: 1 + self.settings.region]:
            found = check_run(_Setup(store, self.settings))
            self.counts["checked"] += 1
            errors = [fault for fault in found.faults if fault.level == "error"]
            if errors:
                raise BrokenError(f"fsck finds: {errors[0]}")


class _Setup(ReadOnly):
    """Reads and writes without a network, before the processes start and after they have ended."""

    def __init__(self, store: Store, settings: Settings) -> None:
        super().__init__(store, settings.url, local=settings.local)

    def _request(self, verb: str, key: str, act: Callable[[], Any], damage: Any) -> Any:
        return act()
