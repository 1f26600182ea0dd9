"""Text to tokens and back. Tokens, once made, are never made again from text."""

from __future__ import annotations

from typing import Any


class Text:
    """A Hugging Face tokenizer as the loop uses it.

    A tokenizer with a chat template gets its prompts as a user's message, followed by the start of
    an answer; one without gets them as they are.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._chat = bool(getattr(tokenizer, "chat_template", None))

    def prompt(self, text: str) -> list[int]:
        """The tokens an episode begins with."""
        if not self._chat:
            return self.plain(text)
        rendered = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        return self.plain(str(rendered))

    def plain(self, text: str) -> list[int]:
        """The tokens of a text, with no special ones added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens that the model drew, without special ones."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
