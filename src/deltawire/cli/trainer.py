"""``deltawire trainer``: the trainer process of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from deltawire.cli.arguments import (
    add_engine,
    add_process_options,
    add_run_url,
    add_seed,
    add_shape,
    child_options,
)
from deltawire.errors import InputError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("trainer", help="start or continue only a run's trainer")
    parser.set_defaults(call=run)
    add_run_url(parser)
    parser.add_argument(
        "--config", default="", help="start a run with this configuration; needs --model"
    )
    parser.add_argument("--model", default="", help="version 0 of a new run: this model directory")
    add_seed(parser)
    add_engine(parser)
    add_shape(parser)
    add_process_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Trains until the run's last version."""
    from deltawire.launch.processes import read_config, run_as_trainer
    from deltawire.runtime.supervisor import COMMAND

    if bool(arguments.config) != bool(arguments.model):
        raise InputError("--config and --model go together", hint="give both, or neither")
    if arguments.shape and not arguments.config:
        raise InputError("--shape needs --config", hint="a run that exists has its shape")
    source = None
    if arguments.config:
        path = Path(arguments.config)
        config = read_config(
            path, seed=arguments.seed, engine=arguments.engine, shape=arguments.shape
        )
        source = (config, Path(arguments.model))
    options = child_options(arguments)
    command = [*COMMAND, *arguments.argv]
    run_as_trainer(arguments.run, source=source, options=options, command=command)
    return 0
