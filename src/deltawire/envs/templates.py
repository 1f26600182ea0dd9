"""Makes a task's prompt of its row: a text or messages with ``{column}`` for the row's values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from deltawire.config import TaskConfig
from deltawire.envs.base import Message
from deltawire.errors import InputError

_ROLES = ("system", "user", "assistant")


def fill(text: str, row: Mapping[str, Any]) -> str:
    """Replaces each ``{column}`` by the row's value: a string as it is, anything else as JSON.
    Braces around anything else stay."""
    if not row:
        return text
    names = "|".join(re.escape(name) for name in sorted(row, key=len, reverse=True))
    return re.sub(f"{{({names})}}", lambda found: as_text(row[found[1]]), text)


def as_text(value: Any) -> str:
    """A value of a row as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def prompt_of(config: TaskConfig, row: Mapping[str, Any]) -> str | list[Message]:
    """The prompt of a row, by ``messages`` if there are any, else by ``prompt``."""
    if config.messages:
        return [Message(one.role, fill(one.content, row)) for one in config.messages]
    return fill(config.prompt, row)


def messages_in(value: Any, *, source: str) -> list[Message]:
    """The messages that a column holds; raises `InputError` naming ``source`` for anything else."""
    messages = []
    for one in value if isinstance(value, Sequence) and not isinstance(value, str) else ():
        role, content = (
            (one.get("role"), one.get("content"))
            if isinstance(one, Mapping)
            else (
                None,
                None,
            )
        )
        if role not in _ROLES or not isinstance(content, str):
            raise InputError(f"{source} is not a message with a role of {', '.join(_ROLES)}")
        messages.append(Message(role, content))
    if not messages or messages[-1].role == "assistant":
        raise InputError(f"{source} is not a list of messages that ends before an answer")
    return messages
