"""Makes text from outside safe to show: no control sequences, no markup, no credentials.

Names of runs, workers, tasks, tensors and files come from a bucket, and whoever writes to the
bucket chooses them. Settings and messages may contain credentials, and reports, events and trackers
are read by more people than hold those credentials.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

REDACTED = "[redacted]"
LONGEST_LINE = 4000
_REDACTED_CHARACTERS = 1 << 16
"""Characters of a message that `safe_line` redacts; it shows fewer of them."""

_SECRET_WORDS = frozenset(
    [
        *("apikey", "auth", "authorization", "bearer", "cookie", "credential", "credentials"),
        *("passphrase", "passwd", "password", "pwd", "secret", "secrets", "sig", "signature"),
        "token",
    ]
)
_HARMLESS_ENDS = frozenset(["env", "error", "exception", "file", "name", "path", "var", "variable"])
_SENTENCE_WORDS = frozenset(
    [
        *("and", "as", "for", "if", "in", "is", "of", "on", "or", "that", "the", "to", "with"),
        *("DIR", "FILE", "FOLDER", "NAME=FILE"),
    ]
)
"""Words after an option in a sentence, and placeholders: none of them is a credential."""
_WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
# A path that a URL was taken for has one slash.
_AUTHORITY = re.compile(r"(?<=[A-Za-z0-9+.-]{2}:/)/?([^\s/@:]*+)")
_WORD = re.compile(r"\S++")
# A name is tried where it begins only, and never given back: the text of a message is unbounded.
_ASSIGNED = re.compile(
    r"""(?<![\w%-])(?P<name>[\w%-]++)(?P<between>["']?\s*+[=:]\s*+["']|=)"""
    r"""(?P<value>[^\s&;,"']++)"""
    r"|(?<![\w%-])(?P<option>(?=[\w%-]*?--[\w-])[\w%-]++)(?P<space>\s++)(?P<argument>[^\s-]\S*+)"
)
_KNOWN_FORMS = re.compile(
    r"\b(?:sk-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}|AIza[\w-]{35})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[^-]|-(?!----))*(?:-----END [A-Z ]*PRIVATE KEY-----)?"
)


def legible(text: str, limit: int = 40) -> str:
    """Make ``text`` safe to show: one line, no control characters, at most ``limit`` long.

    Every character that `str.isprintable` refuses becomes a dot: C0 and C1 controls, so all escape
    sequences; bidirectional overrides and other format characters; line separators; lone
    surrogates. Markup is left as it is: pass the result to `rich.text.Text` or `html.escape`.
    """
    shown = "".join(letter if letter.isprintable() else "·" for letter in text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def legible_lines(text: str, limit: int = 4000) -> str:
    """Make a text of several lines safe to show: `legible`, but for its line feeds and tabs."""
    shown = "".join(
        letter if letter.isprintable() or letter in "\n\t" else "·" for letter in text[: limit + 1]
    )
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def safe_line(text: str) -> str:
    """Make a message safe to print or to log: legible, of any usual length, without credentials.

    Of a message that is far too long, the start is redacted and shown: whole words, because half a
    credential may not look like one.
    """
    if len(text) > _REDACTED_CHARACTERS:
        words = text[:_REDACTED_CHARACTERS]
        text = words[: max(words.rfind(space) for space in " \n\t") + 1] + "…"
    return legible(redact(text), LONGEST_LINE)


def safe_json(value: Any) -> str:
    """Encode as JSON in printable ASCII, so that a terminal shows names and does not obey them."""
    import msgspec  # Slow to import; only the commands that print JSON need it.

    plain = json.loads(msgspec.json.encode(value))
    return json.dumps(plain, separators=(",", ":"), ensure_ascii=True)


def looks_secret(name: str) -> bool:
    """Tell whether a setting of this name probably holds a credential: ``api_key``, ``hubToken``.

    Names of public keys, of files and variables that hold a credential, and of exceptions do not.
    """
    words = [word.lower() for word in _WORDS.findall(unquote(name))]
    if not words or words[-1] in _HARMLESS_ENDS or "public" in words:
        return False
    return "key" in words or not _SECRET_WORDS.isdisjoint(words)


def redact(value: Any, name: str = "") -> Any:
    """Replace credentials in a setting, a message, a command line, or nested settings.

    Redacted are the texts of settings whose ``name`` looks like a key, user and password in URLs,
    assignments and options in text (``token=…``, ``--api-key …``), and keys of well-known form.

    Example::

        redact({"task": {"options": {"api_key": "abc"}}})  # {"task": {"options": {"api_key": …
    """
    if isinstance(value, Mapping):
        return {key: redact(one, str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [redact(one, name) for one in value]
    if not isinstance(value, str) or not value:
        return value
    if looks_secret(name):
        return REDACTED
    if "@" in value:
        value = _WORD.sub(_redact_users, value)
    return _KNOWN_FORMS.sub(REDACTED, _ASSIGNED.sub(_redact_assignment, value))


def _redact_users(found: re.Match[str]) -> str:
    """Replaces user and password of each URL in a word, reading it once."""
    word = found[0]
    last, shown, done = word.rfind("@"), [], 0
    for authority in _AUTHORITY.finditer(word):
        start, end = authority.span(1)
        after = word[end : end + 1]
        if after == ":" and end < last:  # A password may contain any character, also an @.
            end = last
        elif after != "@" or start == end:
            continue
        shown += [word[done:start], REDACTED]
        done = end
        if end == last:
            break
    return "".join([*shown, word[done:]])


def _redact_assignment(found: re.Match[str]) -> str:
    if found["option"] is not None:
        secret = looks_secret(found["option"].partition("--")[2])
        secret = secret and found["argument"].strip(",.;:)") not in _SENTENCE_WORDS
        return f"{found['option']}{found['space']}{REDACTED}" if secret else found[0]
    secret = looks_secret(found["name"])
    return f"{found['name']}{found['between']}{REDACTED}" if secret else found[0]


def has_credentials(location: str) -> bool:
    """Tell whether a bucket's URL contains a user, a password, or a parameter that looks secret."""
    if ":/" not in location.replace("\\", "/"):
        return False
    scheme, _, rest = location.replace("\\", "/").partition(":")
    authority = re.split(r"[/?#]", rest.lstrip("/"), maxsplit=1)[0]
    authority = unquote(authority)
    # Azure's own form is abfs://container@account, and a file's or a drive's path is no authority.
    if scheme.lower() not in ("", "file") and len(scheme) > 1:
        user, at, _ = authority.rpartition("@")
        if (at and (":" in user or not scheme.lower().startswith("abfs"))) or ":" in authority:
            return True
    fields = re.split("[?#&;]", rest)[1:]
    return any(looks_secret(field.partition("=")[0]) for field in fields)


def time_of(at: float) -> str:
    """Returns a time in seconds since 1970 as people read it, in UTC."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"{at:g} s"
