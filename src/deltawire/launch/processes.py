"""Runs one process of a run: a worker, the trainer, the evaluator, or a warm start.

A process imports its heavy libraries after checking its arguments and before installing signal
handlers: until then a signal ends it at once, because it has not begun any work.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import msgspec

from deltawire.config import RunConfig, check_config, parse_config, read_values
from deltawire.config.machine import give_data, give_urls
from deltawire.config.tasks import data_paths, server_urls
from deltawire.display import safe_line
from deltawire.errors import CorruptError, InputError
from deltawire.events import Role
from deltawire.launch.role_keys import read_signer
from deltawire.launch.shapes import find_profile, shaped_config
from deltawire.runtime.imports import importing
from deltawire.runtime.process import Process, open_run
from deltawire.runtime.signed_bucket import grant_role
from deltawire.runtime.trusted import ANY, ReaderTrust, owned_run, trusted
from deltawire.store import Bucket, open_bucket
from deltawire.train.rank_agent import ending_at_once, is_follower, is_rank, run_ranks
from deltawire.wire.keys import valid_name
from deltawire.wire.roles import TRAINER_ROLE, Pin, role_of
from deltawire.wire.seal import Signer

MAX_NAME = 40


@dataclass(frozen=True)
class ChildOptions:
    """Start options of a process: under a supervisor or by hand, its processors, the file of its
    private key in a signed run, and its requirements as a reader."""

    supervised: bool = False
    cpus: str = ""
    key: str = ""
    trust: ReaderTrust = ANY


def pin(cpus: str) -> None:
    """Pins this process to processors where the system can; ``cpus`` is a list such as ``0,1``."""
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


def read_config(
    path: Path, *, seed: int | None = None, engine: str | None = None, shape: str = ""
) -> RunConfig:
    """Loads a configuration, and overrides its seed and its workers' engine if given.

    This process and its children may read the data that it names.

    ``shape`` names the training shape, or the file of its profile, that the run starts from.
    Raises `InputError` if the rest of the configuration is invalid with these.
    """
    values = read_values(path)
    if shape:
        config = shaped_config(values, find_profile(shape), source=str(path))
    else:
        config = check_config(values, source=str(path))
    give_data(data_paths(config))
    give_urls(server_urls(config))
    if seed is not None:
        config = msgspec.structs.replace(config, seed=seed)
    if engine is None:
        return config
    values = msgspec.to_builtins(config)
    values["rollout"]["engine"] = engine
    return parse_config(values, source=f"--engine {engine}")


def refuse_memory(bucket: Bucket) -> None:
    """Raises `InputError` for a bucket that no other process can read."""
    if bucket.url.startswith("memory:"):
        raise InputError(
            "a memory bucket cannot be shared with other processes",
            hint="use a folder, or a store that every process can reach",
            run=bucket.url,
        )


def stay_off_the_hub() -> None:
    """Keeps model libraries from downloading, unless the machine's owner set the variable already.

    Models and configurations come from a bucket, which must not make this machine download files
    or kernels. Call this before importing the libraries, because they read the variable on import.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def open_process(
    location: str,
    name: str,
    role: Role,
    options: ChildOptions,
    *,
    signer: Signer | None = None,
    pid: int | None = None,
) -> Process:
    """Opens a process that signs with ``signer``, by default the key of its options.

    Raises `InputError` if the run is signed and that is not the key granted to the process.
    """
    stay_off_the_hub()
    pin(options.cpus)
    bucket = open_bucket(location)
    refuse_memory(bucket)
    signer = signer or read_signer(options.key)
    signed = trusted(bucket, options.trust, signer=signer, role=role_of(name))
    signed.check_writer()
    return Process(signed, name, role, supervised=options.supervised, pid=pid)


def join_as_worker(location: str, *, name: str, patience_s: float, options: ChildOptions) -> None:
    """Samples for a run until it ends, under ``name`` or a generated one."""
    name = name or _generated_name()
    if not valid_name(name) or len(name) > MAX_NAME:
        raise InputError(f"--id {name[:60]!r}: use at most {MAX_NAME} letters, digits, - and _")
    if name in get_args(Role):
        raise InputError(
            f"--id {name}: this is the name of another process of the run", hint="choose another"
        )
    process = open_process(location, name, "worker", options)
    with importing():
        from deltawire.rl.rollout.worker import run_worker

    with process.running():
        log = _log_nothing if process.supervised else _log
        run_worker(process, patience_s=patience_s, report=log)


def join_as_learner(location: str, *, name: str, options: ChildOptions) -> None:
    """Makes groups of served answers for a run until it ends, under ``name``."""
    if not valid_name(name) or len(name) > MAX_NAME or name in get_args(Role):
        raise InputError(f"--id {name[:60]!r}: use at most {MAX_NAME} letters, digits, - and _")
    process = open_process(location, name, "worker", options)
    with importing():
        from deltawire.live.learning.learner import run_learner

    with process.running():
        run_learner(process, report=_log_nothing if process.supervised else _log)


def _log(line: str) -> None:
    print(safe_line(line), file=sys.stderr, flush=True)  # noqa: T201


def _log_nothing(line: str) -> None:
    del line


def _generated_name() -> str:
    host = "".join(c for c in socket.gethostname() if c.isalnum())[:20] or "worker"
    return f"{host}-{secrets.token_hex(3)}"


def run_as_trainer(
    location: str,
    *,
    source: tuple[RunConfig, Path] | None,
    options: ChildOptions,
    command: Sequence[str] = (),
) -> None:
    """Starts the run of ``source`` (a configuration and a model directory), or continues one.

    A process without a launcher whose run has several ranks starts them on this machine with
    ``command``, its own command line, and waits for them. Raises `RankError` with the error of the
    first rank that failed.
    """
    if not is_rank():
        ranks = _ranks_of(location, source)
        if ranks > 1:
            run_ranks(command, ranks, supervised=options.supervised)
            return
    with ending_at_once(options.supervised):
        if is_follower():
            _follow_trainer(location, options)
        else:
            lead_trainer(location, source, options)


def _ranks_of(location: str, source: tuple[RunConfig, Path] | None) -> int:
    """Returns the number of ranks that the run's trainer is configured to have; 1 if there is no
    run that can be read, which the process then refuses.
    """
    if source is not None:
        return source[0].train.ranks
    try:
        return open_run(open_bucket(location))[1].train.ranks
    except (InputError, CorruptError):
        return 1


def lead_trainer(
    location: str, source: tuple[RunConfig, Path] | None, options: ChildOptions
) -> None:
    """Runs rank 0 of a trainer, or its only process; see `run_as_trainer`."""
    signer, run_id = read_signer(options.key), ""
    if signer is not None:
        bucket = open_bucket(location)
        pin = owned_run(bucket, signer, options.trust.pin)
        grant_role(bucket, signer, run_id=pin.run_id, role=TRAINER_ROLE, public_key=pin.public_key)
        options = replace(options, trust=replace(options.trust, pin=pin))
        run_id = pin.run_id
    # The supervisor started this rank's parent, and knows no other process id.
    parent = os.getppid() if is_rank() and options.supervised else None
    process = open_process(location, "trainer", "trainer", options, signer=signer, pid=parent)
    with importing():
        from deltawire.rl.trainer.entry import run_trainer

    with process.running():
        run_trainer(process, source, signer=signer, run_id=run_id)


def _follow_trainer(location: str, options: ChildOptions) -> None:
    """Runs a rank other than 0: it has no name, no lease and no heartbeat in the run."""
    signer, opened = read_signer(options.key), list[Process]()
    stay_off_the_hub()
    pin(options.cpus)
    with importing():
        from deltawire.rl.trainer.entry import follow_trainer

    def open_it(run_id: str) -> Bucket:
        trust = options.trust
        if signer is not None:
            trust = replace(trust, pin=Pin(signer.public_key, run_id))
        own = replace(options, trust=trust, cpus="")
        opened.append(open_process(location, "trainer", "trainer", own, signer=signer))
        signals.enter_context(opened[0].handling_signals())
        return opened[0].bucket

    with contextlib.ExitStack() as signals:
        follow_trainer(open_it, stopping=lambda: opened[0].stopping, signer=signer)


def run_as_evaluator(location: str, *, options: ChildOptions) -> None:
    """Measures the held-out accuracy of a run's versions until it ends."""
    process = open_process(location, "evaluator", "evaluator", options)
    with importing():
        from deltawire.live.release.candidate_estimate import CandidateEstimator
        from deltawire.rl.evaluate.evaluator import run_evaluator

    with process.running():
        run_evaluator(process, CandidateEstimator)


def run_as_reference(location: str, *, options: ChildOptions) -> None:
    """Scores a run's groups with its reference until it ends."""
    process = open_process(location, "reference", "reference", options)
    with importing():
        from deltawire.rl.reference.process import run_reference

    with process.running():
        run_reference(process)


def make_model(config: RunConfig, out: Path, *, bucket: str, options: ChildOptions) -> bool:
    """Makes the model directory that a run starts from; returns False if it was interrupted.

    Progress is recorded in ``bucket`` unless that is empty.
    """
    if not options.supervised and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(f"{out} exists already", hint="choose another --out, or remove it")
    if bucket:
        process = open_process(bucket, "warm-start", "warm-start", options)
    else:
        stay_off_the_hub()
        progress = open_bucket("memory:///")
        process = Process(progress, "warm-start", "warm-start", supervised=options.supervised)
    with importing():
        from deltawire.rl.trainer.warm_start import run_warm_start

    with process.running() if bucket else process.handling_signals():
        return run_warm_start(process, config, out)
