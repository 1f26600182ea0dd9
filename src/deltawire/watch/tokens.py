"""Text of single tokens, in the characters that they add to the text before them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deltawire.errors import DeltawireError
from deltawire.store import Bucket
from deltawire.wire.run import Run

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 8
"""Tokens that may make up one character: byte tokens of a character, and a joiner."""


class TokenText(NamedTuple):
    """The text of one token; ``special`` for a token that only a template writes."""

    text: str
    special: bool


class TokenTexts:
    """Decodes tokens one by one with the run's tokenizer, which is loaded at the first use.

    Without a tokenizer, for example where transformers is not installed, tokens are shown as
    numbers, and ``missing`` says why.
    """

    def __init__(self, bucket: Bucket, run: Run) -> None:
        self._bucket = bucket
        self._run = run
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._special: frozenset[int] = frozenset()
        self._loaded = False
        self.missing = ""

    def pieces(self, tokens: Sequence[int]) -> list[TokenText]:
        """The text of each token. A character that several tokens spell is the last one's."""
        with self._lock:
            if not self._loaded:
                self._load()
            if self._tokenizer is None:
                return [TokenText(f"⟨{token}⟩", special=False) for token in tokens]
            return decode_each(tokens, self._decode, self._special)

    def _decode(self, tokens: Sequence[int]) -> str:
        decoded = self._tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(decoded)

    def _load(self) -> None:
        self._loaded = True
        try:
            from deltawire.export.models import fetch_model_files, load_tokenizer

            with fetch_model_files(self._bucket, self._run) as folder:
                self._tokenizer = load_tokenizer(Path(folder))
        except DeltawireError as error:
            self.missing = error.message
        except ImportError as error:
            self.missing = f"{error.name} is not installed; install deltawire[rl]"
        if self._tokenizer is not None:
            added = getattr(self._tokenizer, "added_tokens_decoder", {})
            marked = {number for number, token in added.items() if getattr(token, "special", False)}
            self._special = frozenset(marked | set(self._tokenizer.all_special_ids))


def decode_each(
    tokens: Sequence[int], decode: Any, special: frozenset[int] = frozenset()
) -> list[TokenText]:
    """Decodes each token in the context of those before it.

    A tokenizer drops or adds spaces at the start of a text and spells some characters with several
    tokens, so a token's text is what it adds to the decoded text of its predecessors.
    """
    pieces: list[TokenText] = []
    prefix = read = 0
    before = ""
    for place, token in enumerate(tokens):
        if token in special:
            pieces.append(TokenText(str(decode([token])), special=True))
            prefix = read = place + 1
            before = ""
            continue
        text = str(decode(tokens[prefix : place + 1]))
        unfinished = text.endswith(REPLACEMENT) and place + 1 - read < LONGEST_CHARACTER
        if unfinished or len(text) < len(before):
            pieces.append(TokenText("", special=False))
            continue
        pieces.append(TokenText(text[len(before) :], special=False))
        prefix, read = read, place + 1
        before = str(decode(tokens[prefix:read]))
    return pieces
