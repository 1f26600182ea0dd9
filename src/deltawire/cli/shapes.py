"""``deltawire shapes``: the layouts in which a model can be trained, and the memory they take."""

from __future__ import annotations

import argparse
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deltawire.cli.arguments import add_json, at_least
from deltawire.packed_formats import packings

if TYPE_CHECKING:
    from deltawire.plan.architecture import Model
    from deltawire.plan.layout import Packing
    from deltawire.plan.profile import Profile

MODES = ("full", "lora", "reference")
PREDICTED = (
    "Memory is predicted and times are estimates. deltawire run --shape NAME|FILE starts the "
    "shapes that the trainer supports."
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "shapes",
        help="plan a model's training on given accelerators: layout, memory, alternatives",
        description=PREDICTED,
    )
    parser.set_defaults(call=run)
    parser.add_argument(
        "model",
        nargs="?",
        default="",
        metavar="MODEL",
        help="a name of the catalogue, a config.json, a model directory, a run's CONFIG.toml, or a "
        "named shape such as qwen3-30b-a3b-lora-8xh200 (default: list the catalogue)",
    )
    parser.add_argument("--on", default="", metavar="NxNAME", help="accelerators, such as 8xh200")
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="full",
        help="full, LoRA or reference; with --on (default: full)",
    )
    parser.add_argument(
        "--context", type=at_least(1), metavar="TOKENS", help="tokens per sequence (default: 32768)"
    )
    parser.add_argument("--lora-rank", type=at_least(1), default=32, metavar="R")
    parser.add_argument("--lora-experts", action="store_true", help="an adapter for every expert")
    parser.add_argument(
        "--packing",
        choices=packings(),
        help="the packed format of frozen experts (default: the published checkpoint's)",
    )
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument(
        "--checkpointing",
        choices=("none", "selective", "full", "offloaded"),
        help="checkpointing of activations (default: the fastest that fits)",
    )
    parser.add_argument(
        "--offload",
        choices=("none", "optimizer", "all"),
        help="to the host: the optimizer's moments, or masters and gradients too "
        "(default: the fastest that fits)",
    )
    parser.add_argument(
        "--startable",
        action="store_true",
        help="only layouts that the trainer can start (default: these if one fits)",
    )
    parser.add_argument(
        "--accelerators", default="", metavar="FILE.json", help="a table that adds accelerators"
    )
    parser.add_argument(
        "--out", default="", metavar="FILE.json", help="write the profile to this file"
    )
    parser.add_argument(
        "--published", action="store_true", help="compare published shapes with ours, in Markdown"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Lists the catalogue, the smallest hardware for one model, or one profile."""
    from deltawire.errors import InputError
    from deltawire.launch.machine_rows import machine_rows
    from deltawire.plan.profile import encode_profile
    from deltawire.plan.published import published_table
    from deltawire.plan.resolver import SHAPE, resolve_shape
    from deltawire.plan.tables import catalogue_rows, needs_rows, profile_lines

    if arguments.published:
        _print(published_table())
        return 0
    profile: Profile | None = None
    if SHAPE.fullmatch(arguments.model.lower()) and not Path(arguments.model).exists():
        if arguments.on:
            raise InputError("a named shape says its accelerators: leave --on out")
        profile = resolve_shape(arguments.model)
    elif arguments.model and arguments.on:
        profile = _resolve(arguments)
    if profile is not None:
        encoded = encode_profile(profile).decode() + "\n"
        if arguments.out:
            Path(arguments.out).write_text(encoded)
        _print(encoded.rstrip() if arguments.json else "\n".join(profile_lines(profile)))
    elif arguments.out:
        raise InputError("--out writes one profile: name accelerators with --on, or a shape")
    elif arguments.model:
        model, native = _find_model(arguments.model)
        packing = arguments.packing or native
        rows = machine_rows(model, packing, arguments.context)
        rows += needs_rows(model, packing, arguments.context)
        _rows(rows, as_json=arguments.json)
    else:
        _rows(catalogue_rows(), as_json=arguments.json)
    if not arguments.json:
        _print(f"\n{PREDICTED}")
    return 0


def _resolve(arguments: argparse.Namespace) -> Profile:
    """Resolves the profile that the options ask for."""
    from deltawire.errors import InputError
    from deltawire.plan.accelerators import accelerator_named, read_accelerators
    from deltawire.plan.resolver import (
        Accelerators,
        default_context,
        resolve_startable_first,
        resolve_training_profile,
    )

    match = re.fullmatch(r"([1-9][0-9]{0,3})x([A-Za-z0-9.-]{1,32})", arguments.on)
    if match is None:
        raise InputError(
            f"--on {arguments.on} names no accelerators", hint="write 8xh200 for eight of them"
        )
    table = read_accelerators(Path(arguments.accelerators) if arguments.accelerators else None)
    kind = accelerator_named(match[2].lower(), table)
    model, native = _find_model(arguments.model)
    packing = arguments.packing or (native if arguments.mode != "full" else "none")
    startable = partial(resolve_training_profile, startable=True)
    return (startable if arguments.startable else resolve_startable_first)(
        model,
        mode=arguments.mode,
        accelerators=Accelerators(kind, int(match[1])),
        context=arguments.context or default_context(model),
        optimizer=arguments.optimizer,
        packing=packing,
        lora_rank=arguments.lora_rank,
        lora_experts=arguments.lora_experts,
        checkpointing=arguments.checkpointing,
        offload=arguments.offload,
    )


def _find_model(name: str) -> tuple[Model, Packing]:
    """Describes a model of the catalogue, of a config.json, or of a run's configuration."""
    from deltawire.config import load_config
    from deltawire.launch.shapes import model_of
    from deltawire.plan.catalogue import find_model

    if Path(name).suffix == ".toml":
        return model_of(load_config(Path(name))), "none"
    return find_model(name)


def _print(text: str) -> None:
    print(text)  # noqa: T201


def _rows(rows: list[dict[str, str]], *, as_json: bool) -> None:
    """Prints rows as aligned columns, or as JSON."""
    import json

    if as_json:
        _print(json.dumps(rows))
        return
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        _print("  ".join(cells).rstrip())
