"""Memory of processes: what one held at its peak, what is free, and why one ran out of it.

An allocation that fails raises `MemoryError` in Python and NumPy, and errors of different types in
torch. Linux seldom lets one fail: it ends a process by SIGKILL once memory is used up, and counts
that.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

from deltawire.errors import OutOfMemoryError

GIB = 2.0**30
UNLIMITED = 1 << 62
"""Stands for an amount of memory that nothing states."""
SETTINGS = {
    "trainer": "lower train.max_tokens_per_batch, set train.activation_checkpointing to full, or "
    "train an adapter (train.adapter.kind = lora)",
    "worker": "lower rollout.slots, rollout.context or rollout.workers",
    "evaluator": "lower evaluate.slots or rollout.context, or set evaluate.every to 0 and measure "
    "on another machine",
    "reference": "lower train.max_tokens_per_batch or rollout.context, or choose a smaller "
    "reference.model",
    "warm-start": "lower warm_start.batch, model.build.layers or model.build.context",
}
"""The end of an error for each role: the settings to change."""
_UNITS = ("B", "KIB", "MIB", "GIB", "TIB", "PIB", "EIB")
_ASKED = re.compile(r"allocate:? ([0-9]+(?:\.[0-9]+)?) ?([KMGTPE]iB)?", re.IGNORECASE)
_GPU = re.compile(r"total capacity of ([0-9.]+ [KMGT]iB) of which ([0-9.]+ [KMGT]iB) is free")
_SIGNS = ("DefaultCPUAllocator", "std::bad_alloc", "out of memory", "not enough memory")
_MAX_CHAIN = 100
_COUNTERS = (
    # The machine's counter, and those of a container's control group, of both kinds.
    (Path("/proc/vmstat"), "oom_kill"),
    (Path("/sys/fs/cgroup/memory.events"), "oom_kill"),
    (Path("/sys/fs/cgroup/memory/memory.oom_control"), "oom_kill"),
)


def held_bytes(pid: int | str = "self", *, peak: bool = True) -> int:
    """Returns the resident memory of a process: the most since its program started, or now.

    Returns 0 if the system does not say. ``getrusage`` would not do: its maximum survives the start
    of another program, so a small process that a large one started would report the large one's.
    """
    word = "VmHWM:" if peak else "VmRSS:"
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith(word):
                return int(line.split()[1]) << 10
    return 0


def release_heap() -> None:
    """Gives freed memory back to the system, where the C library can.

    glibc keeps what was freed in the middle of its heap, and takes more for the next allocation of
    another size: batches differ in size, so a trainer that never gave back grew from step to step.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class HeapGrowth:
    """Calls `release_heap` between pieces of work whose allocations differ in size.

    Example::

        growth = HeapGrowth()
        for batch in batches:
            compute(batch)
            growth.release()
    """

    def __init__(self, limit: int = 128 << 20) -> None:
        self._limit = limit
        self._held = held_bytes(peak=False)

    def release(self) -> bool:
        """Releases the heap if this process has grown by more than the limit since the last time.
        Returns whether it did. Small models never grow by as much, and pay for no system call but
        the one that tells."""
        if held_bytes(peak=False) - self._held <= self._limit:
            return False
        release_heap()
        self._held = held_bytes(peak=False)
        return True


def total_host_bytes() -> int:
    """Returns this machine's memory, or its container's limit; `UNLIMITED` if neither is known."""
    limit = UNLIMITED
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
    return min(limit, _of_meminfo("MemTotal:"))


def available_host_bytes() -> int:
    """Returns the host memory that can still be allocated, within a container's limit.

    If neither Linux nor a limit states it, returns a number larger than any memory.
    """
    return min(_of_meminfo("MemAvailable:"), _control_group_bytes())


def _of_meminfo(word: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith(word):
                return int(line.split()[1]) << 10
    return UNLIMITED  # Not Linux: the limit is unknown until an allocation fails.


def _control_group_bytes() -> int:
    """Returns the memory that the process's control group (a container's limit) still allows."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = int((root / "memory.max").read_text(encoding="ascii"))
        used = int((root / "memory.current").read_text(encoding="ascii"))
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # There is no control group, or its limit is the word "max".
        return UNLIMITED
    return max(0, limit - used + int(stat.get("inactive_file", 0)))


def kernel_kills() -> tuple[int, ...]:
    """Returns how many processes the kernel has ended because memory ran out, by each counter."""
    return tuple(_counter(path, word) for path, word in _COUNTERS)


def _counter(path: Path, word: str) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in path.read_text(encoding="ascii").splitlines():
            if line.split()[:1] == [word]:
                return int(line.split()[1])
    return 0


class MemoryWatch:
    """Watches the memory of a process on this machine; answers also after it has ended.

    Example::

        watch = MemoryWatch(pid)
        watch.read()  # repeatedly, while it runs
        words = watch.why_killed("trainer", "trainer")
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._kills = kernel_kills()
        self.peak_bytes = 0

    def read(self) -> None:
        """Notes what the process holds; one that has ended holds nothing and changes nothing."""
        self.peak_bytes = held_bytes(self._pid) or self.peak_bytes

    def why_killed(self, name: str, role: str) -> OutOfMemoryError | None:
        """Returns the error for a process that a SIGKILL ended; None if the kernel has not ended a
        process for memory since this one started.
        """
        return killed_by_kernel(name, role, self._kills, self.peak_bytes)


def killed_by_kernel(
    name: str, role: str, before: tuple[int, ...], held: int = 0
) -> OutOfMemoryError | None:
    """Returns the error for a process that a SIGKILL ended, if a counter exceeds ``before``."""
    if not any(now > then for now, then in zip(kernel_kills(), before, strict=True)):
        return None
    had = f"; it held {held / GIB:.1f} GiB" if held else ""
    return OutOfMemoryError(
        f"the kernel ended {name} because memory ran out{had}, and this machine has {_total()}",
        hint=SETTINGS.get(role, SETTINGS["trainer"]),
    )


def _total() -> str:
    total = total_host_bytes()
    return "an unknown amount" if total == UNLIMITED else f"{total / GIB:.1f} GiB"


def memory_failure(error: BaseException) -> BaseException | None:
    """Returns the failed allocation among an error and its causes; None if there is none.

    Causes may form a cycle: an error that one thread raised is raised again in another.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting and len(seen) < _MAX_CHAIN:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if _is_memory(one):
            return one
        waiting.append(one.__cause__)
        if not one.__suppress_context__:
            waiting.append(one.__context__)
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
    return None


def _is_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # torch's class for GPUs is an error of the runtime; its CPU allocator raises a plain one.
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def describe_failure(error: BaseException, name: str, role: str) -> OutOfMemoryError:
    """Returns the error for a failed allocation: what was asked, what there is, what to change."""
    text = str(error)
    asked = _ASKED.search(text)
    want = ""
    if asked:
        unit = 1024.0 ** _UNITS.index((asked[2] or "B").upper())
        want = f": it asked for {_size(float(asked[1]) * unit)}"
    if gpu := _GPU.search(text):
        there = f"{gpu[2]} of the GPU's {gpu[1]} were free"
    else:
        free = available_host_bytes()
        there = "an unknown amount was free" if free == UNLIMITED else f"{_size(free)} were free"
        there += f" of this machine's {_total()}"
    held = held_bytes()
    had = f"it held {_size(held)} at its peak, and " if held else ""
    link = ", " if want else ": "
    return OutOfMemoryError(
        f"{name} ran out of memory{want}{link}{had}{there}",
        hint=SETTINGS.get(role, SETTINGS["trainer"]),
    )


def _size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


@contextlib.contextmanager
def explaining_memory(name: str, role: str) -> Iterator[None]:
    """Raises `OutOfMemoryError` if the body fails because an allocation failed."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemoryError) or (found := memory_failure(error)) is None:
            raise
        # The frames hold what filled the memory; the caller needs a little to report the error.
        traceback.clear_frames(error.__traceback__)
        traceback.clear_frames(found.__traceback__)
        raise describe_failure(found, name, role) from error
