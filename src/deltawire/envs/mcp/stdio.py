"""Messages of MCP as lines of a command in the sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator

from deltawire.envs.mcp.faults import ToolServerError, UnreadableAnswerError
from deltawire.envs.sandbox.conversation import (
    CommandEndedError,
    Conversation,
    LineTooLongError,
)


class StdioTransport:
    """A `deltawire.envs.mcp.session.Transport` over a command's stdin and stdout. ``most`` bounds
    the bytes of a message."""

    def __init__(self, talk: Conversation, *, most: int) -> None:
        self._talk = talk
        self._most = most

    async def exchange(self, message: bytes) -> AsyncIterator[bytes]:
        """Sends a message, and yields whatever lines come."""
        await self.post(message)
        while True:
            try:
                yield await self._talk.read(most=self._most)
            except LineTooLongError as error:
                # It is the answer: a server that is asked one thing at a time says little else.
                raise UnreadableAnswerError(
                    f"the server's answer has more than {self._most} bytes"
                ) from error
            except CommandEndedError as error:
                raise ToolServerError(str(error)) from error

    async def post(self, message: bytes) -> None:
        """Sends a message that has no answer."""
        try:
            await self._talk.write(message)
        except CommandEndedError as error:
            raise ToolServerError(str(error)) from error

    def agree(self, version: str) -> None:
        """Does nothing: lines name no version."""

    async def close(self) -> None:
        """Ends the command."""
        await self._talk.close()
