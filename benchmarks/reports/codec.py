"""``deltawire bench codec``: deltawire's codings and others on the same weights."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from benchmarks.measure import Measured
from benchmarks.pairs import find_pairs, save_pair
from benchmarks.runner import Report, choose_peers, jobs_for, run_job, this_machine
from benchmarks.synthetic import synthetic_pair
from benchmarks.table import label, tables
from deltawire.errors import InputError

WRONG = 1
"""The exit code when a coding failed or was not lossless."""

T = TypeVar("T", int, float)


def run(arguments: argparse.Namespace) -> int:
    """Measures every coding on every pair; print the tables or the JSON, and draw the plot."""
    threads = _numbers(arguments.threads, int, "--threads")
    densities = _numbers(arguments.density, float, "--density")
    if arguments.repeats < 1 or arguments.seconds <= 0:
        raise InputError("--repeats must be at least 1 and --seconds above 0")
    jobs, skipped = jobs_for(choose_peers(arguments.peers), threads)
    if arguments.plot:
        _check_plot(Path(arguments.plot))
    console = Console(stderr=True, highlight=False)
    for line in skipped:
        console.print(line, style="yellow", markup=False, soft_wrap=True)
    rows: list[Measured] = []
    with _pairs(arguments, densities, console) as pairs:
        for job in jobs:
            rows += run_job(
                job,
                pairs,
                repeats=arguments.repeats,
                seconds=arguments.seconds,
                tell=lambda row: console.print(_line(row), soft_wrap=True),
            )
    report = Report(machine=this_machine(), rows=rows, skipped=skipped)
    if arguments.json:
        Console().print_json(report.json())
    else:
        _print_tables(report)
    if arguments.plot:
        from benchmarks.plot import plot

        plot(rows, Path(arguments.plot))
    return WRONG if any(row.error for row in rows) else 0


def _numbers(text: str, kind: type[T], flag: str) -> list[T]:
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"{flag} {text}: give numbers with commas between them") from error
    if min(numbers) <= 0:
        raise InputError(f"{flag} {text}: numbers must be above 0")
    return numbers


def _check_plot(path: Path) -> None:
    if find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib", hint="pip install 'deltawire[bench]'")
    from deltawire.dashboard.pictures import check_suffix

    check_suffix(path)
    if not path.parent.is_dir():
        raise InputError(f"--plot {path}: there is no folder {path.parent}")


@contextmanager
def _pairs(
    arguments: argparse.Namespace, densities: Sequence[float], console: Console
) -> Iterator[list[Path]]:
    """The pairs to measure on; synthetic ones are generated if no others are named, and deleted
    afterwards."""
    found = find_pairs(arguments.corpus)
    with tempfile.TemporaryDirectory(prefix="deltawire-bench-") as folder:
        if arguments.synthetic is not None or not found:
            elements = arguments.synthetic or DEFAULT_ELEMENTS
            for density in densities:
                console.print(f"making {elements:,} weights of which {density:.2%} change")
                pair = synthetic_pair(elements, density)
                path = Path(folder) / f"{pair.name}.npz"
                save_pair(
                    path,
                    {name: tensor.old for name, tensor in pair.tensors.items()},
                    {name: tensor.new for name, tensor in pair.tensors.items()},
                )
                found.append(path)
                del pair
        yield found


DEFAULT_ELEMENTS = 1 << 28
"""512 MB of bf16."""


def _line(row: Measured) -> str:
    if row.error:
        return f"{row.pair}  {label(row)}: {row.error}"
    words = [f"{row.pair}  {label(row)}:"]
    if row.ratio:
        words.append(f"{row.ratio:.1f} times smaller,")
    words += [f"{speed:.3f} GB/s" for speed in (row.encode_gbs, row.decode_gbs) if speed]
    return " ".join(words)


def _print_tables(report: Report) -> None:
    machine = report.machine
    console = Console()
    if not console.is_terminal:
        console = Console(width=180)
    for table in tables(report.rows):
        console.print(table)
    console.print(
        f"{machine.processor}, {machine.processors} processors, {machine.system}; "
        f"Python {machine.python}, NumPy {machine.numpy}, deltawire {machine.deltawire}"
    )
    for line in report.skipped:
        console.print(line, markup=False)
