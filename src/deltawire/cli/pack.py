"""``deltawire pack``: a model directory with packed weights, and the error of each layer."""

from __future__ import annotations

import argparse
from pathlib import Path

from deltawire.cli.arguments import add_json
from deltawire.packed_formats import PACKED


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "pack", help="write a model with packed experts, and the error by layer"
    )
    parser.set_defaults(call=run)
    parser.add_argument("model", metavar="MODEL", help="a model directory")
    parser.add_argument("--format", required=True, choices=tuple(PACKED), help="the packed format")
    parser.add_argument("--out", required=True, metavar="DIR", help="the model's new folder")
    parser.add_argument(
        "--layers",
        nargs="+",
        default=[],
        metavar="NAME",
        help="linear layers to pack too, by the last part of their names, such as o_proj",
    )
    add_json(parser, "print the errors as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Pack the model."""
    from deltawire.launch.pack import pack_model

    pack_model(
        Path(arguments.model),
        Path(arguments.out),
        arguments.format,
        layers=arguments.layers,
        as_json=arguments.json,
    )
    return 0
