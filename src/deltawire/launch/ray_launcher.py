"""Starts the processes of a run on a Ray cluster: ``deltawire run --launcher ray``.

::

    deltawire run ── Supervisor ── RayLauncher            one placement group, a bundle a process,
                                       │ actor per bundle   one more for each further trainer rank
                                       ▼
                                   _Host (Ray actor) ── starts, signals, reaps ──▶ worker
                                       │
    out/logs/NAME.log ◀── pump thread ─┘ output and exit code

Ray decides on which machine a process runs, and gives it its GPU. Everything else is as on one
machine: processes share only the bucket, Ray carries no weights and no rollouts, and a process that
dies or hangs, or whose actor or machine is gone, is started again by the rules of
`deltawire.runtime.supervisor`. Ray restarts no actor itself (``max_restarts=0``).

Each rank of a trainer has an actor, on the machines that have room. Rank 0's actor chooses where
the ranks meet; if one ends with an error, the others are killed, and all start again.

A child that signs gets its private key over Ray's connections, in a file of its machine that only
this user reads and that is removed when the child has ended. They are encrypted if the cluster uses
TLS (RAY_USE_TLS).

A pump thread of each child waits for its actor; nothing else does. If this process dies, Ray ends
its actors, and their children notice that their parent is gone and stop.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from deltawire.config import RunConfig
from deltawire.errors import InputError
from deltawire.runtime.children import ENVIRONMENT, HEAP, ChildProcess, LocalLauncher
from deltawire.runtime.memory import MemoryWatch
from deltawire.train.rank_agent import rank_environment

FORWARDED = ("OMP_", "MKL_", "GLOO_", "NCCL_")
"""Beginnings of the variables that are passed on."""
FORWARDED_NAMES = frozenset(
    {
        *("PYTHONPATH", "HF_HUB_OFFLINE", "DELTAWIRE_DURABLE", "DELTAWIRE_MACHINE_POLICY"),
        *(
            "DELTAWIRE_TRUSTED_MODULES",
            "DELTAWIRE_DATA_DIRS",
            "DELTAWIRE_ALLOWED_URLS",
            "DELTAWIRE_SIMD",
        ),
        *("DELTAWIRE_BLOB_CACHE", "DELTAWIRE_BLOB_CACHE_GB", "DELTAWIRE_MAX_OUTAGE"),
        *("DELTAWIRE_VLLM_PYTHON", "DELTAWIRE_VLLM_ARGS"),
        *("DELTAWIRE_SGLANG_PYTHON", "DELTAWIRE_SGLANG_ARGS"),
    }
)
"""Names of further ones. Credentials are not passed on: each machine has its own, and a gateway's
tokens and its replicas' key are for no process of a run."""
PLACEMENT_S = 300.0
"""How long a cluster may take to make room; one that grows by itself needs minutes."""
OUTPUT_S = 1.0
MAX_OUTPUT = 1 << 20
"""Bytes of a process's output that wait in its actor; older ones are left out."""
LOST = -int(signal.SIGKILL)
"""The exit code of a process whose actor or machine is gone."""

FIRST_PORT, PORTS = 20_000, 12_000
"""Where ranks meet: above the ports of Ray's workers, below those that systems give clients."""
KEY_OPTION, KEY_FILE = "--key", "@key"
TRAINER = "trainer"

Bundle = dict[str, float]


def bundles_of(config: RunConfig, *, gpus: bool) -> dict[str, Bundle]:
    """Returns what each process of a run asks of the cluster, by the process's name.

    A process takes ``threads`` CPUs, and a GPU if the cluster has ``gpus`` and its device is not
    the CPU. Each rank of the trainer has a bundle (`rank_name`).
    """
    ranks = range(config.train.ranks)
    devices = {rank_name(rank): config.device_of("trainer") for rank in ranks}
    for number in range(config.rollout.workers):
        devices[f"w{number}"] = config.device_of("worker")
    if config.reference_mode == "process":
        devices["reference"] = config.reference.device or config.device
    if config.evaluate.every:
        devices["evaluator"] = config.device_of("evaluator")
    return {
        name: {
            "CPU": float(config.threads),
            **({"GPU": 1.0} if gpus and device not in ("cpu", "mps") else {}),
        }
        for name, device in devices.items()
    }


def rank_name(rank: int) -> str:
    """Returns the name of the bundle of a trainer's rank; rank 0 has that of the trainer."""
    return f"{TRAINER}.{rank}" if rank else TRAINER


def without_key(command: Sequence[str]) -> tuple[list[str], bytes]:
    """Returns a child's command with `KEY_FILE` in place of its private key's path, and the key's
    bytes; empty if the child signs nothing."""
    words = list(command)
    if KEY_OPTION not in words[:-1]:
        return words, b""
    place = words.index(KEY_OPTION) + 1
    data = Path(words[place]).read_bytes()
    words[place] = KEY_FILE
    return words, data


class _Host:
    """The actor's side: one child process, its output and its end. Calls come from threads."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output: deque[bytes] = deque()
        self._kept = 0
        self._news = threading.Condition()
        self._code: int | None = None
        self._keys: tempfile.TemporaryDirectory[str] | None = None

    def address(self) -> str:
        """Returns the address of this machine, for ranks to meet."""
        return str(_ray().util.get_node_ip_address())

    def start(
        self, command: list[str], environment: dict[str, str], folder: str, key: bytes = b""
    ) -> int:
        """Starts the child; returns its process id. ``key`` is written to a file, whose path
        replaces `KEY_FILE` in the command."""
        if key:
            self._keys = tempfile.TemporaryDirectory(prefix="deltawire-key-")  # Mode 0700.
            path = Path(self._keys.name) / "role.key"
            path.touch(mode=0o600)
            path.write_bytes(key)
            command = [str(path) if word == KEY_FILE else word for word in command]
        self._process = subprocess.Popen(  # noqa: S603  (our own interpreter and module)
            [sys.executable, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **environment},
            cwd=folder if os.path.isdir(folder) else None,  # noqa: PTH112
        )
        threading.Thread(target=self._wait, daemon=True).start()
        return self._process.pid

    def _wait(self) -> None:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        reader = threading.Thread(target=self._read, args=(process.stdout.fileno(),), daemon=True)
        reader.start()
        # Waited for but not reaped: no other process can have its id, or its group's, yet.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        self.kill()  # Processes that the child left in its group would keep its output open.
        code = process.wait()
        reader.join()
        process.stdout.close()
        if self._keys is not None:
            self._keys.cleanup()
        with self._news:
            self._code = code
            self._news.notify_all()

    def _read(self, file: int) -> None:
        while data := os.read(file, 1 << 16):
            with self._news:
                self._output.append(data)
                self._kept += len(data)
                while self._kept > MAX_OUTPUT:
                    self._kept -= len(self._output.popleft())
                self._news.notify_all()

    def output(self, wait_s: float) -> tuple[bytes, int | None]:
        """Waits for output or the end; returns both, the exit code only after all output."""
        with self._news:
            if not self._output and self._code is None:
                self._news.wait(wait_s)
            data, self._kept = b"".join(self._output), 0
            self._output.clear()
            return data, self._code

    def stop(self) -> None:
        """Sends the child SIGTERM."""
        if self._process is not None and self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kills the child's group."""
        if self._process is not None and self._code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


class RayChild:
    """A child in an actor; see `deltawire.runtime.children.ChildProcess`."""

    memory: MemoryWatch | None = None
    """Unknown: the process may be on another machine."""

    def __init__(
        self,
        actor: Any,
        command: Sequence[str],
        log: Path,
        *,
        environment: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self._actor = actor
        self._found: int | None = None
        self._log = log
        self._environment = environment
        self._asked = False
        self._pump = threading.Thread(
            target=self._carry, args=(list(command),), name=f"ray-{log.stem}", daemon=True
        )
        self._pump.start()

    def _carry(self, command: list[str]) -> None:
        ray = _ray()
        forwarded = {name: value for name, value in os.environ.items() if _is_forwarded(name)}
        code: int | None = None
        with self._log.open("ab", buffering=0) as log:
            try:
                variables = {**HEAP, **forwarded, **ENVIRONMENT, **self._environment()}
                words, key = without_key(command)
                started = self._actor.start.remote(words, variables, str(Path.cwd()), key)
                self.pid = ray.get(started)
                if self._asked:
                    self.ask_to_stop()
                while code is None:
                    data, code = ray.get(self._actor.output.remote(OUTPUT_S))
                    log.write(data)
            except (ray.exceptions.RayError, OSError, ValueError) as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                log.write(f"the process's Ray actor is gone: {reason}\n".encode())
                code = LOST
        _end(self._actor)
        self._found = code

    def ended(self) -> bool:
        """See `ChildProcess.ended`."""
        self.returncode = self._found
        return self.returncode is not None

    def ask_to_stop(self) -> None:
        """See `ChildProcess.ask_to_stop`; a child that has no place yet stops once it has one."""
        self._asked = True
        self._actor.stop.remote()

    def kill(self) -> None:
        """See `ChildProcess.kill`: the actor ends too."""
        self._actor.kill.remote()
        threading.Timer(2.0, _end, (self._actor,)).start()

    def join(self) -> None:
        """Waits for the thread of an ended child."""
        self._pump.join(timeout=30)


class RayRanks:
    """The ranks of a trainer, an actor each, as one child. If one ends with an error, the others
    are killed at once: they cannot finish a step without it."""

    memory: MemoryWatch | None = None

    def __init__(self, actors: Sequence[Any], command: Sequence[str], log: Path) -> None:
        ray = _ray()
        self.returncode: int | None = None
        self._failed: int | None = None
        place = Future[str]()
        # If the port is taken, rank 0 ends with an error, and the next start draws another one.
        port = FIRST_PORT + secrets.randbelow(PORTS)

        def environment(rank: int) -> dict[str, str]:
            if rank == 0:
                try:
                    place.set_result(ray.get(actors[0].address.remote()))
                except BaseException as error:
                    place.set_exception(OSError(f"rank 0 has no place: {error}"))
                    raise
            # Ray shows each rank its own GPU only.
            return rank_environment(
                rank, len(actors), local_rank=0, address=place.result(), port=port
            )

        self.children = [
            RayChild(actor, command, log, environment=partial(environment, rank))
            for rank, actor in enumerate(actors)
        ]

    @property
    def pid(self) -> int:
        """The process id of rank 0 on its machine."""
        return self.children[0].pid

    def ended(self) -> bool:
        """See `ChildProcess.ended`: its exit code is that of the rank that failed first."""
        ended = [child for child in self.children if child.ended()]
        failed = [child.returncode for child in ended if child.returncode]
        if failed and self._failed is None:
            self._failed = failed[0]
            self._kill_rest()
        if len(ended) < len(self.children):
            return False
        self.returncode = self._failed or 0
        return True

    def _kill_rest(self) -> None:
        for child in self.children:
            if not child.ended():
                child.kill()

    def ask_to_stop(self) -> None:
        """See `ChildProcess.ask_to_stop`."""
        for child in self.children:
            child.ask_to_stop()

    def kill(self) -> None:
        """See `ChildProcess.kill`."""
        self._kill_rest()

    def join(self) -> None:
        """Waits for the threads of ended children."""
        for child in self.children:
            child.join()


def _is_forwarded(name: str) -> bool:
    return name in FORWARDED_NAMES or name.startswith(FORWARDED)


def _end(actor: Any) -> None:
    with contextlib.suppress(Exception):  # It is gone, or Ray is.
        _ray().kill(actor)


class RayLauncher:
    """Starts the processes of a run in the bundles of one placement group.

    ``bundles`` are what each needs, by name; a process of another name starts on this machine. A
    cluster without ``grows`` is refused at once if it is too small. With ``leaves``, `close`
    also leaves the cluster, and ends it if it was started for this run. `open` takes the cluster
    that this process has joined, or that Ray finds (``RAY_ADDRESS``, or one on this machine), or
    starts one.

    Raises `InputError` without Ray, and if the cluster makes no room within ``PLACEMENT_S``.

    Example::

        launcher = RayLauncher.open(config)
        supervisor = Supervisor(bucket, logs, launcher=launcher)
    """

    def __init__(self, bundles: Mapping[str, Bundle], *, grows: bool, leaves: bool) -> None:
        ray = _ray()
        self._leaves = leaves
        self._places = {name: number for number, name in enumerate(bundles)}
        self._bundles = dict(bundles)
        self._local = LocalLauncher()
        self._children: list[RayChild | RayRanks] = []
        _require_room(bundles, grows=grows)
        self._group: Any = ray.util.placement_group(list(bundles.values()), strategy="PACK")
        if not self._group.wait(PLACEMENT_S):
            self.close()
            raise InputError(
                f"the Ray cluster made no room for {_said(bundles)} within {PLACEMENT_S:.0f} s",
                hint="free it, add machines, or lower rollout.workers or threads",
            )

    @classmethod
    def open(cls, config: RunConfig) -> RayLauncher:
        """Connects to a cluster, or starts one, and reserves what a run needs."""
        ray = _ray()
        joined = ray.is_initialized()
        asked = sum(bundle["CPU"] for bundle in bundles_of(config, gpus=False).values())
        grows = joined or _connect(int(asked))
        gpus = ray.cluster_resources().get("GPU", 0) > 0
        try:
            return cls(bundles_of(config, gpus=gpus), grows=grows, leaves=not joined)
        except InputError:
            if not joined:
                ray.shutdown()
            raise

    def start(self, name: str, command: Sequence[str], log: Path) -> ChildProcess:
        """See `deltawire.runtime.children.Launcher.start`."""
        if name not in self._places:
            return self._local.start(name, command, log)
        child: RayChild | RayRanks
        ranks = [one for one in self._places if one.startswith(f"{TRAINER}.")]
        if name == TRAINER and ranks:
            actors = [self._actor(one) for one in (TRAINER, *ranks)]
            child = RayRanks(actors, command, log)
        else:
            child = RayChild(self._actor(name), command, log)
        self._children.append(child)
        return child

    def _actor(self, name: str) -> Any:
        """Makes the actor of a bundle."""
        ray = _ray()
        place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=self._places[name]
        )
        bundle = self._bundles[name]
        return (
            ray.remote(_Host)
            .options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0.0),
                max_concurrency=4,
                max_restarts=0,
                scheduling_strategy=place,
            )
            .remote()
        )

    def close(self) -> None:
        """Ends the actors and the placement group, and a cluster that `open` started."""
        ray = _ray()
        for child in self._children:
            if not child.ended():
                child.kill()
            child.join()
        self._children.clear()
        if self._group is not None and ray.is_initialized():
            ray.util.remove_placement_group(self._group)
            self._group = None
        if self._leaves and ray.is_initialized():
            ray.shutdown()


def _ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise InputError(
            "--launcher ray needs the package ray", hint="pip install 'deltawire[ray]'"
        ) from error
    return ray


def _connect(cpus: int) -> bool:
    """Joins the cluster that Ray finds, or starts one on this machine; returns whether it may grow.

    A new one counts at least ``cpus``: processes of a run share processors as without Ray.
    """
    ray = _ray()
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    try:
        try:
            ray.init(address="auto", **options)
            return True
        except ConnectionError:
            cpus = max(cpus, os.cpu_count() or 1)
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, **options)
            return False
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise InputError(
            f"cannot use Ray: {(str(error).strip().splitlines() or [type(error).__name__])[0]}",
            hint="see RAY_ADDRESS, or start a cluster with ray start --head",
        ) from error


def _require_room(bundles: Mapping[str, Bundle], *, grows: bool) -> None:
    """Raises `InputError` at once if the cluster is too small and cannot grow."""
    there = _ray().cluster_resources()
    for kind in ("CPU", "GPU"):
        asked = sum(bundle.get(kind, 0.0) for bundle in bundles.values())
        if asked > there.get(kind, 0.0) and not grows:
            raise InputError(
                f"the run asks for {_said(bundles)}, and this machine has "
                f"{there.get(kind, 0.0):g} {kind}",
                hint="lower rollout.workers or threads, set evaluate.every = 0, or use a larger "
                "cluster (RAY_ADDRESS)",
            )


def _said(bundles: Mapping[str, Bundle]) -> str:
    totals = {kind: sum(b.get(kind, 0.0) for b in bundles.values()) for kind in ("CPU", "GPU")}
    room = " and ".join(f"{total:g} {kind}" for kind, total in totals.items() if total)
    return f"{room} in {len(bundles)} bundles"
