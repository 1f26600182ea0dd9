"""Real runs of small fleets on this machine, each with the plan that was made for it.

A group of configurations shares its processes: a trainer, and one to eight readers, of models of
0.1 to 2 GB, over a folder, or over an S3 server that they reach from network namespaces through
shaped links and a proxy that delays every request. Rates are measured right before each group.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from queue import Empty, Queue
from statistics import median
from typing import Any

import msgspec

from benchmarks.hops.rates import TILE, RateMeter, store_rates
from benchmarks.runner import ROOT
from benchmarks.scale.fleet_process import Reached, Settings, Stepped
from benchmarks.scale.namespaces import Namespaces
from deltawire.errors import BugError
from deltawire.plan.fleet.rates import Rates
from deltawire.plan.fleet.transfer import Amounts, Readers, Writer, follow, publish
from deltawire.store import open_bucket
from deltawire.testing.proxy import FaultyProxy
from deltawire.testing.s3_server import S3Server

POLL_S = 0.1
SMALL_TENSORS = 8
SMALL_STEPS = 9
"""Steps of models of at most so many tensors: a version arrives within a poll or two, so that the
wait for a poll is most of it, and three steps would not show its mean."""
LONGEST_S = 280.0
"""The longest that a process is waited for."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration: ``share`` of the values changes, links in bytes a second, 0: not
    shaped."""

    share: float
    up_bytes_s: float = 0.0
    down_bytes_s: float = 0.0
    delay_s: float = 0.0


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Configurations of one model of ``tensors`` tensors of 32 MiB and one number of readers."""

    tensors: int
    readers: int
    network: bool
    cases: tuple[Case, ...]


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration as it was planned and as it was measured: medians over its steps."""

    model_bytes: int
    readers: int
    network: bool
    case: Case
    changed: float
    interval_s: float
    seconds: float
    planned_s: float
    publish_s: float
    planned_publish_s: float
    bytes: float
    planned_bytes: float
    simulated_s: float = 0.0

    @property
    def time_error(self) -> float:
        """The relative error of the planned time to the last reader."""
        return abs(self.planned_s / self.seconds - 1)

    @property
    def bytes_error(self) -> float:
        """The relative error of the planned bytes, written and read by all."""
        return abs(self.planned_bytes / self.bytes - 1)


MBIT = 1e6 / 8
GROUPS = (
    Group(tensors=3, readers=1, network=False,
          cases=(Case(share=0.003), Case(share=0.01), Case(share=0.03))),
    Group(tensors=8, readers=8, network=False, cases=(Case(share=0.001), Case(share=0.02))),
    Group(tensors=16, readers=4, network=False, cases=(Case(share=0.003), Case(share=0.03))),
    Group(tensors=32, readers=2, network=False, cases=(Case(share=0.01), Case(share=0.05))),
    Group(tensors=60, readers=1, network=False, cases=(Case(share=0.003), Case(share=0.02))),
    Group(tensors=3, readers=8, network=True, cases=(
        Case(share=0.01, up_bytes_s=50 * MBIT, down_bytes_s=100 * MBIT),
        Case(share=0.03, up_bytes_s=100 * MBIT, down_bytes_s=200 * MBIT, delay_s=0.02))),
    Group(tensors=8, readers=4, network=True, cases=(
        Case(share=0.005, up_bytes_s=100 * MBIT, down_bytes_s=100 * MBIT, delay_s=0.05),
        Case(share=0.01, up_bytes_s=100 * MBIT, down_bytes_s=200 * MBIT),
        Case(share=0.03, up_bytes_s=200 * MBIT, down_bytes_s=400 * MBIT, delay_s=0.02))),
    Group(tensors=16, readers=2, network=True, cases=(
        Case(share=0.003, up_bytes_s=50 * MBIT, down_bytes_s=50 * MBIT),
        Case(share=0.01, up_bytes_s=100 * MBIT, down_bytes_s=100 * MBIT, delay_s=0.02),
        Case(share=0.03, up_bytes_s=200 * MBIT, down_bytes_s=200 * MBIT, delay_s=0.1))),
    Group(tensors=32, readers=1, network=True, cases=(
        Case(share=0.005, up_bytes_s=50 * MBIT, down_bytes_s=100 * MBIT),
        Case(share=0.02, up_bytes_s=200 * MBIT, down_bytes_s=200 * MBIT, delay_s=0.05))),
)  # fmt: skip


class _Process:
    """A process of a fleet; the lines that it writes wait in a queue."""

    def __init__(self, settings: Settings, within: Sequence[str] = ()) -> None:
        code = [sys.executable, "-m", "benchmarks.scale.fleet_process"]
        self._lines: Queue[str] = Queue()
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter, our own module
            [*within, *code, msgspec.json.encode(settings).decode()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def ask(self, line: str) -> None:
        """Writes a line to the process."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Returns the next line; raises `BugError` if the process ends or says nothing."""
        try:
            line = self._lines.get(timeout=LONGEST_S)
        except Empty:
            line = ""
        if not line:
            raise BugError("a process of the fleet ended or hangs; see its standard error")
        found: dict[str, Any] = json.loads(line)
        return found

    def reached(self, version: int) -> Reached:
        """Waits until a reader has reached a version."""
        while True:
            found = msgspec.convert(self.answer(), Reached)
            if found.version >= version:
                return found

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def _store(group: Group, folder: str) -> Iterator[tuple[str, dict[str, Any], Any, Any]]:
    """Opens a store; yields its URL, its options, the namespaces and the proxy in front of it."""
    if not group.network:
        yield f"{folder}/run", {}, None, None
        return
    with ExitStack() as stack:
        links = stack.enter_context(Namespaces(["trainer", "readers"]))
        server = stack.enter_context(S3Server())
        server.make_bucket("runs")
        proxy = stack.enter_context(FaultyProxy(server.endpoint, delay_s=0.0, host=links.host))
        options: dict[str, Any] = {
            "endpoint": proxy.endpoint,
            "access_key_id": "testing",
            "secret_access_key": "testing",
            "region": "us-east-1",
        }
        yield "s3://runs/run", options, links, proxy


def make_runs(
    groups: Sequence[Group],
    *,
    steps: int,
    rounds: int,
    report: Callable[[str], None],
    simulate: Callable[[Amounts, Writer, Readers], float] | None = None,
) -> list[Made]:
    """Makes every configuration ``steps`` times, and plans it with rates from before its group."""
    meter = RateMeter(("bf16",), seed=1)
    found: list[Made] = []
    for number, group in enumerate(groups):
        with (
            tempfile.TemporaryDirectory(prefix="deltawire-plan-") as folder,
            _store(group, folder) as (url, options, links, proxy),
        ):
            probe = open_bucket(f"{url}-rates", create=True, **options)
            rates = msgspec.structs.replace(
                meter.measure(rounds, engine=False),
                stores={"store": store_rates(probe, rounds=rounds)},
            )
            made = _run_group(group, url, options, links, proxy, rates, steps, number, simulate)
        for one in made:
            report(
                f"{one.model_bytes / 1e9:.2f} GB, {one.readers} readers, {one.case}: "
                f"{one.seconds:.3f} s, planned {one.planned_s:.3f}"
            )
        found += made
    return found


def _run_group(
    group: Group,
    url: str,
    options: dict[str, Any],
    links: Namespaces | None,
    proxy: FaultyProxy | None,
    rates: Rates,
    steps: int,
    seed: int,
    simulate: Callable[[Amounts, Writer, Readers], float] | None,
) -> list[Made]:
    processes: list[_Process] = []
    try:
        common: dict[str, Any] = {
            "url": url,
            "options": options,
            "poll_s": POLL_S,
            "seed": 100 + seed,
        }
        trainer = _Process(
            Settings(role="trainer", tensors=group.tensors, **common),
            links.command("trainer") if links else (),
        )
        processes.append(trainer)
        trainer.answer()
        readers = [
            _Process(Settings(role="reader", **common), links.command("readers") if links else ())
            for _ in range(group.readers)
        ]
        processes += readers
        held = [reader.reached(0).read for reader in readers]
        made = []
        for case in group.cases:
            if links is not None and proxy is not None:
                links.shape("trainer", from_bytes_s=case.up_bytes_s)
                links.shape("readers", to_bytes_s=case.down_bytes_s)
                proxy.delay_s = case.delay_s
                proxy.rates = {"delay": 1.0} if case.delay_s else {}
            made.append(_measure(group, case, trainer, readers, held, rates, steps, simulate))
        return made
    finally:
        for process in processes:
            process.close()


def _measure(
    group: Group,
    case: Case,
    trainer: _Process,
    readers: Sequence[_Process],
    held: list[int],
    rates: Rates,
    steps: int,
    simulate: Callable[[Amounts, Writer, Readers], float] | None,
) -> Made:
    """Makes the steps of one configuration; ``held`` are the bytes that each reader had read.

    Each step begins at a random time: readers that have just moved are all about to pause.
    """
    if group.tensors <= SMALL_TENSORS:
        steps = max(steps, SMALL_STEPS)
    phases = random.Random(f"{group.tensors} {group.readers} {case}")
    rows: list[tuple[float, float, float, Stepped]] = []
    last = time.monotonic()
    intervals = []
    for _ in range(steps):
        time.sleep(phases.uniform(0.0, 2 * POLL_S))
        trainer.ask(repr(case.share))
        stepped = msgspec.convert(trainer.answer(), Stepped)
        reached = [reader.reached(stepped.version) for reader in readers]
        seconds = max(one.at for one in reached) - stepped.started
        moved = stepped.written + sum(
            one.read - before for one, before in zip(reached, held, strict=True)
        )
        held[:] = [one.read for one in reached]
        intervals.append(stepped.committed - last)
        last = max(one.at for one in reached)
        rows.append((seconds, stepped.committed - stepped.started, moved, stepped))
    changed = median(row[3].changed for row in rows)
    amounts, writer, following = describe(group, case, rates, changed, median(intervals))
    publishing = publish(amounts, writer)
    reading = follow(amounts, following)
    planned = sum(hop.bytes for hop in publishing.hops if hop.name in ("put", "commit"))
    planned += sum(hop.bytes for hop in reading.hops if hop.name == "get")
    return Made(
        model_bytes=round(amounts.model_bytes),
        readers=group.readers,
        network=group.network,
        case=case,
        changed=changed,
        interval_s=median(intervals),
        seconds=median(row[0] for row in rows),
        planned_s=publishing.seconds + reading.seconds,
        publish_s=median(row[1] for row in rows),
        planned_publish_s=publishing.seconds,
        bytes=median(row[2] for row in rows),
        planned_bytes=planned,
        simulated_s=simulate(amounts, writer, following) if simulate else 0.0,
    )


def describe(
    group: Group, case: Case, rates: Rates, changed: float, interval_s: float
) -> tuple[Amounts, Writer, Readers]:
    """Describes a configuration to the planner: amounts, trainer and readers on one machine."""
    codec, store = rates.codec("bf16"), rates.stores["store"]
    amounts = Amounts.of(
        group.tensors * TILE, "bf16", share=changed, bits_per_change=codec.bits_per_change(changed)
    )
    up = min(case.up_bytes_s or store.put_bytes_s, store.put_bytes_s)
    down = case.down_bytes_s or store.total_get_bytes_s
    writer = Writer(
        ranks=1,
        cores=rates.speedup(rates.cores),
        copy_bytes_s=rates.copy_bytes_s,
        quantise_bytes_s=0.0,
        encode=codec.encode,
        link_bytes_s=up,
        connection_bytes_s=store.put_bytes_s,
        put_s=store.put_s + case.delay_s,
        get_s=store.get_s + case.delay_s,
        version_s=rates.publish_s,
    )
    readers = Readers(
        count=group.readers,
        share=1.0,
        per_host=group.readers,
        cores=rates.speedup(group.readers * rates.cores),
        serial_cores=rates.speedup(group.readers),
        decode=codec.decode,
        link_bytes_s=min(down, store.total_get_bytes_s),
        region_bytes_s=min(down, store.total_get_bytes_s),
        connection_bytes_s=store.get_bytes_s,
        get_s=store.get_s + case.delay_s,
        poll_s=POLL_S,
        interval_s=interval_s,
        stage_change_s=0.0,
        swap_change_s=rates.mirror_change_s,
        staged_on_cores=True,
        version_s=rates.follow_s,
        poll_cost_s=store.get_s,
    )
    return amounts, writer, readers
