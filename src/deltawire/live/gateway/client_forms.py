"""The forms in which clients get answers, as chunks or whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from deltawire.live.gateway.events import DONE
from deltawire.serving.errors import error_body


class ClientForm(Protocol):
    """The form in which one client gets its answer. `Mapping`s are of a chat or a completion, as
    the client may see them; ``member`` has the receipts."""

    def whole(self, body: Mapping[str, Any], member: Mapping[str, Any]) -> bytes:
        """Returns a whole answer."""
        ...

    def chunk(self, body: Mapping[str, Any]) -> bytes:
        """Returns the events of a chunk before the last."""
        ...

    def end(self, held: Sequence[Mapping[str, Any]], member: Mapping[str, Any]) -> bytes:
        """Returns the events of the chunks that waited for the receipts, and of the end."""
        ...

    def failed(self, message: str) -> bytes:
        """Returns an event that takes the place of one that is no answer."""
        ...


class ChatForm:
    """Chats and completions: chunks as they come, and the receipts in the last of them."""

    def whole(self, body: Mapping[str, Any], member: Mapping[str, Any]) -> bytes:
        """Returns a whole answer."""
        return msgspec.json.encode({**body, "deltawire": member})

    def chunk(self, body: Mapping[str, Any]) -> bytes:
        """Returns the event of a chunk."""
        return b"data: %s\n\n" % msgspec.json.encode(body)

    def end(self, held: Sequence[Mapping[str, Any]], member: Mapping[str, Any]) -> bytes:
        """Returns the last chunks, with the receipts in the last of them."""
        rows = list(held)
        if rows:
            rows[-1] = {**rows[-1], "deltawire": member}
        return b"".join(map(self.chunk, rows)) + b"data: %s\n\n" % DONE

    def failed(self, message: str) -> bytes:
        """Returns the event of an error."""
        return b"data: %s\n\n" % error_body(500, message)
