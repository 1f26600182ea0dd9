"""Rebuilding: takes a run back to weights that no answer of a forgotten user has changed.

::

    versions trained on the user ─▶ rollback decision (create) ─▶ trainer restores, as version N + 1
                                                                    │
                          learners group the other answers of withdrawn versions again ◀┘

The decision is the commit: it is an ordinary rollback with the figure `FORGETS`. A trainer follows
it as any other (`deltawire.rl.trainer.rollbacks`), and learners then offer the answers of the
withdrawn versions again (`deltawire.rl.control.released_groups`).

The result is not what a run would be that never saw the user: other users were served by the
withdrawn versions, and their answers and reports depend on them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

from deltawire.errors import InputError
from deltawire.runtime.decision_log import DecisionLog
from deltawire.runtime.needs import config_of
from deltawire.store import Bucket
from deltawire.sync import read_history, read_manifest
from deltawire.wire.decisions import FORGETS, UNDECIDED, Decision, RestoreRecord, ServedVersion
from deltawire.wire.run import Run

State = Literal["not_needed", "waits_for_trainer"]


class Rebuild(NamedTuple):
    """The way back: ``restores`` is the version whose weights the trainer publishes again, as
    ``decision`` asks; None if the newest version does not come from the user's answers.

    Example::

        rebuild = rebuild_without(bucket, run, [7, 9], by="ann", now=time.time())
        rebuild.restores  # 6
    """

    state: State
    decision: int | None = None
    restores: int | None = None


class _Ancestry(NamedTuple):
    clean: dict[int, int]
    """For each version, the last one among its ancestors and itself without the user's answers."""
    newest: int
    followed: int
    """The newest decision that a version restores, -1 for none."""


def check_rebuildable(bucket: Bucket, run: Run) -> None:
    """Raises `InputError` for a run without decisions about which version serves, that another
    provider's model serves, or whose trainer follows no rollback."""
    log = DecisionLog(bucket, run.id)
    log.poll()
    _require_version(log, bucket)
    config = config_of(run, url=bucket.url) if run.config else None
    if config is None or config.midtrain is not None or not config.live.release.restore:
        raise InputError(
            "the run's trainer restores no earlier version, so it cannot be rebuilt",
            hint="forget the user without --rebuild, then start a new run from a version before "
            "those that the command names",
            run=bucket.url,
        )


def rebuild_without(
    bucket: Bucket, run: Run, trained: Collection[int], *, by: str, now: float
) -> Rebuild:
    """Decides to restore the last weights before the versions that were ``trained`` on a user.

    That is the serving version if it does not come from them, since it passed the gate, else the
    last version before the first of them. A decision that the trainer has not followed yet is
    not repeated.

    Raises `InputError` if there are no decisions, if that version was pruned, or if another process
    decides at the same time, and `RetryError`.
    """
    ancestry = _ancestry(bucket, run, trained)
    if ancestry.clean[ancestry.newest] == ancestry.newest:
        return Rebuild("not_needed")
    log = DecisionLog(bucket, run.id)
    log.poll()
    serving = _require_version(log, bucket)
    waiting = _waiting(log, ancestry)
    if waiting is not None:
        return Rebuild("waits_for_trainer", waiting.number, waiting.serving.version)
    is_clean = ancestry.clean.get(serving) == serving
    target = serving if is_clean else ancestry.clean[ancestry.newest]
    decision = Decision(
        number=log.next_number,
        run=run.id,
        verdict="rollback",
        serving=_served(bucket, run, target),
        candidate=_served(bucket, run, ancestry.newest),
        at=now,
        by=by[:64],
        reason="rebuild without the answers of a user who was forgotten",
        evidence={FORGETS: float(len(set(trained)))},
    )
    if not log.append(decision):
        raise InputError(
            "what was stored is deleted, but another decision came before the rebuild",
            hint="run the same command again",
            run=bucket.url,
        )
    return Rebuild("waits_for_trainer", decision.number, target)


def _ancestry(bucket: Bucket, run: Run, trained: Collection[int]) -> _Ancestry:
    clean, newest, followed = {0: 0}, 0, -1
    for manifest in read_history(bucket, run):
        version, parent = manifest.version, newest
        record = RestoreRecord.of(manifest.metadata, run=bucket.url, version=version)
        if record is not None:
            parent = record.restored.version
            followed = max(followed, record.decision)
        before = clean.get(parent, 0)
        clean[version] = version if before == parent and version not in trained else before
        newest = version
    return _Ancestry(clean, newest, followed)


def _require_version(log: DecisionLog, bucket: Bucket) -> int:
    """Returns the version that serves; raises `InputError` if none does, or another provider's
    model: a rebuild would put a version in its place."""
    if log.newest is None:
        raise InputError(
            "no version serves by decision yet, and a rebuild is a decision",
            hint="begin with deltawire live promote --version N, keep deltawire live decide "
            "running, then run the same command again",
            run=bucket.url,
        )
    serving = log.newest.serving
    if serving.upstream:
        raise InputError(
            f"{serving.words} serves, and a rebuild would end that",
            hint="forget the user without --rebuild, and promote no version that the command names",
            run=bucket.url,
        )
    return serving.version


def _waiting(log: DecisionLog, ancestry: _Ancestry) -> Decision | None:
    """Returns the decision to rebuild that the trainer is about to follow."""
    settled = [one for one in log.decisions if one.verdict not in UNDECIDED]
    last = settled[-1] if settled else None
    if last is None or FORGETS not in last.evidence or last.number <= ancestry.followed:
        return None
    version = last.serving.version
    return last if ancestry.clean.get(version) == version else None


def _served(bucket: Bucket, run: Run, version: int) -> ServedVersion:
    manifest = read_manifest(bucket, run, version)
    if manifest is None or manifest.pruned:
        raise InputError(
            f"what was stored is deleted, but version {version} was pruned, and the run cannot be "
            "rebuilt from it",
            hint="start a new run; [retain] says how long versions are kept",
            run=bucket.url,
        )
    return ServedVersion(version, manifest.digest)
