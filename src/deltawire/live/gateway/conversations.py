"""Conversations: remembers each conversation's last answer, so that detectors see how it went on.

In memory only, and bounded: a gateway that restarts misses the signals of the conversations that
were under way.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from deltawire.live.feedback.detectors import COMPARED_CHARACTERS, Continuation
from deltawire.live.gateway.requests import AskedAnswer
from deltawire.wire.receipts import Receipt

MAX_CONVERSATIONS = 20_000


@dataclass(frozen=True)
class LastAnswer:
    """The last answer of a conversation: its receipt, the message it answered, and its text."""

    receipt: Receipt
    asked: str
    text: str
    first_s: float


class Conversations:
    """The last answers of the conversations seen last."""

    def __init__(self, limit: int = MAX_CONVERSATIONS) -> None:
        self._limit = limit
        self._last: OrderedDict[str, LastAnswer] = OrderedDict()

    def remember(self, last: LastAnswer) -> None:
        """Replaces a conversation's last answer."""
        name = last.receipt.conversation
        self._last.pop(name, None)
        self._last[name] = last
        if len(self._last) > self._limit:
            self._last.popitem(last=False)

    def forget(self, user: str) -> None:
        """Drops all conversations of a user."""
        for name in [n for n, one in self._last.items() if one.receipt.user == user]:
            del self._last[name]

    def continued(self, name: str, asked: AskedAnswer) -> tuple[LastAnswer, Continuation] | None:
        """Returns the conversation's last answer and how this request continues it; None if there
        is none, or if the request is neither of the same turn nor of the next."""
        last = self._last.get(name)
        if last is None or asked.turn - last.receipt.turn not in (0, 1):
            return None
        same = asked.turn == last.receipt.turn
        del self._last[name]
        return last, Continuation(
            asked=last.asked,
            answer=last.text,
            next_asked=asked.asked[:COMPARED_CHARACTERS],
            same_turn=same,
            quoted=None if same or asked.quoted is None else asked.quoted[:COMPARED_CHARACTERS],
            first_s=last.first_s,
        )
