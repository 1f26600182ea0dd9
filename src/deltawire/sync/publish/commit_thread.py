"""Commits one staged version at a time in a thread, and goes on while the store is away.

Concurrency::

    publishing thread                            commit thread
      submit(version) ─────────────────────────▶  attempt ─▶ committed
      supersede: waits, or gives the version up    ▲    └▶ RetryError: pause (see `outage`)
      wait: until it is committed                  └────────┘
    main thread, at the interpreter's end
      finish: the same, within a limit; says on stderr what is lost (see `interpreter_exit`)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field

from deltawire.errors import InputError, RetryError
from deltawire.store.worker_threads import WorkerThreads
from deltawire.sync.publish import interpreter_exit
from deltawire.sync.publish.outage import Outage

EXIT_OUTAGE_S = 60.0
"""At the end of the program, a store that does not answer is waited for at least this long."""

RANKS_WAIT_S = 60.0
"""How long one rank of several waits for its version when it ends: the others may be gone, and
launchers kill what is left of a job."""

REPORT_AFTER_S = 5.0
POLL_S = 0.1


class CommittedLateError(InputError):
    """An earlier attempt turned out to be committed: the staged weights take the next number."""


@dataclass
class StagedVersion:
    """Staged weights that are to become ``version``; ``committed`` once they are a version."""

    version: int
    committed: bool = field(default=False, kw_only=True)


class CommitThread:
    """The commits of one publisher of the run at ``url``.

    ``ranks`` says that other processes take part, for which the end of this one does not wait long.

    Example::

        commits = CommitThread(url, "publisher", Outage(url, 600.0))
        commits.submit(StagedVersion(7), commit)
        commits.wait()
    """

    def __init__(
        self,
        url: str,
        name: str,
        outage: Outage,
        *,
        ranks: bool = False,
    ) -> None:
        self.outage = outage
        self.pending: Future[None] | None = None
        self._url = url
        ranks = ranks or os.environ.get("WORLD_SIZE", "1") not in ("", "1")  # Set by torchrun.
        self._limit_s = RANKS_WAIT_S if ranks else None
        self._pool = WorkerThreads(1, thread_name_prefix=name)
        self._staged: StagedVersion | None = None
        self._commit: Callable[[], None] | None = None
        self._last: Future[None] | None = None
        """The newest attempt at the staged version; ``pending`` is None once its error is told."""
        self._process = os.getpid()
        interpreter_exit.opened(self)

    @property
    def inherited(self) -> bool:
        """True in a forked child, which has no thread of these."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Raises `InputError` in a forked child."""
        if self.inherited:
            raise InputError(
                f"this publisher was opened by process {self._process}, which this one was forked "
                "from",
                hint="publish from the process that opened it",
                run=self._url,
            )

    def submit(self, staged: StagedVersion, commit: Callable[[], None]) -> None:
        """Commits ``staged`` by ``commit``, which sets ``committed``, in the background; before
        this returns if the interpreter ends.
        """
        self._staged, self._commit, self._last = staged, commit, None
        interpreter_exit.staged(self)
        self.pending = self._last = self._pool.submit(self._run, staged, commit)
        if interpreter_exit.ending():
            self.wait()

    def forget(self) -> None:
        """Forgets the staged weights, which are about to be overwritten."""
        self._staged = self._commit = self._last = None
        interpreter_exit.committed(self)

    def wait(self) -> None:
        """Waits until the version in progress is committed; raises its error."""
        pending = self.pending
        if pending is None:
            return
        self.check_process()
        try:
            pending.result()
        except Exception:
            interpreter_exit.told(self)
            raise
        finally:
            # An interrupt while waiting leaves it in progress, so it must be remembered.
            if pending.done():
                self.pending = None

    def wait_while_answered(self) -> bool:
        """Waits for the version in progress until it is committed or has failed, or its store does
        not answer. Returns False in the last case.
        """
        pending = self.pending
        while pending is not None and not wait_for([pending], POLL_S).done:
            if self.outage.seconds:
                return False
        return True

    def supersede(self) -> bool:
        """Waits as `wait` does, but gives up a version whose store is away, within the tolerated
        time. Returns whether there is none that was given up.
        """
        self.check_process()
        with self.outage.superseding():
            try:
                self.wait()
            except RetryError:
                if self.outage.exceeded:
                    raise
                self.outage.superseded += 1
                return False
        return True

    def close(self) -> None:
        """Waits as `wait` does and ends the thread. In a forked child does nothing."""
        if self.inherited:
            return
        staged = self._staged
        try:
            self.wait()
        except BaseException as error:
            self.outage.give_up()
            if not isinstance(error, Exception) and staged is not None:
                self._report(staged, "interrupted")
            raise
        finally:
            self._pool.shutdown()
            self.forget()
            interpreter_exit.closed(self)

    def finish(self, limit_s: float | None) -> None:
        """Waits at the end of the process until the staged version is committed, and says on stderr
        why if it is not. A failure for want of the store's answer is tried again.
        """
        staged, commit, last = self._staged, self._commit, self._last
        if staged is None or commit is None or last is None:  # `submit` has not returned.
            return
        if self._limit_s is not None:
            limit_s = self._limit_s if limit_s is None else min(limit_s, self._limit_s)
        self.outage.extend(EXIT_OUTAGE_S)
        reason = ""
        try:
            if last.done() and _may_succeed(last.exception()):
                last = self.pending = self._last = self._pool.submit(self._run, staged, commit)
            self._await(staged, last, limit_s)
        except FutureTimeoutError:
            reason = f"not within {limit_s:.0f} s"
        except KeyboardInterrupt:
            reason = "interrupted"
        except BaseException as error:  # No caller is left that would report it.
            reason = str(error) or type(error).__name__
        if reason and not staged.committed:
            self.outage.give_up()
            self._report(staged, reason)
        self.forget()

    def _await(self, staged: StagedVersion, pending: Future[None], limit_s: float | None) -> None:
        try:
            pending.result(REPORT_AFTER_S if limit_s is None else min(REPORT_AFTER_S, limit_s))
            return
        except FutureTimeoutError:
            if pending.done() or (limit_s is not None and limit_s <= REPORT_AFTER_S):
                raise
        interpreter_exit.report(
            f"committing version {staged.version} of {self._url} before the process ends; Ctrl-C "
            "gives it up"
        )
        pending.result(None if limit_s is None else limit_s - REPORT_AFTER_S)

    def _run(self, staged: StagedVersion, commit: Callable[[], None]) -> None:
        while True:
            try:
                commit()
                break
            except CommittedLateError:
                if self.outage.max_outage == 0:
                    raise
            except RetryError as error:
                if staged.committed:  # A callback's, after the commit.
                    raise
                self.outage.pause(error, staged.version)
        self.outage.end()
        if self._staged is staged:
            self.forget()

    def _report(self, staged: StagedVersion, reason: str) -> None:
        if not staged.committed:
            interpreter_exit.report(
                f"version {staged.version} of {self._url} was not committed: {reason}"
            )


def _may_succeed(error: BaseException | None) -> bool:
    # Python raises RuntimeError where a thread cannot be started any more; a pool then works in
    # the calling thread.
    return isinstance(error, RetryError | RuntimeError)
