"""Examines a store: whether it answers, what it guarantees, how fast it is.

Everything is written under a fresh prefix below ``store-probes/``, where publishers try stores too,
and is deleted at the end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median

from deltawire.errors import DeltawireError, InputError
from deltawire.launch.doctor.findings import Finding
from deltawire.store import Bucket, open_bare_bucket
from deltawire.sync import find_run, newest_version
from deltawire.testing.scratch import scratch_bucket

AREA = "store"
ROUNDS = 7
SMALL = 1024
LARGE = 16 << 20
SKEW_S = 60.0
"""S3 refuses requests whose clock differs by 15 minutes; no decision of deltawire's compares two
clocks, but ages in tables do."""


def examine_store(url: str) -> list[Finding]:
    """Examines the store at ``url``. A failed check is a finding, never an exception."""
    try:
        bucket = open_bare_bucket(url)
        reached = _answers(bucket)
    except DeltawireError as error:
        return [_failed("reachable", error)]
    found = [reached]
    try:
        with scratch_bucket(url) as scratch:
            scratch.put("writable", b"")
            found += _examine(scratch)
    except DeltawireError as error:
        found.append(_read_only(error) if len(found) == 1 else _failed("clean-up", error))
    return found


def examine_conformance(url: str, report: Callable[[str], None]) -> list[Finding]:
    """Runs the shipped store suite in a scratch prefix; ``report`` gets the name of each case."""
    from deltawire.testing.conformance import run_store_suite

    found: list[Finding] = []
    try:
        found.extend(
            Finding(
                area="conformance",
                name=case.name.replace("_", " "),
                found="passed" if case.passed else case.failure,
                status="ok" if case.passed else "problem",
                fix="" if case.passed else f"required: {case.promise}",
            )
            for case in run_store_suite(url, report)
        )
    except DeltawireError as error:
        found.append(_failed("cases", error, area="conformance"))
    return found


def _answers(bucket: Bucket) -> Finding:
    """Looks for a run: one request, which fails if the store, the bucket or access is missing."""
    started = time.perf_counter()
    run = find_run(bucket)
    spent_ms = (time.perf_counter() - started) * 1e3
    if run is None:
        found = "it answers; no run lies there"
    else:
        version = newest_version(bucket)
        found = f"it answers; the run {run.name} is at version {version}"
    return Finding(area=AREA, name="reachable", found=found, value=spent_ms, unit="ms")


def _failed(name: str, error: DeltawireError, *, area: str = AREA) -> Finding:
    hint = error.hint or "check the URL, the credentials and the endpoint"
    return Finding(
        area=area,
        name=name,
        found=error.message,
        status="problem",
        fix=f"{hint}; docs/STORES.md lists the variables",
    )


def _read_only(error: DeltawireError) -> Finding:
    return Finding(
        area=AREA,
        name="writable",
        found=error.message,
        status="problem" if not isinstance(error, InputError) else "note",
        fix="reading is enough for pull and watch; publishers and workers need the permissions of "
        "docs/THREATS.md, and store-probes/ to be tried",
    )


def _examine(bucket: Bucket) -> list[Finding]:
    checks = (
        _create_if_absent,
        _put_replaces,
        _ranges,
        _listing,
        _clock,
        _latency,
        _throughput,
        _deletes,
    )
    found: list[Finding] = []
    for check in checks:
        try:
            found += check(bucket)
        except DeltawireError as error:
            name = check.__name__.strip("_").replace("_", " ")
            found.append(_failed(name, error))
    return found


def _held(name: str, *, holds: bool, yes: str, no: str, fix: str) -> list[Finding]:
    return [
        Finding(
            area=AREA,
            name=name,
            found=yes if holds else no,
            status="ok" if holds else "problem",
            fix="" if holds else fix,
        )
    ]


def _create_if_absent(bucket: Bucket) -> list[Finding]:
    bucket.create("created", b"first\n")
    second = bucket.create("created", b"other\n")
    kept = bucket.get("created", limit=64) == b"first\n"
    return _held(
        "create-if-absent",
        holds=kept and not second,
        yes="a second create is refused, and changes nothing",
        no="a second create overwrites the first",
        fix="every commit rests on this: use a store with conditional writes (If-None-Match); "
        "docs/STORES.md lists some",
    )


def _put_replaces(bucket: Bucket) -> list[Finding]:
    bucket.put("replaced", b"the first and longer one")
    bucket.put("replaced", b"second")
    return _held(
        "read after write",
        holds=bucket.get("replaced", limit=64) == b"second",
        yes="a read sees the put before it",
        no="a read returned an older object",
        fix="use the store itself, not a cache or a replica in front of it",
    )


def _ranges(bucket: Bucket) -> list[Finding]:
    data = bytes(range(256)) * 512
    bucket.put("ranged", data)
    wanted = [(0, 1), (100_000, 20_000), (131_071, 1)]
    parts = bucket.read_ranges("ranged", wanted)
    right = parts is not None and all(
        bytes(part) == data[start : start + length]
        for part, (start, length) in zip(parts, wanted, strict=True)
    )
    return _held(
        "ranged reads",
        holds=right,
        yes="ranges return their bytes",
        no="ranges return other bytes",
        fix="readers fetch only what changed by ranges: check the proxy or gateway in between",
    )


def _listing(bucket: Bucket) -> list[Finding]:
    keys = [f"listed/{number:02}" for number in range(5)]
    for key in reversed(keys):
        bucket.put(key, b"")
    bucket.delete(keys[2])
    wanted = [key for key in keys if key != keys[2]]
    whole = bucket.list("listed/") == wanted
    after = bucket.list("listed/", after=keys[2]) == keys[3:]
    return _held(
        "listing",
        holds=whole and after,
        yes="complete at once, and continues after a key",
        no="incomplete, or not continued after a key",
        fix="retention and recovery list: use a store whose listings see finished writes",
    )


def _clock(bucket: Bucket) -> list[Finding]:
    before = time.time()
    bucket.put("dated", b"")
    after = time.time()
    found = bucket.head("dated")
    if found is None:
        return []
    # The store dates an object between the two; S3 gives whole seconds.
    offset_s = found.modified.timestamp() - (before + after) / 2
    doubt_s = (after - before) / 2 + 1.0
    far = abs(offset_s) > SKEW_S
    return [
        Finding(
            area=AREA,
            name="clock",
            found=f"the store's is {offset_s:+.2f} s from this machine's (± {doubt_s:.1f} s)",
            status="note" if far else "ok",
            fix="synchronize this machine's clock (NTP): S3 refuses requests that are 15 minutes "
            "off"
            if far
            else "",
            value=offset_s,
            unit="s",
        )
    ]


def _latency(bucket: Bucket) -> list[Finding]:
    data = os.urandom(SMALL)
    numbers = iter(range(10_000))
    found = []
    for name, call in (
        ("put", lambda: bucket.put(f"small/{next(numbers)}", data)),
        ("create", lambda: bucket.create(f"small/{next(numbers)}", data)),
        ("get", lambda: bucket.get("small/0", limit=SMALL)),
        ("list", lambda: bucket.list("small/")),
    ):
        spent = sorted(_seconds(call) for _ in range(ROUNDS))
        middle_ms = median(spent) * 1e3
        found.append(
            Finding(
                area=AREA,
                name=f"latency of {name}",
                found=f"{middle_ms:.2g} ms in the median of {ROUNDS}, {spent[-1] * 1e3:.2g} ms at "
                "most, 1 KiB",
                value=middle_ms,
                unit="ms",
            )
        )
    return found


def _throughput(bucket: Bucket) -> list[Finding]:
    data = os.urandom(LARGE)
    found = []
    for name, call in (
        ("writing", lambda: bucket.put("large", data)),
        ("reading", lambda: bucket.get("large", limit=LARGE)),
    ):
        rate = LARGE / _seconds(call) / 1e6
        found.append(
            Finding(
                area=AREA,
                name=f"throughput of {name}",
                found=f"{rate:,.0f} MB/s, one object of {LARGE >> 20} MiB",
                value=rate,
                unit="MB/s",
            )
        )
    return found


def _deletes(bucket: Bucket) -> list[Finding]:
    bucket.put("deleted", b"1")
    bucket.delete("deleted")
    return _held(
        "delete",
        holds=bucket.get("deleted", limit=8) is None,
        yes="a deleted object is gone at once",
        no="a deleted object is still read",
        fix="use the store itself, not a cache or a replica in front of it",
    )


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
