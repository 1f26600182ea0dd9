"""Answer rows: what a gateway stores of an answer, with consent and without.

With consent that is all that training needs. Without consent it is `judged_row`, and only of users
whom a canary assigned at random: its fields are those that say whether the arm served its users.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from deltawire.live.capture.marks import marks_of
from deltawire.live.gateway.engine_tokens import AnswerReader, ChoiceTokens
from deltawire.live.gateway.requests import AskedAnswer
from deltawire.live.gateway.user_figures import Label
from deltawire.wire.captures import FAILED, Capture
from deltawire.wire.decisions import Assignment
from deltawire.wire.receipts import Receipt
from deltawire.wire.user_windows import MOST_LABEL


@dataclass(frozen=True)
class ServedRequest:
    """A request that is being answered: its conversation and user as pseudonyms, whether it may be
    stored, and who the product says it is for. ``client`` is the name of its API key. Requests of
    one ``affinity`` go to one replica. ``known`` says that the user was not forgotten, ``retried``
    that a replica failed and another got the request, ``upstream`` which other provider's model got
    it last, ``held`` which version its replica held."""

    asked: AskedAnswer
    conversation: str
    user: str
    capture: bool
    assignment: Assignment
    task: str = ""
    cohort: str = ""
    client: str = ""
    affinity: str = ""
    known: bool = True
    retried: bool = False
    upstream: str = ""
    held: int | None = None
    began: float = field(default_factory=time.time)

    @property
    def labels(self) -> list[Label]:
        """The labels that its results are counted by; users who refused storage have no task."""
        found = [Label("client", self.client)] if self.client else []
        if self.task and self.capture:
            found.append(Label("task", self.task[:MOST_LABEL]))
        return found

    @property
    def judged(self) -> bool:
        """The answer is an outcome of a canary, or is compared with those of the hold-back version,
        stored or not."""
        drawn = self.assignment.propensity < 1 or self.assignment.kept > 0
        return self.known and bool(self.user) and drawn


def receipt_of(
    run: str,
    served: ServedRequest,
    spans: Sequence[tuple[int, int]],
    *,
    recorded: bool,
    tokens: str = "",
) -> Receipt:
    """Returns a new receipt for an answer whose tokens the versions of ``spans`` drew."""
    return Receipt(
        run=run,
        answer=secrets.token_hex(16),
        conversation=served.conversation,
        turn=min(served.asked.turn, 1 << 20),
        user=served.user,
        arm=served.assignment.arm,
        propensity=served.assignment.propensity,
        spans=list(spans),
        tokens=tokens,
        recorded=recorded,
        at=time.time(),
    )


def capture_row(
    served: ServedRequest,
    reader: AnswerReader,
    choice: ChoiceTokens,
    receipt: Receipt,
    sealed: str,
    fault: str,
    first_s: float,
) -> Capture:
    """Returns the row of an answer that may be stored; ``fault`` says why it is unusable."""
    usable = not fault
    return Capture(
        answer=receipt.answer,
        conversation=receipt.conversation,
        turn=receipt.turn,
        user=receipt.user,
        cohort=served.cohort,
        task=served.task,
        arm=receipt.arm,
        propensity=receipt.propensity,
        kept=served.assignment.kept or None,
        at=receipt.at,
        receipt=sealed,
        model=reader.model,
        finish=choice.finish or FAILED,  # An answer ends by saying why.
        temperature=max(0.0, served.asked.temperature),
        truncated=served.asked.truncated,
        prompt=np.asarray(reader.prompt, "<i4").tobytes() if usable else b"",
        tokens=np.asarray(choice.ids, "<i4").tobytes() if usable else b"",
        logprobs=np.asarray(choice.logprobs, "<f4").tobytes() if usable else b"",
        spans=receipt.spans if usable else [],
        unusable=fault,
        drawn=None if usable else drawn_tokens(reader, choice),
        first_s=first_s,
        total_s=receipt.at - served.began,
        retried=served.retried,
        upstream=served.upstream,
        calls=len(choice.calls),
        broken_calls=choice.broken_calls,
        marks=marks_of("".join(choice.text), calls=len(choice.calls)),
    )


def drawn_tokens(reader: AnswerReader, choice: ChoiceTokens) -> int | None:
    """Returns how many tokens a choice has, by its ids or else by what the engine counted; None if
    it stated neither, or several choices have one count."""
    if choice.ids:
        return len(choice.ids)
    return reader.completion_tokens if len(reader.choices) == 1 else None


def judged_row(
    served: ServedRequest,
    receipt: Receipt,
    spans: Sequence[tuple[int, int]],
    *,
    finish: str,
    first_s: float,
    why: str,
) -> Capture:
    """Returns the row of an answer that may not be stored, which ``why`` says. It has no text,
    tokens, marks or labels, and names no conversation: the answer's own number takes its place."""
    return Capture(
        answer=receipt.answer,
        conversation=receipt.answer,
        turn=0,
        user=receipt.user,
        arm=receipt.arm,
        propensity=receipt.propensity,
        kept=served.assignment.kept or None,
        at=receipt.at,
        receipt="",
        finish=finish,
        spans=[(version, 1) for version, _ in spans],
        unusable=why,
        first_s=first_s,
        total_s=receipt.at - served.began,
        retried=served.retried,
        upstream=served.upstream,
    )
