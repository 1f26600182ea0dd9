"""Redaction by Presidio; needs the extra ``presidio`` and a model of spaCy.

Example::

    deltawire gateway RUN --replica URL --redact deltawire.live.capture.presidio:redact
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

from deltawire.errors import InputError

LANGUAGE = "en"
_BUILDING = threading.Lock()
"""`cache` alone would let each thread that comes before the first has ended build an engine."""


@cache
def _analyzer() -> Any:
    try:
        from presidio_analyzer import AnalyzerEngine
    except ImportError as error:
        raise InputError(
            "redaction by Presidio needs the package presidio-analyzer",
            hint="pip install 'deltawire[presidio]'",
        ) from error
    return AnalyzerEngine()


def redact(texts: list[str]) -> list[str]:
    """Returns the texts with each entity that Presidio finds replaced by ``<KIND>``."""
    with _BUILDING:
        analyzer = _analyzer()
    return [replace_spans(text, analyzer.analyze(text=text, language=LANGUAGE)) for text in texts]


def replace_spans(text: str, found: Sequence[Any]) -> str:
    """Returns ``text`` with the spans of Presidio's results replaced, overlapping ones as one.

    Each result has ``start``, ``end`` and ``entity_type``.
    """
    parts: list[str] = []
    at = 0
    for one in sorted(found, key=lambda one: (one.start, -one.end)):
        if one.start >= at:
            parts += [text[at : one.start], f"<{one.entity_type}>"]
        at = max(at, one.end)
    return "".join([*parts, text[at:]])
