"""Starts the ranks of a trainer on this machine, under torch's elastic agent.

Processes::

    deltawire run ── Supervisor ──▶ deltawire trainer ── elastic agent ──▶ rank 0, … rank N-1
    TrainingClient ── Popen ──────▶ train.client.host    (`run_ranks`)     (the same command)

A rank is the same command with the variables of `rank_environment`, so ``torchrun`` on several
machines, or another launcher, starts ranks as well. If a rank ends with an error, the agent kills
the others at once, and the supervisor starts all of them again: a step needs every rank. A process
also ends when its parent has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from deltawire.display import safe_line
from deltawire.errors import DeltawireError
from deltawire.runtime.memory import explaining_memory, kernel_kills, killed_by_kernel
from deltawire.runtime.supervisor import STOP_PATIENCE_S

LOST_GRACE_S = 3.0
"""A rank that lost another one ends this much later, so that the cause is reported first."""
WATCH_S = 1.0
_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux."""


class RankError(DeltawireError):
    """A rank of a trainer ended with an error; the exit code is that rank's."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code if code > 0 else 1


def rank_environment(
    rank: int, ranks: int, *, local_rank: int, address: str, port: int
) -> dict[str, str]:
    """Returns the variables that make ``deltawire trainer RUN_URL`` one rank of a trainer.

    ``address`` and ``port`` are where rank 0 listens, reachable from every rank.

    Example::

        environment = {**os.environ, **rank_environment(1, 2, local_rank=1, address=a, port=p)}
        subprocess.Popen([*COMMAND, "trainer", url], env=environment)
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(local_rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def is_rank() -> bool:
    """Returns whether a launcher started this process as one of several ranks."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def is_follower() -> bool:
    """Returns whether this process is a rank other than 0."""
    return is_rank() and os.environ["RANK"] != "0"


def run_ranks(command: Sequence[str], ranks: int, *, supervised: bool) -> None:
    """Starts ``ranks`` processes of ``command`` on this machine, and waits until all have ended.

    SIGTERM and SIGINT are passed on to them. Raises `RankError` with the first rank's error that is
    not the loss of another rank.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    class Agent(LocalElasticAgent):
        """Kills the other ranks once one has failed: they cannot finish a step without it."""

        def _stop_workers(self, worker_group: Any) -> None:
            del worker_group
            self._shutdown(signal.SIGKILL)

    if supervised:
        _stop_with_parent()
    place = "127.0.0.1"
    rendezvous = RendezvousParameters(
        "c10d", f"{place}:0", secrets.token_hex(8), 1, 1, local_addr=place
    )
    spec = WorkerSpec(
        role="trainer",
        local_world_size=ranks,
        # torch replaces ${local_rank} in arguments.
        entrypoint=command[0],
        args=tuple(word.replace("$", "$$") for word in command[1:]),
        rdzv_handler=get_rendezvous_handler(rendezvous),
        max_restarts=0,
        monitor_interval=0.1,
        local_addr=place,
    )
    kills = kernel_kills()
    with tempfile.TemporaryDirectory(prefix="deltawire-ranks-") as folder:
        logs = DefaultLogsSpecs(log_dir=folder)
        try:
            result = Agent(spec, logs, shutdown_timeout=int(STOP_PATIENCE_S)).run()
        except SignalException:
            return
    if result.is_failed():
        raise _first_error(result.failures, kills)


def _first_error(failures: dict[int, Any], kills: tuple[int, ...]) -> DeltawireError:
    """Returns the error of the rank that failed first: not of one that lost its peer, or that the
    agent ended after that. The kernel's counters were at ``kills`` when the ranks were started.

    A time is in whole seconds. Within one, the order of ``failures`` counts: the agent adds the
    ranks that it had to end last.
    """
    ordered = sorted(failures.items(), key=lambda item: item[1].timestamp)
    rank, failure = next((one for one in ordered if not _follows(one[1])), ordered[0])
    killed = killed_by_kernel(f"rank {rank} of the trainer", "trainer", kills)
    if killed is not None and failure.exitcode == -signal.SIGKILL:
        return killed
    if failure.exitcode < 0:
        reason = f" was ended by signal {-failure.exitcode} ({failure.signal_name()})"
    elif words := _words_of(failure):
        reason = f": {words.partition(': ')[2] or words}"
    else:
        reason = f" ended with exit code {failure.exitcode}"
    return RankError(f"rank {rank}{reason}", failure.exitcode)


def _follows(failure: Any) -> bool:
    """Returns whether a rank's end is a consequence of another one's."""
    return bool(
        failure.exitcode == -signal.SIGTERM or _words_of(failure).startswith("LostRankError")
    )


def _words_of(failure: Any) -> str:
    """Returns the class and the text of a rank's error, as torch's handler stored them; may be
    empty.
    """
    found = failure.error_file_data.get("message", "")
    return str(found.get("message", "") if isinstance(found, dict) else found)


@contextlib.contextmanager
def ending_at_once(supervised: bool) -> Iterator[None]:
    """Ends this process, if it is one of several ranks, as soon as the body fails.

    Threads of a rank may wait for data of ranks that have ended, and would delay the exit. The
    error is printed, and stored for the agent. A ``supervised`` rank does not outlive its agent.
    """
    if not is_rank():
        yield
        return
    if supervised:
        die_with_parent()
    try:
        with explaining_memory("the trainer", "trainer"):
            yield
    except Exception as error:
        _end_rank(error)


def _end_rank(error: Exception) -> None:
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from deltawire.train.parallel.ranks import LostRankError

    rank = os.environ["RANK"]
    if isinstance(error, LostRankError):
        time.sleep(LOST_GRACE_S)
    handler = get_error_handler()
    with contextlib.suppress(OSError):
        handler.initialize()
        handler.record_exception(error)
    if isinstance(error, DeltawireError):
        print(f"error: rank {rank}: {safe_line(str(error))}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(error.exit_code)
    sys.excepthook(type(error), error, error.__traceback__)
    sys.stderr.flush()
    os._exit(1)


def die_with_parent(*, at_once: bool = True) -> None:
    """Makes this process end once the process that started it has ended, even if it hangs.

    ``at_once`` also ends it when the thread that started it has ended: an agent's main thread.
    """
    parent = os.getppid()
    if at_once and sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=_when_orphaned, args=(parent, lambda: os._exit(1)), daemon=True).start()


def _stop_with_parent() -> None:
    """Makes the agent stop its ranks in order once the supervisor that started it has ended."""
    stop = (os.getppid(), lambda: os.kill(os.getpid(), signal.SIGTERM))
    threading.Thread(target=_when_orphaned, args=stop, daemon=True).start()


def _when_orphaned(parent: int, act: Any) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    act()
