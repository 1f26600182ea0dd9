"""Runs ``deltawire simulate`` with many seeds, each once in its own folder; keeps the results."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from deltawire.dashboard.simulation import SimulationReport

COMMAND = (sys.executable, "-m", "deltawire")
ENDED = "ended.json"
LOOK_S = 10.0
"""The load of the machine is read so often."""


class Ended(msgspec.Struct, frozen=True):
    """How the command of a seed ended: its exit code (None: it was killed at its limit), the end
    of what it said, the minutes that it took, and the mean load of the machine in between."""

    code: int | None
    said: str
    minutes: float
    load: float


def read_report(folder: Path) -> SimulationReport | None:
    """Returns the report of a seed; None if it was not measured to its end."""
    data = _read(folder / "live.json")
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(data, type=SimulationReport)
    return None


def read_ended(folder: Path) -> Ended | None:
    """Returns how the command of a seed ended; None if it was not run to its end."""
    data = _read(folder / ENDED)
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(data, type=Ended)
    return None


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def run_seed(folder: Path, seed: int, *, config: Path, span: Sequence[str], limit_s: float) -> None:
    """Measures one seed, in place of what an interrupted measurement left; ``span`` is the
    command's option for how long users come."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    command = [*COMMAND, "simulate", str(config), "--out", str(folder), "--seed", str(seed)]
    command += [*span, "--json"]
    began, code, loads = time.monotonic(), None, [os.getloadavg()[0]]
    log = folder / "said.log"
    with log.open("wb") as said:
        process = subprocess.Popen(  # noqa: S603 - our own command
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said
        )
        try:
            while code is None and time.monotonic() < began + limit_s:
                try:
                    code = process.wait(min(LOOK_S, limit_s))
                except subprocess.TimeoutExpired:
                    loads.append(os.getloadavg()[0])
        finally:
            process.kill()
            process.wait()
    ended = Ended(
        code,
        log.read_bytes()[-1000:].decode("utf-8", "replace"),
        (time.monotonic() - began) / 60,
        sum(loads) / len(loads),
    )
    (folder / ENDED).write_bytes(msgspec.json.format(msgspec.json.encode(ended), indent=2))
