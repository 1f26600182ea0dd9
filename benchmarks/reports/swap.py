"""``deltawire bench swap``: the pause of a swap in vLLM, compared with vLLM's loaders.

With ``--device``, the time of a swap without an engine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.swap import SwapFigures
from benchmarks.swap import bench_swap as measure
from deltawire.dashboard.wording import byte_size
from deltawire.errors import InputError

if TYPE_CHECKING:
    from benchmarks.scatter import ScatterTimes


def run(arguments: argparse.Namespace) -> int:
    """Measures, and prints the table or the JSON."""
    if arguments.device:
        return _bench_alone(arguments)
    console = Console(stderr=True, highlight=False)
    found = measure(
        parameters=int(arguments.parameters * 1e6),
        changed=arguments.density,
        repeats=arguments.repeats,
        tell=console.print,
    )
    if arguments.json:
        Console().print_json(msgspec.json.encode(found).decode())
    else:
        _print(found)
    return 0


def _print(found: SwapFigures) -> None:
    console = Console(highlight=False)
    table = Table("", "measured", "floor")
    table.add_row("pause of a swap", f"{found.pause_ms:.1f} ms", "")
    table.add_row(
        "times shorter than loading the whole model again",
        f"{found.pause_speedup_vs_reload:.1f}",
        "≥ 20",
    )
    table.add_row(
        "times shorter than vLLM's call for it", f"{found.pause_speedup_vs_reload_call:.1f}", ""
    )
    table.add_row(
        "times shorter than vLLM's patch loader",
        f"{found.pause_speedup_vs_patch_loader:.1f}",
        "≥ 5",
    )
    table.add_row(
        "longer when the model doubles and the changes stay",
        f"{found.pause_growth_model_doubled:.1%}",
        "< 15 %",
    )
    table.add_row("allocated during the swap", byte_size(found.swap_allocated_bytes), "")
    table.add_row("staged for it before", byte_size(found.staged_bytes), "")
    table.add_row("throughput lost while preparing", f"{found.throughput_lost:.1%}", "≤ 20 %")
    table.add_row("from token to token across a swap", f"{found.token_gap_ms:.1f} ms", "")
    table.add_row("and usually", f"{found.usual_gap_ms:.1f} ms", "")
    console.print(table)
    console.print(
        f"vLLM {found.vllm}, {found.parameters / 1e6:.0f} million bf16 weights, {found.changes} "
        f"changed ({found.changed:.1%}); reload {found.reload_ms:.0f} ms, by "
        f"vLLM's call {found.reload_call_ms:.0f} ms, patch loader {found.patch_loader_ms:.0f} ms; "
        f"prepared in {found.prepare_ms:.0f} ms; "
        f"{found.machine.processor}, {found.machine.processors} processors"
    )


def _bench_alone(arguments: argparse.Namespace) -> int:
    # Imported late: torch reads its thread count from the environment on import, and the other
    # benchmark sets it first.
    from benchmarks.scatter import time_scatter

    parameters = int(arguments.parameters * 1e6)
    if parameters < 1 or not 0 < arguments.density <= 1 or arguments.repeats < 1:
        raise InputError("at least one million parameters, a share up to 1, one repeat")
    found = time_scatter(
        parameters,
        max(1, int(parameters * arguments.density)),
        rounds=arguments.repeats,
        device=arguments.device,
    )
    if arguments.json:
        Console().print_json(msgspec.json.encode(found).decode())
    else:
        _print_alone(found)
    return 0


def _print_alone(found: ScatterTimes) -> None:
    console = Console(highlight=False)
    table = Table("", "measured", "at the memory's bandwidth")
    table.add_row("swap", f"{found.swap_ms:.2f} ms", f"{found.swap_limit_ms:.2f} ms")
    table.add_row("digest of all", f"{found.attest_ms:.2f} ms", f"{found.attest_limit_ms:.2f} ms")
    table.add_row("prepared in", f"{found.prepare_ms:.0f} ms", "")
    table.add_row("reload from host memory", f"{found.reload_ms:.1f} ms", "")
    table.add_row("copy from host memory", f"{found.copy_ms:.1f} ms", "")
    table.add_row("probed in", f"{found.probe_ms:.0f} ms", "")
    table.add_row("staged before", byte_size(found.staged_bytes), "")
    table.add_row("allocated during the swap", byte_size(found.swap_bytes), "")
    console.print(table)
    console.print(
        f"{found.device}: {found.parameters / 1e6:.0f} million bf16 weights, {found.changes} "
        f"changed; memory copied at {found.bandwidth / 1e9:.0f} GB/s, read and written"
    )
