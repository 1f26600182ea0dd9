"""Corrections: trained answers whose reward would be another one now.

A report may come after its answer was trained on: a rejection after an accept, or any report after
silence. The training stays, but the answer is counted, and the learner's next lineage names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deltawire.wire.lineage import MAX_ANSWERS, Correction


@dataclass
class _Trained:
    reward: float
    """The last one that is known: the trained one, or that of the last correction."""
    own: bool
    reports: int | None = None
    corrected: bool = False


class Corrections:
    """The trained answers, and the corrections that no lineage names yet.

    Example::

        corrections = Corrections()
        corrections.add("0f…", 0.75, own=True)
        corrections.check("0f…", 2, lambda: -0.25, now=time.time())
        corrections.take()
    """

    def __init__(self) -> None:
        self._trained: dict[str, _Trained] = {}
        self._pending: dict[str, Correction] = {}

    def add(self, answer: str, reward: float, *, own: bool) -> None:
        """Notes what an answer was trained on as; ``own`` if this learner made its group."""
        self._trained[answer] = _Trained(reward, own)

    def recorded(self, correction: Correction) -> None:
        """Takes a correction that a lineage names already."""
        known = self._trained.get(correction.answer)
        if known is not None:
            known.reward, known.corrected = correction.reward, True

    def check(
        self, answer: str, reports: int, reward: Callable[[], float | None], *, now: float
    ) -> bool:
        """Returns whether a trained answer was corrected; its ``reward`` is asked for once for each
        number of ``reports``."""
        known = self._trained.get(answer)
        if known is None:
            return False
        if known.reports != reports:
            known.reports, found = reports, reward()
            if found is not None and abs(found - known.reward) > 1e-9:
                known.reward, known.corrected = found, True
                if known.own:
                    self._pending[answer] = Correction(answer, found, now)
        return known.corrected

    def take(self) -> list[Correction]:
        """Returns the corrections for the next lineage, and forgets them."""
        taken = list(self._pending.values())[:MAX_ANSWERS]
        for one in taken:
            del self._pending[one.answer]
        return taken
