"""Finds the version that broke a test, by bisection.

``command`` runs on a directory of each version that is asked, or with the URL of an engine that
serves it. Without noise the version in the middle of those left is next, as ``git bisect`` does.
With noise `CulpritPosterior` chooses.
"""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from deltawire.errors import CorruptError, InputError
from deltawire.launch.branches.journal import BisectAnswer, BisectSettings, Journal
from deltawire.launch.branches.posterior import CulpritPosterior
from deltawire.store import Bucket
from deltawire.sync import Checkout, committed_versions
from deltawire.wire.run import Run

SKIP = 125
CHECKS = 6
"""Versions on each side of a culprit that are asked before it is named."""
HINTS = {
    errno.ENOEXEC: "name its interpreter, as in -- python check.py, or begin the script with "
    "#!/usr/bin/env python3",
    errno.EACCES: "make it executable (chmod +x), or name its interpreter",
}
"""Advice where the system does not start the command, by the number of its error."""
NOT_RUNNABLE = (126, 127)
"""Statuses of a shell that could not start the command."""


class Bisected(msgspec.Struct, frozen=True, kw_only=True):
    """The result: ``culprit`` is the first bad version, None if there is none that is certain
    enough. ``candidates`` are the versions that it may be, with their posterior weights (1 for each
    without noise), the likeliest first. ``no_single`` is the posterior that there is no single
    culprit, ``reason`` says why the search ended. ``rates`` are the expected pass rates before and
    from the culprit on. ``asked`` counts the answers by version.
    """

    culprit: int | None
    candidates: dict[int, float]
    questions: int
    reason: str
    no_single: float = 0.0
    rates: tuple[float, float] | None = None
    asked: dict[int, int] = {}
    skipped: list[int] = []


class _Search(Protocol):
    """Takes answers, and names the next version to ask."""

    def add(self, answer: BisectAnswer) -> None: ...

    def next(self) -> int | None: ...

    def result(self) -> Bisected: ...


class ExactSearch:
    """Bisects with a test that always gives the same answer: the first bad version of
    ``versions``, of which the first is good and the last is bad.

    Example::

        search = ExactSearch([40, 41, 42])
        search.next()
    """

    def __init__(self, versions: list[int]) -> None:
        self._versions = versions
        self._good, self._bad = 0, len(versions) - 1
        self._skipped: set[int] = set()
        self._asked = 0

    def add(self, answer: BisectAnswer) -> None:
        """Adds the answer of one version."""
        self._asked += 1
        at = self._versions.index(answer.version)
        if answer.status == SKIP:
            self._skipped.add(at)
        elif answer.status == 0:
            self._good = max(self._good, at)
        else:
            self._bad = min(self._bad, at)

    def next(self) -> int | None:
        """Returns the version in the middle of those left, None if none is left to ask."""
        left = [at for at in range(self._good + 1, self._bad) if at not in self._skipped]
        middle = (self._good + self._bad) / 2
        return self._versions[min(left, key=lambda at: abs(at - middle))] if left else None

    def result(self) -> Bisected:
        """Returns the first bad version, or those that may be it if some were skipped."""
        left = self._versions[self._good + 1 : self._bad + 1]
        single = len(left) == 1
        return Bisected(
            culprit=left[0] if single else None,
            candidates=dict.fromkeys(left, 1.0),
            questions=self._asked,
            reason="found" if single else "the versions between cannot be tested",
            skipped=[self._versions[at] for at in sorted(self._skipped)],
        )


class NoisySearch:
    """Bisects with a test that passes by chance, until the posterior of one version, or that there
    is no single culprit, reaches 1 less ``error``, or ``most`` questions were asked. Before a
    culprit counts, versions all over the range are asked once.

    Example::

        search = NoisySearch([40, 41, 42], error=0.05, most=2000)
        search.next()
    """

    def __init__(self, versions: list[int], *, error: float, most: int) -> None:
        self._versions = versions
        self._error, self._most = error, most
        self._posterior = CulpritPosterior(len(versions))
        self._asked: dict[int, int] = {}
        self._skipped: list[int] = []

    def add(self, answer: BisectAnswer) -> None:
        """Adds one answer of one version."""
        at = self._versions.index(answer.version)
        self._asked[answer.version] = self._asked.get(answer.version, 0) + 1
        if answer.status == SKIP:
            self._posterior.may_ask_N[at] = False
            self._skipped.append(answer.version)
        else:
            self._posterior.add(at, passed=answer.status == 0)

    def next(self) -> int | None:
        """Returns the version whose answer says most, None at the end."""
        weight_N, no_single = self._posterior.weights()
        if no_single >= 1 - self._error or self._questions >= self._most:
            return None
        if not self._posterior.may_ask_N.any():
            return None
        if weight_N.max() < 1 - self._error:
            return self._versions[self._posterior.next_version()]
        return next(self._unchecked(int(weight_N.argmax())), None)

    def _unchecked(self, culprit: int) -> Iterator[int]:
        """Yields versions over both sides of the culprit that were never asked: questions gather
        around one change, and would miss that there are others."""
        last = len(self._versions) - 1
        for first, end in ((0, culprit - 1), (culprit, last)):
            for at in np.linspace(first, end, CHECKS).round().astype(int):
                if self._versions[at] not in self._asked:
                    yield self._versions[at]

    @property
    def _questions(self) -> int:
        return sum(self._asked.values())

    def result(self) -> Bisected:
        """Returns the culprit, if its posterior is high enough."""
        weight_N, no_single = self._posterior.weights()
        order = weight_N.argsort()[::-1][:10]
        certain = weight_N[order[0]] >= 1 - self._error
        if certain:
            reason = "found"
        elif no_single >= 1 - self._error:
            reason = "there is no single culprit"
        elif self._questions >= self._most:
            reason = f"undecided after {self._most} questions"
        else:
            reason = "no version can be tested"
        return Bisected(
            culprit=self._versions[order[0]] if certain else None,
            candidates={
                self._versions[at]: round(float(weight_N[at]), 4)
                for at in order
                if weight_N[at] > 0.0005
            },
            questions=self._questions,
            reason=reason,
            no_single=round(no_single, 4),
            rates=self._posterior.rates(),
            asked=dict(sorted(self._asked.items())),
            skipped=self._skipped,
        )


def bisect_run(
    bucket: Bucket,
    run: Run,
    settings: BisectSettings,
    folder: Path,
    *,
    error: float = 0.05,
    most: int = 2000,
    report: Callable[[BisectAnswer, int], None] = lambda *_: None,
) -> Bisected:
    """Asks versions until one is the culprit, and returns the result.

    ``folder`` holds the journal and the directory of the version that is asked; with a journal of
    the same settings the search goes on from there. ``report`` gets each new answer, and the number
    of answers so far.

    Raises `InputError` if a version does not exist, or if the command cannot be run, was ended by a
    signal, or ended with a status above 127.
    """
    versions = [v for v in committed_versions(bucket) if settings.good <= v <= settings.bad]
    for wanted in (settings.good, settings.bad):
        if wanted not in versions:
            raise InputError(f"the run has no version {wanted}", run=bucket.url)
    search: _Search = (
        NoisySearch(versions, error=error, most=most) if settings.noisy else ExactSearch(versions)
    )
    journal = Journal(folder, settings)
    for answer in journal.answers:
        if answer.version not in versions:
            raise InputError(f"{journal.path} names a version that the run lacks", run=bucket.url)
        search.add(answer)
    with _open_place(bucket, run, folder, settings) as place:
        asking = _Asking(place, settings)
        while (version := search.next()) is not None:
            answer = asking.ask(version)
            if answer.status in NOT_RUNNABLE and not journal.answers:
                asking.check_runnable(answer.status)
            journal.append(answer)
            search.add(answer)
            report(answer, len(journal.answers))
    return search.result()


class _VersionPlace(Protocol):
    """Holds one version at a time for the command."""

    @property
    def environment(self) -> dict[str, str]: ...

    def bring_to(self, version: int) -> str: ...


class _Directory:
    """Holds a version as a directory."""

    def __init__(self, bucket: Bucket, run: Run, directory: Path) -> None:
        self._checkout = Checkout(bucket, run, directory)

    def __enter__(self) -> _Directory:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkout.__exit__()

    @property
    def environment(self) -> dict[str, str]:
        return {"DELTAWIRE_VERSION_DIR": str(self._checkout.directory)}

    def bring_to(self, version: int) -> str:
        self._checkout.bring_to(version)
        return str(self._checkout.directory)


@contextmanager
def _open_place(
    bucket: Bucket, run: Run, folder: Path, settings: BisectSettings
) -> Iterator[_VersionPlace]:
    if not settings.serve:
        with _Directory(bucket, run, folder / "version") as directory:
            yield directory
        return
    from deltawire.launch.branches.version_server import VersionServer  # Brings torch.

    with VersionServer(bucket, base=settings.good) as server:
        yield server


class _Asking:
    """Runs the command on versions."""

    def __init__(self, place: _VersionPlace, settings: BisectSettings) -> None:
        self._place, self._settings = place, settings

    def ask(self, version: int) -> BisectAnswer:
        """Runs the command on a version; a version that cannot be read any more is skipped."""
        started = time.perf_counter()
        try:
            where = self._place.bring_to(version)
        except CorruptError as error:
            return BisectAnswer(version, SKIP, error=error.message)
        status = self._run(version, where)
        if status < 0 or status > 127:
            how = f"signal {-status} ended it" if status < 0 else f"it ended with {status}"
            raise InputError(
                f"the command stopped the search: {how}",
                hint="statuses are 0 (good), 1 to 124, 126 and 127 (bad), 125 (skip); the same "
                "command continues",
                version=version,
            )
        return BisectAnswer(version, status, round(time.perf_counter() - started, 3))

    def check_runnable(self, status: int) -> None:
        """Raises `InputError` if the good version ends with the same status: the command itself
        cannot be run."""
        if self.ask(self._settings.good).status == status:
            raise InputError(
                f"the command ends with {status} also on version {self._settings.good}, which is "
                "good",
                hint="a shell ends so if it does not find or may not execute a program",
            )

    def _run(self, version: int, where: str) -> int:
        words = [word.replace("{}", where) for word in self._settings.command]
        if words == self._settings.command:
            words.append(where)
        environment = os.environ | {"DELTAWIRE_VERSION": str(version)} | self._place.environment
        try:
            return subprocess.run(  # noqa: S603 - the user's own command
                words, env=environment, stdin=subprocess.DEVNULL, check=False
            ).returncode
        except OSError as error:
            hint = HINTS.get(error.errno or 0, "is it on the PATH?")
            raise InputError(
                f"cannot run {words[0]}: {error.strerror or error}", hint=hint
            ) from error
