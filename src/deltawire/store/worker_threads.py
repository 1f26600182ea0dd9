"""A thread pool that still works while the interpreter ends.

At the interpreter's end, ``concurrent.futures`` refuses tasks (`RuntimeError`), and Python from
3.12 on starts no thread. A version that is being committed then still needs both for its encoding
and its uploads.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class WorkerThreads(ThreadPoolExecutor):
    """Runs tasks in threads, and in the caller's thread once the interpreter ends.

    Example::

        with WorkerThreads(4, "uploader") as pool:
            pool.submit(bucket.put, key, data)
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As `ThreadPoolExecutor.submit`; at the interpreter's end the future is done on return."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            # Both messages contain these words; that of a pool that was shut down does not.
            if "interpreter shutdown" not in str(error):
                raise
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:  # The caller of `result` gets it, as from a thread.
            done.set_exception(error)
        return done
