"""Runs one process of a run: a worker, the trainer, the evaluator, or a warm start.

A process imports its heavy libraries after checking its arguments and before installing signal
handlers: until then a signal may simply end it, because it has not begun any work.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec

from deltawire.config import RunConfig, load_config, parse_config
from deltawire.display import safe_line
from deltawire.errors import InputError
from deltawire.events import Role
from deltawire.runtime.process import Process
from deltawire.store import Bucket, open_bucket
from deltawire.wire.keys import valid_name

MAX_NAME = 40


@dataclass(frozen=True)
class ChildOptions:
    """Start options of a process: under a supervisor or by hand, and its processors."""

    supervised: bool = False
    cpus: str = ""


def pin(cpus: str) -> None:
    """Pin this process to processors where the system can; ``cpus`` is a list such as ``0,1``."""
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


def read_config(path: Path, *, seed: int | None = None, engine: str | None = None) -> RunConfig:
    """Load a configuration and override its seed and its workers' engine if given.

    Raises `InputError` if the rest of the configuration is invalid with that engine.
    """
    config = load_config(path)
    if seed is not None:
        config = msgspec.structs.replace(config, seed=seed)
    if engine is None:
        return config
    values = msgspec.to_builtins(config)
    values["rollout"]["engine"] = engine
    return parse_config(values, source=f"--engine {engine}")


def refuse_memory(bucket: Bucket) -> None:
    """Raise `InputError` for a bucket that no other process can read."""
    if bucket.url.startswith("memory:"):
        raise InputError(
            "a memory bucket cannot be shared with other processes",
            hint="use a folder, or a store that every process can reach",
            run=bucket.url,
        )


def stay_off_the_hub() -> None:
    """Keep model libraries from downloading, unless the machine's owner set the variable already.

    Models and configurations come from a bucket, which must not make this machine download files
    or kernels. Call this before importing the libraries, because they read the variable on import.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _open_process(location: str, name: str, role: Role, options: ChildOptions) -> Process:
    stay_off_the_hub()
    pin(options.cpus)
    bucket = open_bucket(location)
    refuse_memory(bucket)
    return Process(bucket, name, role, supervised=options.supervised)


def join_as_worker(location: str, *, name: str, patience_s: float, options: ChildOptions) -> None:
    """Sample for a run until it ends, under ``name`` or a generated one."""
    name = name or _generated_name()
    if not valid_name(name) or len(name) > MAX_NAME:
        raise InputError(f"--id {name[:60]!r}: use at most {MAX_NAME} letters, digits, - and _")
    if name in get_args(Role):
        raise InputError(
            f"--id {name}: this is the name of another process of the run", hint="choose another"
        )
    process = _open_process(location, name, "worker", options)
    from deltawire.rl.rollout.worker import run_worker

    process.handle_signals()
    with process.registered():
        log = _log_nothing if process.supervised else _log
        run_worker(process, patience_s=patience_s, report=log)


def _log(line: str) -> None:
    print(safe_line(line), file=sys.stderr, flush=True)  # noqa: T201


def _log_nothing(line: str) -> None:
    del line


def _generated_name() -> str:
    host = "".join(c for c in socket.gethostname() if c.isalnum())[:20] or "worker"
    return f"{host}-{secrets.token_hex(3)}"


def run_as_trainer(
    location: str, *, source: tuple[RunConfig, Path] | None, options: ChildOptions
) -> None:
    """Start the run of ``source`` (a configuration and a model directory), or continue one."""
    process = _open_process(location, "trainer", "trainer", options)
    from deltawire.rl.trainer.trainer import run_trainer

    process.handle_signals()
    with process.registered():
        run_trainer(process, source)


def run_as_evaluator(location: str, *, options: ChildOptions) -> None:
    """Measure the held-out accuracy of a run's versions until it ends."""
    process = _open_process(location, "evaluator", "evaluator", options)
    from deltawire.rl.evaluate.evaluator import run_evaluator

    process.handle_signals()
    with process.registered():
        run_evaluator(process)


def make_model(config: RunConfig, out: Path, *, bucket: str, supervised: bool) -> bool:
    """Make the model directory that a run starts from; returns False if it was interrupted.

    Progress is recorded in ``bucket`` unless that is empty.
    """
    if not supervised and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(f"{out} exists already", hint="choose another --out, or remove it")
    stay_off_the_hub()
    progress = open_bucket(bucket or "memory:///")
    process = Process(progress, "warm-start", "warm-start", supervised=supervised)
    from deltawire.rl.trainer.warm_start import run_warm_start

    process.handle_signals()
    with process.registered() if bucket else contextlib.nullcontext():
        return run_warm_start(process, config, out)
