"""``gateway_delay_ratio_p50``, ``_p99`` and ``gateway_rps_ratio``: the gateway and a bare proxy.

Both stand in front of the same mock replica, in the same run, in turns. The gateway captures every
answer, signs receipts and syncs its spool; the pass-through is forty lines of aiohttp. The replica
sends an answer's 16 chunks 5 ms apart.

- The rate is answers per second of processor time of the process, all threads included: with as
  many processes as cores, answers per second of the wall clock measure the slowest of them. Both
  are in the details.
- Delays are measured at half the rate at which the gateway saturates, by Poisson arrivals. The
  replica writes into each chunk when it sent it; the delay of a chunk is its arrival at the client
  less that time, and that of the first token its arrival less the time of the request. The ratio is
  the larger one of first token's and chunks'.
"""

from __future__ import annotations

import asyncio
import random
import re
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.live.replica import CHUNKS, TOKEN, MeasuredProcess, stack
from benchmarks.training.keys import Measured, Options

SATURATE_S = 4.0
CONCURRENT = 64
ROUND_S = 5.0
PACE_S = 0.005
WARM_UP = 50
_TIME = re.compile(rb"t=([0-9.]+);")


@dataclass
class Delays:
    """Seconds until the first token, and from the replica's sending of each chunk on."""

    first_s: list[float] = field(default_factory=list)
    chunks_s: list[float] = field(default_factory=list)
    answers: int = 0


async def _ask(
    session: aiohttp.ClientSession, url: str, number: int, delays: Delays, pace_s: float
) -> None:
    body = {
        "model": "m", "stream": True, "pace_s": pace_s, "user": f"user {number % 97}",
        "messages": [{"role": "user", "content": f"question {number} " + "word " * 40}],
    }  # fmt: skip
    headers = {"Authorization": f"Bearer {TOKEN}"}
    began = time.monotonic()
    seen = 0
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        data = b""
        async for chunk in answer.content.iter_any():
            now = time.monotonic()
            data += chunk
            found = [float(one) for one in _TIME.findall(data)]
            for place in range(seen, len(found)):
                if not place:
                    delays.first_s.append(now - began)
                elif place < CHUNKS - 1:  # The last one waits for the receipt.
                    delays.chunks_s.append(now - found[place])
            seen = len(found)
    if seen != CHUNKS or not data.rstrip().endswith(b"[DONE]"):
        raise RuntimeError(f"an answer of {seen} chunks: {data[-300:]!r}")
    delays.answers += 1


async def _saturate(process: MeasuredProcess, seconds: float) -> tuple[float, float]:
    """Returns answers per second of processor time, and of the wall clock."""
    delays = Delays()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        cpu, began = process.cpu_s, time.monotonic()

        async def client(number: int) -> None:
            while time.monotonic() - began < seconds:
                number += CONCURRENT
                await _ask(session, process.url, number, delays, PACE_S)

        await asyncio.gather(*(client(number) for number in range(CONCURRENT)))
        wall = time.monotonic() - began
        spent = process.cpu_s - cpu
    return delays.answers / spent, delays.answers / wall


async def _at_rate(process: MeasuredProcess, rate: float, seconds: float, seed: int) -> Delays:
    chance, delays = random.Random(seed), Delays()
    tasks: list[asyncio.Task[None]] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        due = time.monotonic()
        ends = due + seconds
        while (due := due + chance.expovariate(rate)) < ends:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            ask = _ask(session, process.url, len(tasks), delays, PACE_S)
            tasks.append(asyncio.create_task(ask))
        await asyncio.gather(*tasks)
    return delays


async def _measure(folder: Path, options: Options) -> Measured:
    with stack(folder) as (_, proxy, gateway):
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"{gateway.url}/health") as health:
                    if health.status == 200:
                        break
                await asyncio.sleep(0.1)
            for process in (proxy, gateway):
                for number in range(WARM_UP):
                    await _ask(session, process.url, number, Delays(), 0.0)
        rates: dict[str, list[tuple[float, float]]] = {"proxy": [], "gateway": []}
        found = {"proxy": Delays(), "gateway": Delays()}
        both = {"proxy": proxy, "gateway": gateway}
        for _ in range(options.repeats):
            for name, process in both.items():
                rates[name].append(await _saturate(process, SATURATE_S))
        half = float(np.median([wall for _, wall in rates["gateway"]])) / 2
        for turn in range(options.repeats):
            for name, process in both.items():
                one = await _at_rate(process, half, ROUND_S, options.seed + turn)
                found[name].first_s += one.first_s
                found[name].chunks_s += one.chunks_s
    return _result(rates, found, half)


def _result(
    rates: dict[str, list[tuple[float, float]]], found: dict[str, Delays], half: float
) -> Measured:
    details: dict[str, Any] = {"answers_per_s_at_half": half}
    ratios: dict[int, list[float]] = {50: [], 99: []}
    for kind in ("first_s", "chunks_s"):
        for percent, ratio in ratios.items():
            ours, theirs = (
                float(np.percentile(getattr(found[name], kind), percent))
                for name in ("gateway", "proxy")
            )
            details[f"{kind[:-2]}_p{percent}_ms"] = [1e3 * ours, 1e3 * theirs]
            ratio.append(ours / theirs)
    for place, kind in enumerate(("cpu", "wall")):
        medians = [float(np.median([one[place] for one in rates[n]])) for n in rates]
        details[f"answers_per_{kind}_s"] = {"proxy": medians[0], "gateway": medians[1]}
    per_cpu = details["answers_per_cpu_s"]
    values: dict[str, bool | float] = {
        "gateway_delay_ratio_p50": max(ratios[50]),
        "gateway_delay_ratio_p99": max(ratios[99]),
        "gateway_rps_ratio": per_cpu["gateway"] / per_cpu["proxy"],
    }
    return Measured(values, details)


def measure(options: Options) -> Measured:
    """Measure all three keys."""
    with tempfile.TemporaryDirectory(prefix="deltawire-bench-") as folder:
        return asyncio.run(_measure(Path(folder), options))
