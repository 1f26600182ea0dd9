"""Joins this process to the other ranks of its trainer, as a launcher started them.

A launcher (``torchrun``, ``deltawire run``, Ray) gives each process ``RANK``, ``WORLD_SIZE``,
``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``. A process without them is the only rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from deltawire.errors import InputError, ResyncError, RetryError

TIMEOUT = timedelta(hours=1)
"""How long a rank waits for another one. Closed connections reveal at once that a rank has ended;
the supervisor's watchdog kills one that hangs."""
JOIN_TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others to start."""


class LostRankError(ResyncError):
    """Another rank of this trainer has ended or does not answer."""


def world_of() -> tuple[int, int]:
    """This process's rank and the number of ranks, as a launcher set them; (0, 1) without one.

    Raises `InputError` if the two contradict each other.
    """
    try:
        rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise InputError(
            "RANK and WORLD_SIZE are not numbers", hint="start the ranks with torchrun"
        ) from error
    if not 0 <= rank < ranks:
        raise InputError(
            f"RANK is {rank} and WORLD_SIZE {ranks}",
            hint="start the ranks with torchrun, or unset both for a single process",
        )
    return rank, ranks


def local_rank() -> int:
    """This process's number among the ranks on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def join_ranks(*, timeout: timedelta = JOIN_TIMEOUT) -> None:
    """Opens the default process group of the ranks that a launcher started, once; without other
    ranks, does nothing.

    Waits for all ranks. Sums of figures and messages travel over gloo; gradients on GPUs over NCCL.
    Raises `RetryError` if the others cannot be reached within ``timeout``.
    """
    rank, ranks = world_of()
    if ranks == 1 or dist.is_initialized():
        return
    try:
        store, _, _ = next(rendezvous("env://", rank, ranks, timeout=timeout))
        # Opening the group would wait as long as a collective may.
        store.set(f"deltawire/{rank}", b"here")
        store.wait([f"deltawire/{other}" for other in range(ranks)], timeout)
        dist.init_process_group(
            _backend(), store=store, rank=rank, world_size=ranks, timeout=TIMEOUT
        )
    except (RuntimeError, ValueError, OSError) as error:
        address = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise RetryError(
            f"rank {rank} of {ranks} cannot join the others at {address}: "
            f"{str(error).splitlines()[0][:200]}",
            hint="is every rank started, and is MASTER_ADDR reachable from each machine?",
        ) from error


def leave_ranks() -> None:
    """Closes the connections to the other ranks, once no other rank needs this one."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.destroy_process_group()


def open_single_rank(device: torch.device) -> None:
    """Opens a process group of one: FSDP2 needs one also where nothing is sharded."""
    if dist.is_initialized():
        return
    # A store in memory: a plain process opens no socket for this.
    store = dist.HashStore()  # type: ignore[attr-defined, unused-ignore]
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=TIMEOUT)


def _backend() -> str:
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if cuda else "gloo"


def broadcast(data: bytes = b"") -> bytes:
    """Returns rank 0's bytes, on every rank of the default process group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return data
    leads = dist.get_rank() == 0
    size = torch.tensor([len(data)])
    dist.broadcast(size, 0)
    message = torch.zeros(int(size), dtype=torch.uint8)
    if leads and data:
        message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(message, 0)
    return message.numpy().tobytes()


@contextmanager
def lost_ranks() -> Iterator[None]:
    """Raises `LostRankError` if the body fails because another rank has ended: all ranks must then
    start again from the last commit."""
    try:
        yield
    except RuntimeError as error:
        if not _says_lost(error):
            raise
        raise LostRankError(
            f"another rank ended or does not answer: {str(error).splitlines()[0][:200]}",
            hint="see that rank's error; all ranks start again from the last commit",
        ) from error


def _says_lost(error: RuntimeError) -> bool:
    """Returns whether an error comes from a collective whose peer has ended.

    gloo's are plain errors of the runtime; NCCL's are of torch's own class.
    """
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return any(
        sign in text
        for sign in (
            "Connection closed by peer",
            "Connection reset by peer",
            "Broken pipe",
            "Timed out waiting",
            "gloo/transport",
        )
    )
