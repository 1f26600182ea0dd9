"""Runs the threads of many processes in one thread, on a simulated clock, in the order of a seed.

`install` replaces Python's clock, locks and threads. Call it before the code under test is
imported, so that no module keeps the real ones. Each thread is then a greenlet, which runs until it
waits for a lock, sleeps or sends a request. Which of those that can go on does so is drawn from the
seed. The clock moves only when none can: to the next moment that one of them waits for.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  # With real locks, which nobody waits for.
import heapq
import queue
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Any

import numpy as np
from greenlet import getcurrent, greenlet

START_S = 1.8e9
"""The wall clock at the start of a simulation."""


class Killed(BaseException):
    """Ends the threads of a process that was killed; no handler of the code takes it."""


class SimulatedProcess:
    """A process: its threads, its clocks, and the moment until which it is stopped."""

    def __init__(self, name: str, seed: str) -> None:
        self.name = name
        self.random = random.Random(f"{seed} {name}")
        self.dead = False
        self.stopped_until = 0.0
        self.wall_offset_s = 0.0
        self.tasks: list[Task] = []


class Task(greenlet):
    """One thread of a process."""

    def __init__(self, process: SimulatedProcess, body: Callable[[], Any]) -> None:
        super().__init__(self._work, scheduler().hub)
        self.process = process
        self.waiting = False
        self.timed_out = False
        self.turn = 0
        self.local: dict[int, dict[str, Any]] = {}
        self.error: BaseException | None = None
        self.thread: Any = None
        self._body = body
        process.tasks.append(self)

    def _work(self) -> None:
        try:
            if not self.process.dead:
                self._body()
        except Killed:
            pass
        except BaseException as error:
            if not self.process.dead:
                self.error = error
                scheduler().failed(self, error)
        finally:
            self.process.tasks.remove(self)


class Scheduler:
    """The clock, and the threads that can go on."""

    def __init__(self, seed: str) -> None:
        self.now = 0.0
        self.hub = getcurrent()
        self.random = random.Random(f"{seed} order")
        self.failed: Callable[[Task, BaseException], None] = _raise
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def number(self) -> int:
        """A number that nothing else in this simulation has."""
        return next(self._numbers)

    def start(self, process: SimulatedProcess, body: Callable[[], Any]) -> Task:
        """Starts a thread of ``process``."""
        task = Task(process, body)
        self._ready.append(task)
        return task

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Calls ``call`` later."""
        heapq.heappush(self._timers, (self.now + max(seconds, 0.0), next(self._numbers), call))

    def block(self, timeout: float | None = None) -> bool:
        """Waits until `wake`; returns False if ``timeout`` was over first."""
        task = current()
        assert task is not None, "only a simulated thread can wait"
        if task.process.dead:
            raise Killed
        task.turn += 1
        task.waiting, task.timed_out = True, False
        if timeout is not None:
            turn = task.turn
            self.after(timeout, lambda: self._time_out(task, turn))
        self.hub.switch()
        if task.process.dead:
            raise Killed
        return not task.timed_out

    def wake(self, task: Task) -> None:
        """Lets a thread go on that waits."""
        if task.waiting:
            task.waiting = False
            self._ready.append(task)

    def kill(self, process: SimulatedProcess) -> None:
        """Ends a process at once. Its threads run no further, except to be taken down."""
        process.dead = True
        process.stopped_until = 0.0
        for task in list(process.tasks):
            self.wake(task)

    def run_until(self, moment: float, done: Callable[[], bool] = lambda: False) -> None:
        """Runs the threads until a moment of the clock, or until ``done``."""
        while True:
            while self._ready:
                at = self.random.randrange(len(self._ready))
                task = self._ready.pop(at)
                if task.process.stopped_until > self.now:
                    self.after(task.process.stopped_until - self.now, _later(self._ready, task))
                    continue
                task.switch()
            if done() or not self._timers or self._timers[0][0] > moment:
                if not done():
                    self.now = moment
                return
            self.now, _, call = heapq.heappop(self._timers)
            call()

    def _time_out(self, task: Task, turn: int) -> None:
        if task.waiting and task.turn == turn:
            task.waiting, task.timed_out = False, True
            self._ready.append(task)


def _later(ready: list[Task], task: Task) -> Callable[[], None]:
    return lambda: ready.append(task)


def _raise(_: Task, error: BaseException) -> None:
    raise error


_schedulers: list[Scheduler] = []
"""The scheduler of the present simulation."""


def begin(seed: str) -> Scheduler:
    """Begins a simulation."""
    _schedulers[:] = [Scheduler(seed)]
    return _schedulers[0]


def scheduler() -> Scheduler:
    """The scheduler of the present simulation."""
    return _schedulers[0]


def current() -> Task | None:
    """The thread that runs, None outside of all."""
    found = getcurrent()
    return found if isinstance(found, Task) else None


class SimulatedLock:
    """A lock as `threading.Lock`."""

    def __init__(self) -> None:
        self._held = False
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        deadline = None if timeout < 0 else scheduler().now + timeout
        while self._held:
            if not blocking:
                return False
            task = current()
            assert task is not None, "a lock is held outside of all threads"
            self._waiting.append(task)
            left = None if deadline is None else deadline - scheduler().now
            if not scheduler().block(left):
                self._waiting.remove(task)
                return False
        self._held = True
        return True

    def release(self) -> None:
        if not self._held:
            raise RuntimeError("release unlocked lock")
        self._held = False
        if self._waiting:
            scheduler().wake(self._waiting.popleft())

    def locked(self) -> bool:
        return self._held

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class SimulatedRLock:
    """A lock as `threading.RLock`, with what `threading.Condition` needs of it."""

    def __init__(self) -> None:
        self._lock = SimulatedLock()
        self._owner: Any = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._owner is getcurrent():
            self._count += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._count = getcurrent(), 1
        return True

    def release(self) -> None:
        if self._owner is not getcurrent():
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            self._lock.release()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_owned(self) -> bool:
        return self._owner is getcurrent()

    def _release_save(self) -> tuple[int, Any]:
        saved = self._count, self._owner
        self._count, self._owner = 0, None
        self._lock.release()
        return saved

    def _acquire_restore(self, saved: tuple[int, Any]) -> None:
        self._lock.acquire()
        self._count, self._owner = saved


class SimulatedThread:
    """A thread as `threading.Thread`, in the process of the thread that makes it."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        assert group is None
        self.name = name or "thread"
        self.daemon = bool(daemon)
        self.ident: int | None = None
        self._call = (target, args, kwargs or {})
        self._number = scheduler().number()
        self._ended = threading.Event()

    def __hash__(self) -> int:
        """Sets of threads have one order in all histories of a seed."""
        return self._number

    def run(self) -> None:
        target, args, kwargs = self._call
        if target is not None:
            target(*args, **kwargs)

    def start(self) -> None:
        task = current()
        assert task is not None
        if task.process.dead:
            raise Killed
        started = scheduler().start(task.process, self._work)
        started.thread = self
        self.ident = id(started)

    def _work(self) -> None:
        try:
            self.run()
        finally:
            self._ended.set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        return self.ident is not None and not self._ended.is_set()


class SimulatedLocal:
    """Values of each thread as `threading.local`, whose subclasses state the first ones."""

    def __getattribute__(self, name: str) -> Any:
        task = current()
        if task is not None:
            mine = task.local.get(id(self))
            if mine is not None and name in mine:
                return mine[name]
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        task = current()
        if task is None:
            object.__setattr__(self, name, value)
        else:
            task.local.setdefault(id(self), {})[name] = value


def sleep(seconds: float) -> None:
    """Sleeps on the simulated clock."""
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    scheduler().block(seconds)


def uptime(*_: Any) -> float:
    """The seconds of a clock that never goes back."""
    return _schedulers[0].now if _schedulers else 0.0


def wall_clock() -> float:
    """The seconds of the process's wall clock, which may be wrong."""
    task = current()
    return START_S + uptime() + (0.0 if task is None else task.process.wall_offset_s)


def drawn() -> float:
    """As `random.random`, from the seed of the thread's process."""
    task = current()
    return 0.5 if task is None else task.process.random.random()


def token_hex(size: int | None = None) -> str:
    """As `secrets.token_hex`, from the seed of the thread's process."""
    task = current()
    source = random.Random(0) if task is None else task.process.random
    return source.randbytes(size or 32).hex()


def future_hash(future: Future[Any]) -> int:
    """Gives sets of futures one order in all histories of a seed."""
    known: int | None = getattr(future, "_number", None)
    if known is None:
        known = future._number = scheduler().number()  # type: ignore[attr-defined]
    return known


def identity() -> int:
    """As `threading.get_ident`."""
    return id(getcurrent())


def install() -> None:
    """Replaces the clock, locks, threads, random numbers and new memory of Python, for good."""
    for name, value in (
        ("Thread", SimulatedThread),
        ("Lock", SimulatedLock),
        ("_allocate_lock", SimulatedLock),
        ("RLock", SimulatedRLock),
        ("local", SimulatedLocal),
        ("get_ident", identity),
        ("_time", uptime),
    ):
        setattr(threading, name, value)
    Future.__hash__ = future_hash  # type: ignore[assignment, method-assign]
    queue.SimpleQueue = queue._PySimpleQueue  # type: ignore[misc, attr-defined]
    queue.time = uptime  # type: ignore[attr-defined]
    for name in ("monotonic", "perf_counter", "clock_gettime"):
        setattr(time, name, uptime)
    # Readers skip what their memory already holds, and new memory holds what was there before.
    np.empty = np.zeros
    time.time = wall_clock
    time.sleep = sleep
    random.random = drawn
    secrets.token_hex = token_hex
