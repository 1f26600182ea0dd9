"""Commands that run one process of a run: trainer, worker, evaluator and warm start."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import get_args

import msgspec

from deltawire.config import RunConfig, load_config, parse_config
from deltawire.errors import InputError
from deltawire.events import Role
from deltawire.runtime.process import Process
from deltawire.store import Bucket, open_bucket
from deltawire.wire.keys import valid_name

INTERRUPTED = 130


def _is_empty(folder: Path) -> bool:
    """Whether nothing is in a folder."""
    return not any(folder.iterdir())


def pin(cpus: str) -> None:
    """Run on these processors only, where the system supports it."""
    if not cpus:
        return
    try:
        wanted = {int(cpu) for cpu in cpus.split(",")}
    except ValueError as error:
        raise InputError(f"--cpus {cpus} is not a list of processors") from error
    if hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, wanted)
        except OSError as error:
            raise InputError(f"--cpus {cpus}: {error.strerror}") from error


def seeded(config: RunConfig, seed: int | None) -> RunConfig:
    """The configuration with another seed, if one is given."""
    return config if seed is None else msgspec.structs.replace(config, seed=seed)


def sampled_by(config: RunConfig, engine: str | None) -> RunConfig:
    """The configuration with another engine for its workers, if one is named.

    Raises `InputError` if the rest of the configuration does not support that engine.
    """
    if engine is None:
        return config
    values = msgspec.to_builtins(config)
    values["rollout"]["engine"] = engine
    return parse_config(values, source=f"--engine {engine}")


def refuse_memory(bucket: Bucket) -> None:
    """Raise `InputError` for a bucket that no other process can see."""
    if bucket.url.startswith("memory:"):
        raise InputError(
            "a memory bucket exists in one process only",
            hint="use a folder, or a store that every process can reach",
            run=bucket.url,
        )


def _process(arguments: argparse.Namespace, name: str, role: Role) -> Process:
    pin(arguments.cpus)
    bucket = open_bucket(arguments.run)
    refuse_memory(bucket)
    return Process(bucket, name, role, supervised=arguments.supervised)


def worker(arguments: argparse.Namespace) -> int:
    """``deltawire worker``: join a run."""
    name = arguments.id or _random_name()
    if not valid_name(name) or len(name) > 40:
        raise InputError(f"--id {name[:60]!r}: use at most 40 letters, digits, - and _")
    if name in get_args(Role):
        raise InputError(
            f"--id {name}: another process of the run has this name", hint="choose another"
        )
    process = _process(arguments, name, "worker")
    from deltawire.rl.rollout.worker import run_worker

    process.handle_signals()  # Not earlier: a signal may end the process while libraries load.
    with process.registered():
        report = _ignore if process.supervised else _print
        run_worker(process, patience_s=arguments.patience, report=report)
    return 0


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def _ignore(line: str) -> None:
    del line


def _random_name() -> str:
    host = "".join(c for c in socket.gethostname() if c.isalnum())[:20] or "worker"
    return f"{host}-{secrets.token_hex(3)}"


def trainer(arguments: argparse.Namespace) -> int:
    """``deltawire trainer``: start or continue a run's trainer."""
    if bool(arguments.config) != bool(arguments.model):
        raise InputError("--config and --model go together")
    source = None
    if arguments.config:
        config = seeded(load_config(Path(arguments.config)), arguments.seed)
        config = sampled_by(config, arguments.engine)
        source = (config, Path(arguments.model))
    process = _process(arguments, "trainer", "trainer")
    from deltawire.rl.trainer.trainer import run_trainer

    process.handle_signals()
    with process.registered():
        run_trainer(process, source)
    return 0


def evaluator(arguments: argparse.Namespace) -> int:
    """``deltawire evaluator``: measure held-out accuracy of a run's versions."""
    process = _process(arguments, "evaluator", "evaluator")
    from deltawire.rl.evaluate.evaluator import run_evaluator

    process.handle_signals()
    with process.registered():
        run_evaluator(process)
    return 0


def warm_start(arguments: argparse.Namespace) -> int:
    """``deltawire warm-start``: make the model directory that a run starts from.

    Returns 130 if it was interrupted before the directory was complete.
    """
    config = seeded(load_config(Path(arguments.config)), arguments.seed)
    out = Path(arguments.out)
    if not arguments.supervised and out.exists() and not (out.is_dir() and _is_empty(out)):
        raise InputError(f"{out} is there already", hint="choose another --out, or remove it")
    bucket = open_bucket(arguments.bucket or "memory:///")
    process = Process(bucket, "warm-start", "warm-start", supervised=arguments.supervised)
    from deltawire.rl.trainer.warm_start import run_warm_start

    process.handle_signals()
    with process.registered() if arguments.bucket else contextlib.nullcontext():
        return 0 if run_warm_start(process, config, out) else INTERRUPTED
