"""Edits: the tokens of the better answer that a report of the kind ``edit`` carries.

The served answer's thinking is kept, since the user saw and changed only what came after it. The
text is encoded as text: it becomes none of the template's control tokens. The turn ends as the
served one did, or with the template's end where that was cut off.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from deltawire.chat.text import Text
from deltawire.chat.thinking import ThinkingFormat
from deltawire.config import RunConfig, ThinkingConfig
from deltawire.errors import InputError
from deltawire.wire.captures import Capture, Feedback

EDIT = "edit"


def edit_name(report: Feedback) -> str:
    """Returns the name of an edit in a lineage: a hash, because an id may be any text."""
    return blake3("\0".join(report.identity).encode()).hexdigest()[:32]


def newest_edit(reports: Iterable[Feedback]) -> Feedback | None:
    """Returns the newest edit that has a text; of equally new ones that of the largest id."""
    edits = [one for one in reports if one.kind == EDIT and one.text]
    return max(edits, key=lambda one: (one.at, one.received, one.identity), default=None)


class EditEncoder:
    """Encodes edits as answers of a run's model.

    Example::

        encoder = EditEncoder(text_of(config, tokenizer, bucket=url), config)
        encoder.tokens(capture, report)
    """

    def __init__(self, text: Text, config: RunConfig) -> None:
        self._text = text
        self._context = config.rollout.context
        self._format: ThinkingFormat | None = None
        with suppress(InputError):  # A model without marks of thinking.
            self._format = ThinkingFormat.of(text, config.rollout.thinking or ThinkingConfig())

    def tokens(self, capture: Capture, report: Feedback) -> NDArray[np.int32]:
        """Returns the better answer: int32[T]; empty if it does not fit into the context, or is
        the served answer."""
        served = capture.token_ids.tolist()
        thought = self._format.end.place(served) if self._format is not None else 0
        better = [*served[:thought], *self._text.encode(report.text), *self._end_of(capture)]
        if better == served or len(better) + len(capture.prompt_ids) > self._context:
            return np.zeros(0, np.int32)
        return np.array(better, np.int32)

    def _end_of(self, capture: Capture) -> list[int]:
        """The token that ends the turn: the served one, if it was such a token."""
        last: list[int] = capture.token_ids[-1:].tolist()
        if capture.finish != "length" and last and not self._text.decode(last):
            return last
        return [] if self._text.end is None else [self._text.end]
