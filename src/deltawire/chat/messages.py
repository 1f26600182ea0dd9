"""Messages between a model and its surroundings, tools, and calls of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class ToolCall:
    """A call that a model wrote: the tool's name and its arguments by name. The tool's answer
    refers to ``identity``, where templates use one.

    Example::

        ToolCall("add", {"a": 1, "b": 2})
    """

    name: str
    arguments: Mapping[str, Any]
    identity: str = ""


@dataclass(frozen=True)
class Message:
    """One message. ``calls`` belong to an assistant's message; ``call`` (an identity) and ``name``
    to a tool's answer.

    Example::

        Message("user", "What is 2 + 3?")
    """

    role: Role
    content: str
    name: str = ""
    call: str = ""
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. ``parameters`` is the JSON schema of an object.

    Example::

        Tool("add", "Adds two numbers.", {"type": "object", "properties": {"a": …, "b": …}})
    """

    name: str
    description: str
    parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"type": "object", "properties": {}}
    )

    @property
    def schema(self) -> dict[str, Any]:
        """The form that chat templates and chat endpoints use."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


def shorten(message: Message, limit: int) -> Message:
    """Cuts a message to about ``limit`` characters: its head, the size of the cut, its tail."""
    excess = len(message.content) - limit
    if excess <= 0:
        return message
    head, tail = message.content[: (limit + 1) // 2], message.content[-(limit // 2) :]
    note = f"\n[… {excess} characters left out …]\n"
    return replace(message, content=f"{head}{note}{tail if limit > 1 else ''}")
