"""Answer ids: names in the headers of answers that can be exchanged for receipts.

A stream's receipt is in its last chunk, which some clients do not show to the program. Its headers
come first and carry an id; the gateway remembers the receipts of the newest answers by it.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict

ANSWER_HEADER = "x-deltawire-answer"
MOST_KEPT = 100_000
"""Of receipts; an answer that has none yet counts as one."""


class AnswerIds:
    """The receipts of the newest answers of this gateway, in memory only.

    Example::

        ids = AnswerIds()
        name = ids.new()            # goes out with the headers
        ids.ended(name, receipts)   # once the answer was stored
        ids.receipts(name)
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._receipts: OrderedDict[str, list[str] | None] = OrderedDict()
        self._most = most
        self._count = 0

    def new(self) -> str:
        """Returns the id of an answer that begins."""
        name = secrets.token_hex(16)
        self._receipts[name] = None
        self._count += 1
        self._forget_oldest()
        return name

    def ended(self, name: str, receipts: list[str]) -> None:
        """Remembers the receipts of an answer."""
        if name in self._receipts:
            self._count += _size(receipts) - _size(self._receipts[name])
            self._receipts[name] = receipts
            self._forget_oldest()

    def dropped(self, name: str) -> None:
        """Forgets an answer that has no receipt: it failed, or its client left."""
        if self._receipts.get(name, []) is None:
            del self._receipts[name]
            self._count -= 1

    def receipts(self, name: str) -> list[str] | None:
        """Returns the receipts of an answer; an empty list while it is under way, None for an id
        that is not known."""
        return (self._receipts[name] or []) if name in self._receipts else None

    def _forget_oldest(self) -> None:
        while self._count > self._most:
            _, receipts = self._receipts.popitem(last=False)
            self._count -= _size(receipts)


def _size(receipts: list[str] | None) -> int:
    return max(len(receipts or ()), 1)
