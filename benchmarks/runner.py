"""Runs every coding on every pair, one process after another, and describes the machine."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from benchmarks.measure import DIGEST, SIMD_VARIABLE, Measured, plain
from benchmarks.peers import PEERS, missing
from deltawire import __version__
from deltawire.errors import InputError

_CPU_INFO: Final = Path("/proc/cpuinfo")


class Job(NamedTuple):
    """One process: a coding, the vector path to use (\"\" for its own choice), threads."""

    codec: str
    simd: str
    threads: int


class Machine(msgspec.Struct, kw_only=True):
    """Where figures were measured."""

    processor: str
    processors: int
    system: str
    python: str
    numpy: str
    deltawire: str


class Report(msgspec.Struct, kw_only=True):
    """All of a run's rows; ``skipped`` says which peers are missing, and how to get them."""

    machine: Machine
    rows: list[Measured]
    skipped: list[str]

    def json(self) -> str:
        """All of it, with the figures that follow from those measured."""
        rows = [plain(row) for row in self.rows]
        whole = {"machine": self.machine, "rows": rows, "skipped": self.skipped}
        return msgspec.json.encode(whole).decode()


def this_machine() -> Machine:
    """The machine that this runs on."""
    return Machine(
        processor=_cpu_info("model name") or platform.processor() or platform.machine(),
        processors=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else (os.cpu_count() or 1),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        numpy=np.__version__,
        deltawire=__version__,
    )


def vector_paths() -> list[str]:
    """The codec's vector paths that this processor can take, best first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ["neon", "portable"] if platform.machine() in ("aarch64", "arm64") else ["portable"]
    flags = set(_cpu_info("flags").split())
    known = [path for path, flag in (("avx512", "avx512bw"), ("avx2", "avx2")) if flag in flags]
    return [*known, "portable"]


def choose_peers(wanted: str) -> list[str]:
    """The peers that ``wanted`` names: ``all``, ``none``, or names with commas between them."""
    if wanted in ("all", "none"):
        return list(PEERS) if wanted == "all" else []
    names = wanted.split(",")
    if unknown := [name for name in names if name not in PEERS]:
        raise InputError(
            f"--peers: unknown peer {unknown[0][:40]!r}",
            hint=f"known: all, none, {', '.join(PEERS)}",
        )
    return names


def jobs_for(peers: Sequence[str], threads: Sequence[int]) -> tuple[list[Job], list[str]]:
    """The peers to run, and a line for each peer that cannot run."""
    jobs = [Job("deltawire", path, count) for path in vector_paths() for count in threads]
    jobs += [Job(codec, "", count) for codec in ("anchor", DIGEST) for count in threads]
    skipped = []
    for name in peers:
        if absent := missing(name):
            skipped.append(
                f"{name} is left out: it needs {' and '.join(absent)}; "
                "pip install 'deltawire[bench]'"
            )
        else:
            jobs.append(Job(name, "", 1))
    return jobs, skipped


def run_job(
    job: Job,
    pairs: Sequence[Path],
    *,
    repeats: int,
    seconds: float,
    tell: Callable[[Measured], None],
) -> list[Measured]:
    """Measures one coding on all pairs in a separate process; calls ``tell`` with each row."""
    environment = {**os.environ, **dict.fromkeys(_THREAD_VARIABLES, str(job.threads))}
    environment.pop(SIMD_VARIABLE, None)
    if job.simd:
        environment[SIMD_VARIABLE] = job.simd
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT), environment.get("PYTHONPATH", "")))
    )
    command = [sys.executable, "-m", "benchmarks.measure", job.codec, *map(str, pairs)]
    command += [f"--threads={job.threads}", f"--repeats={repeats}", f"--seconds={seconds}"]
    rows: list[Measured] = []
    with subprocess.Popen(  # noqa: S603 - our own interpreter, our own module
        command, env=environment, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                rows.append(msgspec.json.decode(line, type=Measured))
                tell(rows[-1])
        except BaseException:  # Only this process reports an interrupt.
            process.kill()
            raise
    for path in pairs[len(rows) :]:
        rows.append(
            Measured(
                codec=job.codec,
                pair=path.stem,
                simd=job.simd,
                threads=job.threads,
                error=f"its process ended with {process.returncode}",
            )
        )
        tell(rows[-1])
    return rows


ROOT: Final = Path(__file__).parents[1]
"""Holds the package `benchmarks`, which is not installed."""

_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def _cpu_info(field: str) -> str:
    if not _CPU_INFO.is_file():
        return ""
    for line in _CPU_INFO.read_text().splitlines():
        if line.startswith(field):
            return line.partition(":")[2].strip()
    return ""
