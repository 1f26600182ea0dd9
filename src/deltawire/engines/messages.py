"""What is said between a model and its surroundings: messages, tools, and calls of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class ToolCall:
    """A call that a model wrote: the tool's name and its arguments by name. ``identity`` is what
    the answer refers to, where anything does."""

    name: str
    arguments: Mapping[str, Any]
    identity: str = ""


@dataclass(frozen=True)
class Message:
    """One message. ``calls`` belong to an assistant's; ``call`` (an identity) and ``name`` to the
    tool's that answers one."""

    role: Role
    content: str
    name: str = ""
    call: str = ""
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. ``parameters`` is the JSON schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"type": "object", "properties": {}}
    )

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates and chat endpoints spell it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}
