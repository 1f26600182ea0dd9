"""Vandalizes buckets at random, and checks that readers end with the right bits or one
clear error.

As a program it does many seeds and can be stopped and started: finished seeds are recorded.

    python tests/support/vandal.py --seeds 1000 --record build/vandal.txt
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from deltawire.errors import BugError, DeltawireError
from deltawire.store import Bucket, open_bucket, retrying
from deltawire.sync import (
    Follower,
    ManifestFollower,
    Relay,
    Subscriber,
    load_mirror,
    newest_readable,
    open_publisher,
    prune,
    read_run,
)
from deltawire.sync.huggingface.checkout import Checkout
from deltawire.sync.maintain.fsck import check_run
from deltawire.testing.faulty import flip_bit
from deltawire.testing.tiny import TENSORS, same_bits, weights
from deltawire.wire import keys
from deltawire.wire.coordination import RetentionFloor
from deltawire.wire.seal import seal
from deltawire.wire.signing import Ed25519Signer

LAST = 11
LIMIT = 1 << 26
SLOWEST_S = 40.0
MOST_BYTES = 200 << 20

NUMBERS = (0, 1, 3, LAST, LAST + 1, LAST + 2, 40, 9_999_999_998, 9_999_999_999)


class Worlds:
    """A signed and an unsigned run, and an unrelated one whose objects end up among theirs."""

    def __init__(self) -> None:
        self.signer = Ed25519Signer(bytes(range(32)))
        self.runs = {
            False: self._run(signer=None, seed=0),
            True: self._run(signer=self.signer, seed=0),
        }
        self.other = self._run(signer=None, seed=7)

    def _run(self, *, signer: Ed25519Signer | None, seed: int) -> Bucket:
        bucket = open_bucket("memory://")
        publisher = open_publisher(
            bucket, weights(0, seed=seed), specs=TENSORS, signer=signer,
            anchor_every=4, compaction_strides=(2, 4),
        )  # fmt: skip
        for version in range(1, LAST + 1):
            publisher.publish(weights(version, seed=seed))
        publisher.close()
        return bucket


def copy_of(bucket: Bucket, into: Bucket) -> Bucket:
    """All objects of a bucket in another."""
    for key in bucket.list(""):
        data = bucket.get(key, limit=LIMIT)
        assert data is not None
        into.put(key, data)
    return into


def vandalize(bucket: Bucket, other: Bucket, rng: random.Random) -> list[str]:
    """Does a few harmful things to a bucket; what was done, for the report."""
    done = []
    for _ in range(rng.choice((1, 1, 2, 3, 5, 8, 13))):
        there = bucket.list("")
        # Manifests and the like are few: otherwise blobs would get all the harm.
        folder = rng.choice([keys.MANIFESTS, keys.COMPACTED, keys.BLOBS, keys.BLOBS, ""])
        names = [key for key in there if key.startswith(folder)] or there or [keys.RUN]
        key = rng.choice(names)
        harm = rng.choice(("flip", "cut", "delete", "junk", "empty", "foreign", "swap", "key"))
        data = bucket.get(key, limit=LIMIT) or b""
        if harm == "flip":
            for _ in range(rng.choice((1, 1, 20))):
                data = flip_bit(data, rng.randrange(1 << 30))
            bucket.put(key, data)
        elif harm == "cut":
            bucket.put(key, data[: rng.randrange(len(data) + 1)])
        elif harm == "delete":
            bucket.delete(key)
        elif harm in ("junk", "empty"):
            bucket.put(key, rng.randbytes(rng.randrange(1 << 12)) if harm == "junk" else b"")
        elif harm == "foreign":
            same = [k for k in other.list("") if k == key or k.startswith(folder)]
            source = key if key in same else rng.choice(same)
            bucket.put(key, other.get(source, limit=LIMIT) or b"")
        elif harm == "swap":
            second = rng.choice(names)
            bucket.put(key, bucket.get(second, limit=LIMIT) or b"")
            bucket.put(second, data)
        else:
            key = hostile_key(rng)
            bucket.put(key, hostile_content(bucket, key, rng))
        done.append(f"{harm} {key}")
    return done


def hostile_key(rng: random.Random) -> str:
    """A key that states any number, single or as a pair in the wrong order."""
    number, second = rng.choice(NUMBERS), rng.choice(NUMBERS)
    return rng.choice(
        (
            keys.manifest(number),
            keys.compacted(None, number),
            keys.compacted(second, number),
            keys.retention_floor(number),
            keys.checkpoint_commit(number),
            keys.deletion_intent(f"junk{number}"),
            f"{keys.MANIFESTS}{number}.json",
            f"{keys.MANIFESTS}x/{number:010d}.json",
            f"{keys.COMPACTED}{number}-{second}",
            f"{keys.BLOBS}{'0' * 64}",
            f"{keys.PARTS}{number:010d}-x/0000000000.json",
            "weights/manifests",
            "x\n\x1b[31m",
        )
    )


def hostile_content(bucket: Bucket, key: str, rng: random.Random) -> bytes:
    """Nothing, junk, an object of the run from another key, or a floor that is sealed."""
    kind = rng.randrange(4)
    if kind == 0:
        return b""
    if kind == 1:
        return rng.randbytes(200)
    number = keys.trailing_number(key)
    if kind == 2 and key.startswith(keys.RETENTION_FLOORS) and number is not None:
        return seal(RetentionFloor(run="0" * 32, version=number), key=key)
    there = bucket.list(keys.MANIFESTS) or [keys.RUN]
    return bucket.get(rng.choice(there), limit=LIMIT) or b""


class Check:
    """Lets everybody read one vandalized bucket. ``outcomes`` says how each of them ended."""

    def __init__(self, worlds: Worlds, seed: int, folder: Path) -> None:
        rng = random.Random(seed)
        self.signed = bool(rng.randrange(2))
        self.public_key = worlds.signer.public_key if self.signed else ""
        self.signer = worlds.signer if self.signed else None
        place = str(folder / "bucket") if rng.randrange(4) == 0 else "memory://"
        bucket = open_bucket(place, create=True)
        self.whole = worlds.runs[self.signed]
        self.bucket = copy_of(self.whole, bucket)
        self.run = read_run(self.whole)
        self.folder = folder
        self.outcomes: dict[str, str] = {}
        self.done: list[str] = []
        with self._allowed():  # Some keys are none that a folder can hold.
            self.done = vandalize(self.bucket, worlds.other, rng)

    @contextmanager
    def _allowed(self) -> Iterator[None]:
        try:
            yield
        except DeltawireError as error:
            self.outcomes["vandal"] = str(error)

    def all(self) -> None:
        """Runs every reader; raises `AssertionError` for all but bits or a clear error."""
        for name, act in (
            ("fsck", self.fsck),
            ("load", self.load),
            ("follow from 0", lambda: self.follow(0)),
            ("follow from 6", lambda: self.follow(6)),
            ("follow from the newest", lambda: self.follow(LAST)),
            ("thread", self.thread),
            ("manifests", self.manifests),
            ("pull", self.pull),
            ("relay", self.relay),
            ("prune", self.prune),
            ("publish", self.publish),
        ):
            self.one(name, act)

    def one(self, name: str, act: Callable[[], object]) -> None:
        """One of them, held to time and to errors that say something."""
        faulthandler.dump_traceback_later(4 * SLOWEST_S, exit=True)
        began = time.monotonic()
        try:
            self.outcomes[name] = str(act())
        except BugError:
            raise
        except DeltawireError as error:
            self.outcomes[name] = f"{type(error).__name__}: {error}"
            if "\n" in str(error) or not error.message:
                raise BugError("an error that is not one clear line") from error
        finally:
            faulthandler.cancel_dump_traceback_later()
        spent = time.monotonic() - began
        assert spent < SLOWEST_S, f"{name} took {spent:.1f} s"

    def right(self, tensors: object, version: int) -> None:
        """The bits are those that were published under this number."""
        assert 0 <= version <= LAST, f"version {version} was never published"
        assert same_bits(tensors, weights(version)), f"other bits at version {version}"  # type: ignore[arg-type]

    def fsck(self) -> str:
        for deep in (True, False):
            found = check_run(self.bucket, deep=deep, public_key=self.public_key)
            if deep and found.whole:
                run = read_run(self.bucket, public_key=self.public_key)
                load_mirror(self.bucket, run)  # Whole, so there is something to read.
        return f"{len(found.faults)} faults"

    def load(self) -> str:
        run = read_run(self.bucket, public_key=self.public_key)
        if newest_readable(self.bucket, run) is None:
            assert not self.bucket.list(keys.MANIFESTS + "00000000")
            return "no version"
        mirror = load_mirror(self.bucket, run)
        self.right(mirror.tensors, mirror.version)
        return f"version {mirror.version}"

    def follow(self, start: int) -> str:
        mirror = load_mirror(self.whole, self.run, at=start)
        subscriber = Subscriber(self.bucket, self.run, mirror)
        idle = 0
        while idle < 3:
            update = subscriber.prepare()
            idle += update is None
            if update is not None:
                subscriber.commit(update)
                self.right(mirror.tensors, mirror.version)
        assert mirror.version >= start
        return f"version {mirror.version}, alarm {subscriber.alarm}"

    def thread(self) -> str:
        mirror = load_mirror(self.whole, self.run, at=3)
        follower = Follower(Subscriber(self.bucket, self.run, mirror), damage_patience_s=0.05)
        follower.start()
        try:
            quiet = time.monotonic()
            while time.monotonic() - quiet < 0.3:
                update = follower.poll()
                if update is not None:
                    follower.commit(update)
                    self.right(mirror.tensors, mirror.version)
                    quiet = time.monotonic()
                time.sleep(0.002)
        finally:
            follower.close()
        return f"version {mirror.version}"

    def manifests(self) -> str:
        steps = ManifestFollower(self.bucket, self.run)
        for _ in range(5):
            if (update := steps.prepare()) is not None:
                steps.commit(update)
        return f"version {steps.version}"

    def pull(self) -> str:
        run = read_run(self.bucket, public_key=self.public_key)
        with Checkout(self.bucket, run, self.folder / "pulled") as checkout:
            newest = checkout.newest()
            if newest is not None:
                checkout.bring_to(newest)
            return f"version {checkout.version}"

    def relay(self) -> str:
        destination = open_bucket("memory://")
        relay = Relay(self.bucket, destination, public_key=self.public_key, grace_s=0)
        try:
            relay.advance()
        finally:
            relay.close()
        if relay.version >= 0 and newest_readable(destination, relay.run) is not None:
            held = load_mirror(destination, relay.run)
            self.right(held.tensors, held.version)
        return f"version {relay.version}"

    def prune(self) -> str:
        bucket = copy_of(self.bucket, open_bucket("memory://"))
        run = read_run(bucket, public_key=self.public_key)
        before = after = None
        if newest_readable(bucket, run) is not None:
            before = load_mirror(bucket, run)
        found = prune(bucket, run, cutoff=5, grace_s=0, signer=self.signer)
        if newest_readable(bucket, run) is not None:
            after = load_mirror(bucket, run)
        assert (before is None) == (after is None)
        if before is not None and after is not None:
            assert before.version == after.version, "retention took the newest version"
            self.right(after.tensors, after.version)
        return f"below {found.pruned_below}"

    def publish(self) -> str:
        publisher = open_publisher(
            self.bucket, weights(0), specs=TENSORS, signer=self.signer, compaction_strides=()
        )
        try:
            version = publisher.publish(weights(LAST + 1))
            publisher.flush()
        finally:
            publisher.close()
        mirror = load_mirror(self.bucket, read_run(self.bucket, public_key=self.public_key))
        if mirror.version == version:
            assert same_bits(mirror.tensors, weights(LAST + 1))
        return f"version {version}"


def check_seed(worlds: Worlds, seed: int) -> Check:
    """One seed; raises `AssertionError` naming it and what was done to the bucket."""
    threads = set(threading.enumerate())
    with tempfile.TemporaryDirectory() as folder:
        check = Check(worlds, seed, Path(folder))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            check.all()
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
            assert grown < MOST_BYTES, f"{grown} bytes more than before"
            left = [t.name for t in threading.enumerate() if t not in threads]
            assert not left, f"threads left: {left}"
        except BaseException as error:
            error.add_note(f"seed {seed}, signed {check.signed}: {check.done}; {check.outcomes}")
            raise
    return check


def main() -> int:
    """Runs the seeds that are not recorded yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--record", type=Path, default=Path("build/vandal.txt"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    arguments = parser.parse_args()
    retrying.FIRST_PAUSE_S = 0.0
    record = arguments.record
    record.parent.mkdir(parents=True, exist_ok=True)
    done = set(map(int, record.read_text().split())) if record.exists() else set()
    worlds, failed, began = Worlds(), [], time.monotonic()
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        if seed in done or time.monotonic() - began > arguments.seconds:
            continue
        try:
            check_seed(worlds, seed)
        except Exception as error:
            failed.append(seed)
            import traceback

            traceback.print_exception(error, file=sys.stdout)
            continue
        done.add(seed)
        with record.open("a") as file:
            file.write(f"{seed}\n")
            os.fsync(file.fileno())
    sys.stdout.write(f"{len(done)} seeds passed, failed now: {failed}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
