"""Opens both sides of an attestation, and prints the report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from rich.console import Console

from deltawire.attest.engine import ask_engine, compare_settled
from deltawire.attest.requests import is_http
from deltawire.attest.sides import Side, digests_side, local_side, version_side
from deltawire.attest.statement import FILE
from deltawire.attest.verdicts import WeightReport, compare
from deltawire.display import safe_line
from deltawire.errors import InputError, ResyncError
from deltawire.launch.black_box.judging import BlackBoxReport
from deltawire.launch.branches.version_names import VersionName, open_version
from deltawire.private_files import replace_private
from deltawire.runtime.reader_report import ReaderReporter
from deltawire.runtime.trusted import ReaderTrust
from deltawire.store import Bucket
from deltawire.sync import committed_versions
from deltawire.wire.run import Run

SHOWN = 40
"""Tensors that are listed for people."""


def open_side(text: str, trust: ReaderTrust) -> Side:
    """Opens a folder of safetensors files, ``digests.json``, or ``RUN@VERSION``.

    Raises `InputError` for anything else, and as reading it does.
    """
    key = trust.pin.public_key if trust.pin else ""
    side = local_side(text, public_key=key)
    if side is not None:
        return side
    if is_http(text):
        return digests_side(text, public_key=key)
    if text.endswith(f"/{FILE}"):
        return digests_side(text.removesuffix(f"/{FILE}"), public_key=key)
    return version_side(*_version_of(text, trust))


def _version_of(text: str, trust: ReaderTrust) -> tuple[Bucket, Run, int]:
    try:
        return open_version(text, trust)
    except InputError as error:
        if "://" in text or Path(text).exists():
            raise
        raise InputError(
            f"{text} is no folder of safetensors files, no {FILE} and no version of a run",
            hint=error.message,
        ) from error


class KeptReference:
    """Keeps a reference between looks: elements are loaded once, those of a run that is named
    without ``@V`` again when it has a newer version. ``digests.json`` is read for each look.

    Example::

        reference = KeptReference("runs/demo/bucket", trust)
        report = attest("engine", reference, (), trust)
    """

    def __init__(self, text: str, trust: ReaderTrust) -> None:
        self.text = text
        self._trust = trust
        self._is_run = not local_side_exists(text)
        self._fixed = VersionName.parse(text).version is not None
        self._held: Side | None = None
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        """The version that was loaded last; None if the reference is no run."""
        return self._version

    def side(self) -> Side:
        """Returns the reference as it is now; raises as `open_side` does."""
        held = self._held
        if not self._is_run:
            if held is None or held.elements is None:
                held = open_side(self.text, self._trust)
        elif held is None or not self._fixed:
            bucket, run, version = _version_of(self.text, self._trust)
            if held is None or version != self._version:
                held = self._held = None  # Two versions need twice the memory.
                held = version_side(bucket, run, version)
            self._version = version
        self._held = held
        return held


def other_sides(against: str, also: Sequence[str], trust: ReaderTrust) -> list[Side]:
    """Opens what may explain a difference: ``also``, and of a run the version before and the
    first."""
    found = [open_side(text, trust) for text in also]
    if local_side_exists(against):
        return found
    bucket, run, version = open_version(against, trust)
    held = committed_versions(bucket)
    earlier = [one for one in held if one < version]
    for one in sorted({*earlier[-1:], *earlier[:1]}, reverse=True):
        with suppress(ResyncError):  # Retention may have deleted it: it explains nothing then.
            found.append(version_side(bucket, run, one))
    return found


def local_side_exists(text: str) -> bool:
    """Returns whether a location is a file or a folder of files or digests, and no run."""
    path = Path(text)
    return (
        path.is_file()
        or text.endswith(f"/{FILE}")
        or is_http(text)
        or any(path.glob("*.safetensors"))
        or (path / FILE).is_file()
    )


def attest(
    found: str, against: KeptReference, also: Sequence[str], trust: ReaderTrust, *, token: str = ""
) -> WeightReport:
    """Compares the weights at two locations; ``found`` may be the URL of a vLLM server, which gets
    ``token``. Raises as `open_side`, `compare` and `ask_engine` do."""
    reference = against.side()
    others: Callable[[], list[Side]] = lambda: other_sides(against.text, also, trust)  # noqa: E731
    if is_http(found) and not found.endswith(".json"):
        ask = partial(ask_engine, found, reference, token=token)
        return compare_settled(found, ask, reference, others)
    return compare(open_side(found, trust), reference, others)


def note_found(
    reporter: ReaderReporter | None, report: WeightReport | BlackBoxReport, version: int
) -> None:
    """Tells the run's page what a look found."""
    if reporter is None:
        return
    reporter.alarms(safe_line(report.problem))
    if report.problem:
        reporter.waits("the engine holds other weights")
    elif report.equal if isinstance(report, WeightReport) else report.verdict == "same":
        reporter.holds(version)
    else:
        reporter.waits("nothing tells which weights the engine holds")


def write_metrics(path: str, report: WeightReport | BlackBoxReport) -> None:
    """Writes what a look found for Prometheus, as node_exporter's textfile collector reads it.

    Raises `InputError` if the file cannot be written.
    """
    found: dict[str, int] = {}
    if isinstance(report, WeightReport):
        engine = report.found
        found.update(report.counts.items())
    else:
        words = ("same", "different", "cannot tell")
        engine, found = report.endpoint, {one: int(one == report.verdict) for one in words}
    name = json.dumps(safe_line(engine), ensure_ascii=False)
    lines = [
        "# HELP deltawire_attested Tensors, or looks by log-probabilities, with each verdict",
        "# TYPE deltawire_attested gauge",
        *(
            f'deltawire_attested{{engine={name},verdict="{word}"}} {value}'
            for word, value in found.items()
        ),
        "# HELP deltawire_attest_alarm 1 while the engine holds other weights",
        "# TYPE deltawire_attest_alarm gauge",
        f"deltawire_attest_alarm{{engine={name}}} {int(bool(report.problem))}",
        "# HELP deltawire_attest_time_seconds When the engine was looked at last",
        "# TYPE deltawire_attest_time_seconds gauge",
        f"deltawire_attest_time_seconds{{engine={name}}} {time.time():.3f}",
    ]
    data = "".join(f"{line}\n" for line in lines).encode()
    replace_private(Path(path), data, mode=0o644)  # node_exporter is another user.


def print_report(report: WeightReport, console: Console) -> None:
    """Prints what differs, and the counts."""
    for one in [one for one in report.tensors if one.verdict != "equal"][:SHOWN]:
        parts: list[str] = [one.verdict]
        parts += [f"on rank {', '.join(map(str, one.ranks))}"] if one.ranks else []
        parts += [one.text] if one.text else []
        parts += [f"{one.changed} elements differ"] if one.changed is not None else []
        console.print(safe_line(f"{one.name}: {'; '.join(parts)}"), markup=False)
    hidden = sum(one.verdict != "equal" for one in report.tensors) - SHOWN
    if hidden > 0:
        console.print(f"… and {hidden} more; --json lists all")
    for name in report.unexpected[:SHOWN]:
        console.print(safe_line(f"{name}: the reference does not have it"), markup=False)
    for name in report.uncovered[:SHOWN]:
        console.print(safe_line(f"no digest reads the live parameter {name}"), markup=False)
    for name in report.untouched[:SHOWN]:
        text = f"no update has changed the live parameter {name} since loading"
        console.print(safe_line(text), markup=False)
    for note in report.notes:
        console.print(safe_line(note), markup=False)
    counts = ", ".join(f"{number} {word}" for word, number in report.counts.items() if number)
    console.print(safe_line(f"{report.found} against {report.reference}: {counts}"), markup=False)
