"""Logs of servers: a line with time, level and request id, or a JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

from deltawire.display import safe_line
from deltawire.serving.request_ids import REQUEST_ID

LogFormat = Literal["text", "json"]


def configure_logs(form: LogFormat) -> None:
    """Sends the log of this process to its standard error, from level INFO on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logger = logging.getLogger("deltawire")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


class TextLines(logging.Formatter):
    """``2026-01-31T12:00:00.123Z WARNING deltawire.live [request id] message``."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as one line without control characters."""
        found = _facts(record)
        named = f" [{found['request']}]" if "request" in found else ""
        return safe_line(
            f"{found['at']} {found['level']} {found['logger']}{named} {found['message']}"
        )


class JsonLines(logging.Formatter):
    """A JSON object a line: ``at``, ``level``, ``logger``, ``message``, and ``request`` in one."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as one line."""
        return json.dumps(_facts(record))


def _facts(record: logging.LogRecord) -> dict[str, str]:
    at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    found = {
        "at": at.replace("+00:00", "Z"),
        "level": record.levelname,
        "logger": record.name,
        "message": record.getMessage(),
    }
    if named := REQUEST_ID.get():
        found["request"] = named
    return found
