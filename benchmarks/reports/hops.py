"""``deltawire bench hops``: the rates of every hop on this machine, as a file for the planner."""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.hops.rates import RateMeter, store_rates
from deltawire.errors import InputError
from deltawire.plan.fleet.rates import Precision, Rates, encode_rates
from deltawire.store import Bucket, open_bucket
from deltawire.testing.s3_server import S3Server
from deltawire.testing.scratch import scratch_bucket


def run(arguments: argparse.Namespace) -> int:
    """Measures, writes the file, and prints the table or the JSON."""
    if arguments.rounds < 1:
        raise InputError("--rounds must be at least 1")
    known: tuple[Precision, ...] = get_args(Precision)
    precisions = [one for one in known if one in arguments.precisions.split(",")]
    if set(arguments.precisions.split(",")) != set(precisions):
        raise InputError(
            f"--precisions {arguments.precisions}: unknown", hint=f"known: {', '.join(known)}"
        )
    out = Path(arguments.out) if arguments.out else None
    if out is not None and not out.absolute().parent.is_dir():
        raise InputError(f"--out {out}: its folder does not exist")
    rates = RateMeter(precisions, seed=arguments.seed, fastest=arguments.fastest).measure(
        arguments.rounds
    )
    with ExitStack() as stack:
        stores = _open_stores(arguments.stores, stack)
        found = {name: store_rates(one, rounds=arguments.rounds) for name, one in stores.items()}
    rates = msgspec.structs.replace(rates, stores=found)
    if out is not None:
        out.write_bytes(encode_rates(rates))
    if arguments.json:
        print(encode_rates(rates).decode(), end="")  # noqa: T201
    else:
        Console(highlight=False).print(_table(rates))
    return 0


def _open_stores(names: str, stack: ExitStack) -> dict[str, Bucket]:
    """Opens a temporary folder for ``folder``, a server on loopback for ``s3``, or a URL."""
    found: dict[str, Bucket] = {}
    for name in filter(None, names.split(",")):
        if name == "folder":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="deltawire-bench-"))
            found[name] = open_bucket(folder)
        elif name == "s3":
            server = stack.enter_context(S3Server())
            server.make_bucket("hops")
            found[name] = server.open("s3://hops/rates")
        elif "://" in name:
            found[name] = stack.enter_context(scratch_bucket(name))
        else:
            raise InputError(
                f"--stores: {name[:64]!r} is neither folder, s3 nor a URL", hint="such as s3://…"
            )
    return found


def _table(rates: Rates) -> Table:
    """Lays the rates out."""
    table = Table("hop", "rate", title=f"{rates.machine}, {rates.measured}")
    table.add_row("copy, all cores", f"{rates.copy_bytes_s / 1e9:.2f} GB/s")
    table.add_row("digest, one core", f"{rates.digest_bytes_s / 1e9:.2f} GB/s")
    table.add_row("quantise to fp8, one core", f"{1e-6 / rates.quantise_value_s:.0f} M values/s")
    for precision, codec in rates.codecs.items():
        for name, cost in (("encode", codec.encode), ("decode", codec.decode)):
            table.add_row(
                f"{name} {precision}, one core",
                f"{cost.per_value_s * 1e9:.2f} ns a value, {cost.per_change_s * 1e9:.1f} ns a "
                "change",
            )
        sizes = ", ".join(f"{one.bits_per_change:.2f} at {one.share:.2%}" for one in codec.sizes)
        table.add_row(f"bits a change, {precision}", sizes)
    table.add_row("stage, swap", f"{rates.stage_change_s * 1e9:.1f} ns, "
                  f"{rates.swap_change_s * 1e9:.1f} ns a change")  # fmt: skip
    table.add_row("move of a mirror", f"{rates.mirror_change_s * 1e9:.1f} ns a change")
    table.add_row("a version, however small", f"publish {rates.publish_s * 1e3:.2f} ms, "
                  f"follow {rates.follow_s * 1e3:.2f} ms")  # fmt: skip
    speeds = ", ".join(f"{one.threads}: {one.speedup:.2f}" for one in rates.speeds)
    table.add_row("speed of threads", speeds)
    for name, store in rates.stores.items():
        table.add_row(
            f"store {name}",
            f"put {store.put_s * 1e3:.2f} ms + {store.put_bytes_s / 1e6:.0f} MB/s, "
            f"get {store.get_s * 1e3:.2f} ms + {store.get_bytes_s / 1e6:.0f} MB/s, "
            f"{store.total_get_bytes_s / 1e6:.0f} MB/s by several",
        )
    return table
