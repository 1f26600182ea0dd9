"""Findings of an examination: what was looked at, what was found, and what to do about it."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["ok", "note", "problem"]
"""``note`` is something optional or slower; with a ``problem`` something will fail."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was examined.

    Example::

        Finding(area="machine", name="cores", found="2 of 64", status="ok")
    """

    area: str
    name: str
    found: str
    status: Status = "ok"
    fix: str = ""
    """The action that improves it; empty if nothing needs to be done."""
    value: float | None = None
    """The figure in ``found``, if it is one, without rounding."""
    unit: str = ""


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """All findings, with the numbers of problems and of notes.

    Example::

        examination = Examination.of(findings, url="s3://bucket/run")
        assert not examination.problems
    """

    url: str
    findings: list[Finding]
    problems: int
    notes: int

    @classmethod
    def of(cls, findings: list[Finding], *, url: str) -> Examination:
        """Counts the findings by status."""
        counts = {kind: sum(one.status == kind for one in findings) for kind in ("problem", "note")}
        return cls(url=url, findings=findings, problems=counts["problem"], notes=counts["note"])
