"""Tool calls in what a model wrote: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.

This is the form of Qwen's and Hermes' chat templates; a model without a template may be taught it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from deltawire.engines.messages import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CALLS = 64
"""Calls of one turn; any further ones count as broken."""

_CALL = re.compile(f"{OPEN}(.*?)(?:{CLOSE}|(?={OPEN})|\\Z)", re.DOTALL)


@dataclass(frozen=True)
class Written:
    """A turn's text, taken apart: what stands outside the calls, the calls, and what began as
    one and is none."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    broken: tuple[str, ...] = ()


def read_calls(text: str, *, prefix: str = "call") -> Written:
    """Take a turn's text apart. Calls are named ``<prefix>-0``, ``<prefix>-1``, …"""
    calls: list[ToolCall] = []
    broken: list[str] = []
    for found in _CALL.finditer(text):
        call = None
        if found.group(0).endswith(CLOSE) and len(calls) < MAX_CALLS:
            call = _read(found.group(1), f"{prefix}-{len(calls)}")
        if call is None:
            broken.append(found.group(0))
        else:
            calls.append(call)
    content = _CALL.sub("", text) if calls or broken else text
    return Written(content.strip() if calls or broken else content, tuple(calls), tuple(broken))


def _read(body: str, identity: str) -> ToolCall | None:
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str) or not raw["name"]:
        return None
    arguments = raw.get("arguments", {})
    return ToolCall(raw["name"], arguments, identity) if isinstance(arguments, dict) else None
