"""Runs of a trainer over ranks for measurements and tests: a run with enough groups, and ranks that
are started again and again, and killed or asked to stop at chosen points.

Ranks are forks of one server process, which imports torch once for all of them; otherwise they
start and end as under torch's elastic agent: once one has died, the others are killed.

    this process ── one line: a bucket's URL and its starts ──▶ server ── fork ──▶ ranks
                 ◀── one line: the exit codes of each start ──

The server runs this module as a script. It has one thread, and it ends with its stdin.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.ports import free_port
from benchmarks.runner import ROOT
from benchmarks.training.seeded_groups import seeded_group
from deltawire.config import parse_config
from deltawire.export.models import save_model
from deltawire.launch.processes import ChildOptions, lead_trainer, run_as_trainer
from deltawire.rl.control.challenges import nonce_of
from deltawire.rl.trainer import entry  # noqa: F401 - imported before forking
from deltawire.rl.trainer.bootstrap import start_run
from deltawire.store import Bucket, open_bucket
from deltawire.sync import read_history, read_manifest, read_run
from deltawire.sync.publish import commit, publisher, sharded
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.train.checkpoint_storage import BucketWriter
from deltawire.train.masters import MasterWeights
from deltawire.train.rank_agent import rank_environment
from deltawire.wire import keys
from deltawire.wire.coordination import Part
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.objects import encode_json
from deltawire.wire.rollouts import encode_group
from deltawire.wire.status import Challenge, Heartbeat, WorkerStatus

WORKER = "w0"
SECRET = "5e" * 16
PATIENCE_S = 240.0


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a trainer's ranks. Rank ``rank`` gets ``signal`` at ``point``, a name of
    `POINTS`, of its work on ``version``; with -1 none does."""

    ranks: int = 2
    rank: int = -1
    point: str = ""
    version: int = -1
    signal: int = signal.SIGKILL


class _Request(msgspec.Struct, frozen=True):
    """A line for the server."""

    url: str
    starts: list[Start]


class Point(NamedTuple):
    """A function in a rank's work: its owners and name, the version that a call is of, and whether
    a signal comes after the call instead of before."""

    owners: Sequence[Any]
    name: str
    version_of: Callable[..., int]
    after: bool


def _of_step(masters: MasterWeights, *_: Any) -> int:
    return masters.steps + 1


def _of_manifest(_: Any, manifest: Any, *__: Any) -> int:
    return int(manifest.version)


def _of_part(_: Any, version: int, *__: Any) -> int:
    return version


def _of_created_part(_: Any, __: str, part: Part) -> int:
    return part.version


def _of_save(writer: BucketWriter, *_: Any) -> int:
    return writer.version


def _of_encoding(writer: commit.VersionWriter, *_: Any) -> int:
    return writer.next_version


POINTS = {
    "gradients": Point([MasterWeights], "step", _of_step, after=False),
    "updated": Point([MasterWeights], "step", _of_step, after=True),
    "encoding": Point([commit.VersionWriter], "encode", _of_encoding, after=False),
    "part": Point([sharded.ShardPublisher], "_create_part", _of_created_part, after=True),
    "manifest": Point([sharded, publisher], "create_manifest", _of_manifest, after=False),
    "committed": Point([sharded, publisher], "create_manifest", _of_manifest, after=True),
    "waiting": Point([sharded.ShardPublisher], "_await_manifest", _of_part, after=False),
    "deleting": Point([sharded.ShardPublisher], "_delete_parts", _of_part, after=False),
    "save": Point([BucketWriter], "write_data", _of_save, after=False),
    "saved": Point([BucketWriter], "write_data", _of_save, after=True),
    "commit": Point([BucketWriter], "finish", _of_save, after=False),
}


def begin(
    folder: Path,
    *,
    versions: int,
    family: str = "qwen3",
    train: Mapping[str, Any] = {},
    reference: Mapping[str, Any] = {},
) -> Bucket:
    """A bucket with a run at version 0, and the groups of all its steps; ``train`` and
    ``reference`` are keys of the sections."""
    build = {
        "family": family, "hidden_size": 32, "layers": 1, "head_size": 16,
        "feed_forward_size": 48, "context": 64, "experts": 4,
    }  # fmt: skip
    config = parse_config(
        {
            "name": "ranks",
            "reference": dict(reference),
            "trust": {"rescore_share": 0.0},  # These log-probabilities are made up.
            "model": {"path": str(folder / "model")},
            "rollout": {"context": 64, "max_tokens": 32},
            "train": {
                "versions": versions, "groups_per_step": 2, "max_staleness": 1000,
                "checkpoint_every": 2, "max_tokens_per_batch": 64,
                "optimizer": {"learning_rate": 1e-3}, "schedule": {"warmup_steps": 1},
                **train,
            },
        },
        source="benchmark",
    )  # fmt: skip
    sizes = parse_config({"name": "m", "model": {"build": build}}, source="benchmark").model.build
    assert sizes is not None
    save_model(build_model(sizes, seed=0), byte_tokenizer(), folder / "model")
    bucket = open_bucket(str(folder / "bucket"), create=True)
    start_run(bucket, config, folder / "model")
    challenge = Challenge(worker=WORKER, secret=SECRET)
    bucket.put(keys.challenge(WORKER), encode_json(challenge))
    for number in range(2 * versions):
        bucket.put(
            keys.rollout(WORKER, number),
            encode_group(seeded_group(number, nonce=nonce_of(SECRET, 0, number))),
        )
    worker = WorkerStatus(phase="sampling", version=0, digest="", stored=2 * versions)
    heartbeat = Heartbeat(
        process=WORKER, role="worker", nonce="n", lease=0, supervised=True, host="h", pid=1,
        started_at=0.0, at=time.time(), number=0, doing="sample", quiet_s=0.0, allowed_s=5.0,
        worker=worker,
    )  # fmt: skip
    bucket.put(keys.heartbeat(WORKER), encode_json(heartbeat))
    return bucket


def digests(bucket: Bucket) -> list[str]:
    """The digest of each version, from 0 on."""
    run = read_run(bucket)
    first = read_manifest(bucket, run, 0)
    return [one.digest for one in (first, *read_history(bucket, run)) if one is not None]


def metadata_of(bucket: Bucket) -> list[CommitMetadata]:
    """Returns the commit metadata of each version after 0."""
    history = read_history(bucket, read_run(bucket))
    return [CommitMetadata.of(one.metadata, run="", version=one.version) for one in history]


def environment() -> dict[str, str]:
    """The environment of a process that starts ranks and is no rank itself, with one thread."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONPATH": path}


class RankServer:
    """The process whose forks are ranks; every run of this process shares one (`shared`).

    Example::

        server = RankServer()
        codes = server.run(bucket.url, [Start(ranks=2)])
        server.close()
    """

    _shared: RankServer | None = None

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.training.rank_runs"],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    @classmethod
    def shared(cls) -> RankServer:
        """Returns the server of this process, which ends with it."""
        if cls._shared is None:
            cls._shared = cls()
            atexit.register(cls._shared.close)
        return cls._shared

    def run(self, url: str, starts: Sequence[Start]) -> list[list[int]]:
        """Starts ranks one time after another; returns the exit codes of each start.

        Raises `AssertionError` if the server died or a rank did not end as its start says.
        """
        before = self._errors.seek(0, os.SEEK_END)
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        pipe_in.write(msgspec.json.encode(_Request(url, list(starts))) + b"\n")
        pipe_in.flush()
        line = pipe_out.readline()
        self._errors.seek(before)
        said = self._errors.read().decode(errors="replace")[-4000:]
        assert line, f"the server of ranks died: {said}"
        found = msgspec.json.decode(line, type=list[list[int]])
        for start, codes in zip(starts, found, strict=True):
            killed = start.rank >= 0 and start.signal == signal.SIGKILL
            expected = -signal.SIGKILL if killed else 0
            assert codes[max(start.rank, 0)] == expected, (start, codes, said)
        return found

    def close(self) -> None:
        """Ends the server."""
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                pipe.close()
        self._process.wait()


def run_starts(bucket: Bucket, starts: Sequence[Start]) -> list[list[int]]:
    """Starts ranks one time after another, as forks of this process's server; see
    `RankServer.run`."""
    return RankServer.shared().run(bucket.url, starts)


def _strike(start: Start) -> None:
    """Lets this process get a signal at a point of its work."""
    owners, name, version_of, after = POINTS[start.point]
    for owner in owners:
        setattr(owner, name, _struck(getattr(owner, name), version_of, start, after=after))


def _struck(
    honest: Callable[..., Any], version_of: Callable[..., int], start: Start, *, after: bool
) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        due = version_of(*arguments) == start.version
        if due and not after:
            os.kill(os.getpid(), start.signal)
        result = honest(*arguments, **named)
        if due and after:
            os.kill(os.getpid(), start.signal)
        return result

    return call


def _run_rank(number: int, port: int, url: str, start: Start) -> None:
    """One rank; never returns."""
    code = 1
    try:
        if start.rank == number:
            _strike(start)
        if start.ranks == 1:
            lead_trainer(url, None, ChildOptions())
        else:
            os.environ.update(
                rank_environment(
                    number, start.ranks, local_rank=number, address="127.0.0.1", port=port
                )
            )
            run_as_trainer(url, source=None, options=ChildOptions())
        code = 0
    finally:
        os._exit(code)


def _run_start(url: str, start: Start) -> list[int]:
    port, children = free_port(), []
    for number in range(start.ranks):
        if (pid := os.fork()) == 0:
            _run_rank(number, port, url, start)
        children.append(pid)
    codes: dict[int, int] = {}
    deadline = time.monotonic() + PATIENCE_S
    while len(codes) < len(children):
        for pid in set(children) - codes.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if any(codes.values()) or time.monotonic() > deadline:
            for pid in set(children) - codes.keys():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[pid] for pid in children]


def _serve() -> None:
    """Answers requests until stdin closes. Ranks print to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    gc.freeze()  # A rank that collects garbage would copy every page of the libraries.
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=_Request)
        codes = [_run_start(request.url, one) for one in request.starts]
        answers.write(msgspec.json.encode(codes) + b"\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
