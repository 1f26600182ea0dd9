"""Reports of processes that follow a run's weights and do not belong to the run.

A pull, a relay and a rank of an engine have no lease and no heartbeat. Each of them reports once a
minute which version it holds, how late it is and why, and what it asked of its stores. All readers
of a host share one object, so that a thousand hosts cost a thousand small writes a minute. Its
name is the host's and a hash of the machine's id: hosts of two clusters may have one name.

Concurrency::

    follower's thread        reporter's thread                 a folder of this host
      holds, waits ────────▶ every `EVERY_S`: looks for newer
                             versions, writes its own file ──▶ <pid>.json
                             if nobody stored the object
                             for `EVERY_S`: ◀──────────────── all files, under a lock
                                │
                                ▼
                             readers/<host>.json

A reader whose credentials only read does not report: the store refuses the first write, and no
other is tried. No report ends its process; the last one delays its end by at most `LAST_S`.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from blake3 import blake3

from deltawire.builds import build_name
from deltawire.errors import CorruptError, DeltawireError, InputError, RetryError
from deltawire.private_files import private_folder, read_private, replace_private
from deltawire.runtime.heartbeat import store_traffic
from deltawire.store import Bucket, ObjectMeta, in_parallel, without_retries
from deltawire.store.request_limit import refusals_of
from deltawire.sync import newest_version
from deltawire.wire import keys
from deltawire.wire.objects import decode_json, encode_json
from deltawire.wire.status import MAX_ALARM, MAX_READERS, HostReaders, ReaderReport

EVERY_S = 60.0
FIRST_S = 1.0
"""A reader that holds its first version reports soon."""
GONE_S = 180.0
"""A report that was not renewed for so long is of a process that is gone, or stands still."""
SILENT_S = 3600.0
"""A host states a reader that does not end, and does not report, for so long."""
MACHINE_IDS = (Path("/etc/machine-id"), Path("/proc/sys/kernel/random/boot_id"))
"""The first that is there tells machines apart: the system's id, which lasts, or that of the boot,
since many containers have no other."""
KEPT_S = 86_400.0
"""Views leave out reports that are older than this."""
LAST_S = 10.0
MAX_HOST_BYTES = 1 << 20
MAX_HOSTS = 1024
"""Views read the newest reports of so many hosts."""

Kind = Literal["pull", "relay", "vllm", "sglang", "attest"]
"""The kinds of readers. Views show any other word, too: a later release may know more."""

_LOG = logging.getLogger("deltawire.sync")


class ReaderReporter:
    """Reports one reader of ``bucket`` from a thread.

    ``places`` are the buckets that may hold the report, of which the first that can be written to
    gets it; by default ``bucket``, and with an empty list nothing is reported. ``state`` returns
    the version held and what keeps the reader from a newer one, in place of `holds` and `waits`.
    ``folder`` is where the readers of a host meet.

    Example::

        with ReaderReporter(bucket, "pull").running() as reporter:
            reporter.holds(version)
    """

    def __init__(
        self,
        bucket: Bucket,
        kind: Kind,
        *,
        places: list[Bucket] | None = None,
        name: str = "",
        state: Callable[[], tuple[int, str]] | None = None,
        folder: Path | None = None,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._bucket = bucket
        places = [bucket] if places is None else places
        self._places = [without_retries(one) for one in places]
        self._kind: Kind = kind
        self._name = name or f"{kind}-{os.getpid()}"
        self._host = _host()
        self._folder = folder
        self._every_s = every_s
        self._clock = clock
        self._started_at = clock()
        self._noted = -1, ""
        self._alarm = ""
        self._late = -2, 0.0
        """The version held at the last report, -2 before the first, and since when the next one had
        been there."""
        self._state = state or (lambda: self._noted)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reader-report", daemon=True)

    def holds(self, version: int) -> None:
        """Notes that the reader holds a version, and is no longer kept from it."""
        self._noted = version, ""

    def waits(self, reason: str) -> None:
        """Notes why the reader does not hold the newest version; empty if nothing keeps it."""
        self._noted = self._noted[0], reason

    def alarms(self, text: str) -> None:
        """Notes what is wrong with the engine that this reader attests; empty if nothing is."""
        self._alarm = text

    @contextmanager
    def running(self) -> Iterator[ReaderReporter]:
        """Reports while the body runs, and once more when it has ended."""
        self._thread.start()
        try:
            yield self
        finally:
            self.stop(within_s=LAST_S)

    def start(self) -> None:
        """Reports until the process ends, and once more then."""
        atexit.register(self.stop, within_s=LAST_S)
        self._thread.start()

    def stop(self, *, within_s: float = 0.0) -> None:
        """Ends the reports, after one that says that the reader ended; waits for that."""
        self._closed.set()
        self._thread.join(timeout=within_s)

    def _run(self) -> None:
        try:
            pause_s = FIRST_S
            while not self._closed.wait(pause_s):
                if (
                    self._alarm
                    or self._state()[0] >= 0
                    or self._clock() - self._started_at > self._every_s
                ):
                    self.report()
                    pause_s = self._every_s
            self.report(ended=True)
        except Exception as error:  # A report is no reason to end a reader.
            _LOG.warning("this reader is no longer reported: %s: %s", type(error).__name__, error)

    def report(self, *, ended: bool = False) -> bool:
        """Writes this reader's file, and stores the host's object if that is due; returns whether
        it did. Nothing happens once no place can be written to."""
        if not self._places:
            return False
        own = self._compare(ended=ended)
        try:
            with self._shared() as folder:
                replace_private(folder / f"{os.getpid()}-{self._name}.json", encode_json(own))
                last = folder / "stored"
                with suppress(FileNotFoundError):
                    if not ended and 0 <= self._clock() - last.stat().st_mtime < self._every_s:
                        return False
                if not self._store(self._readers(folder)):
                    return False
                last.touch()
                os.utime(last, (self._clock(), self._clock()))
                return True
        except (InputError, OSError):  # The folder is not ours, or full: this reader reports alone.
            return self._store([own])

    def _compare(self, *, ended: bool) -> ReaderReport:
        """Compares what is held with what the bucket has."""
        held, reason = self._state()
        lag, late_s = 0, 0.0
        reason = refusals_of(self._bucket.url) or reason
        try:
            following = self._bucket.head(keys.manifest(held + 1))
            if following is not None:
                since = following.modified.timestamp()
                if self._late[0] == held:  # Retention replaces manifests, which makes them young.
                    since = min(since, self._late[1])
                self._late = held, since
                late_s = max(0.0, self._clock() - since)
                newest = newest_version(self._bucket, newer_than=held)
                lag = max(0, (held if newest is None else newest) - max(held, 0))
        except RetryError as error:
            reason = reason or str(error)
        except (CorruptError, InputError):  # The follower says so itself.
            pass
        now = self._clock()
        return ReaderReport(
            process=self._name[:64],
            kind=self._kind,
            pid=os.getpid(),
            started_at=self._started_at,
            at=now,
            version=held,
            lag=lag,
            late_s=late_s,
            reason=reason[:MAX_ALARM],
            alarm=self._alarm[:MAX_ALARM],
            ended=ended,
            build=build_name(),
            traffic=store_traffic(),
        )

    @contextmanager
    def _shared(self) -> Iterator[Path]:
        """Locks the folder in which the readers of this host that report to the same place meet.
        Raises `InputError` if another one has it for longer than a second."""
        place = blake3(self._places[0].url.encode()).hexdigest(8)
        root = self._folder or Path(tempfile.gettempdir()) / f"deltawire-readers-{os.getuid()}"
        folder = private_folder(private_folder(root) / place)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for _ in range(100):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    time.sleep(0.01)
                else:
                    break
            else:
                raise InputError(f"{folder / 'lock'} is held by another process")
            yield folder
        finally:
            os.close(descriptor)

    def _readers(self, folder: Path) -> list[ReaderReport]:
        """Reads the files of all readers, and removes those of processes that have ended, or have
        been silent for so long that nobody looks for them any more."""
        found = []
        for path in sorted(folder.glob("*.json")):
            with suppress(CorruptError, InputError, OSError):
                # Its process writes the file again within a minute.
                data = read_private(path, MAX_HOST_BYTES) or b""
                one = decode_json(data, ReaderReport, run=self._bucket.url, key=path.name)
                if abs(self._clock() - one.at) < (GONE_S if one.ended else SILENT_S):
                    found.append(one)
                    continue
            path.unlink(missing_ok=True)
        return sorted(found, key=lambda one: -one.at)[:MAX_READERS]

    def _store(self, readers: list[ReaderReport]) -> bool:
        """Stores the host's object in the first place that takes it."""
        made = HostReaders(host=self._host, at=self._clock(), readers=readers)
        while self._places:
            try:
                self._places[0].put(keys.readers(self._host), encode_json(made))
            except RetryError:  # In a minute, perhaps.
                return False
            except DeltawireError:
                self._places.pop(0)
                continue
            return True
        return False


def _host() -> str:
    """The name of this host, as a key can carry it, and a hash of its machine's id if it has one.

    The id stays the same over restarts of processes, so a host has one object. The hash hides it
    (machine-id(5)).
    """
    name = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:54].lstrip("-_")
    if not keys.valid_name(name):
        name = f"host-{blake3(name.encode()).hexdigest(4)}"
    for path in MACHINE_IDS:
        with suppress(OSError, ValueError):
            words = path.read_text(encoding="ascii").strip().replace("-", "")
            if re.fullmatch("[0-9a-f]{32}", words):
                mixed = blake3(f"deltawire-reader {words}".encode())
                return f"{name}-{mixed.hexdigest(4)}"
    return name


Known = tuple[ObjectMeta, HostReaders]


class ReaderReports:
    """Reads the reports of all hosts, each again only when a listing shows that it changed.

    Example::

        for report in ReaderReports(bucket).poll():
            print(report.host, report.readers)
    """

    def __init__(self, bucket: Bucket, *, clock: Callable[[], float] = time.time) -> None:
        self._bucket = bucket
        self._clock = clock
        self._known: dict[str, Known] = {}
        self.errors: list[CorruptError] = []
        """One for each report that cannot be read."""

    def poll(self) -> list[HostReaders]:
        """Returns the reports that are younger than `KEPT_S`, by host; raises `RetryError`."""
        now, errors, kept = self._clock(), list[CorruptError](), dict[str, Known]()
        listed = sorted(self._bucket.list_objects(keys.READERS), key=lambda one: one.modified)
        changed = list[tuple[ObjectMeta, str]]()
        for entry in listed[-MAX_HOSTS:]:
            host = keys.host_of(entry.key)
            if host is None or now - entry.modified.timestamp() > KEPT_S:
                continue
            known = self._known.get(entry.key)
            if known is not None and known[0] == entry:
                kept[entry.key] = known
            else:
                changed.append((entry, host))

        def read(one: tuple[ObjectMeta, str]) -> HostReaders | CorruptError | None:
            try:
                return self._read(one[0].key, one[1])
            except CorruptError as error:
                return error  # Shown; no decision depends on a report.

        for (entry, _), found in zip(
            changed, in_parallel(self._bucket, read, changed), strict=True
        ):
            if isinstance(found, CorruptError):
                errors.append(found)
            elif found is not None:
                kept[entry.key] = entry, found
        self._known, self.errors = kept, errors
        return [found for _, found in kept.values()]

    def _read(self, key: str, host: str) -> HostReaders | None:
        data = self._bucket.get(key, limit=MAX_HOST_BYTES)
        if data is None:
            return None
        found = decode_json(data, HostReaders, run=self._bucket.url, key=key)
        if found.host != host:
            raise CorruptError("a report of another host", run=self._bucket.url, key=key)
        return found
