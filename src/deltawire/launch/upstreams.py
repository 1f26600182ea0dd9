"""Reads which other servers a gateway may ask, and the keys for them: other providers' models,
judges, and content filters."""

from __future__ import annotations

import ipaddress
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from deltawire.errors import InputError
from deltawire.launch.tokens import read_token
from deltawire.live.gateway.content_filter import ContentFilter
from deltawire.live.gateway.judges import Judge
from deltawire.runtime.children import UPSTREAM_KEY as KEY_VARIABLE
from deltawire.serving.http_answers import http_parts
from deltawire.wire.decisions import ServedVersion

_LOG = logging.getLogger("deltawire.live")
MOST_UPSTREAMS = 16
MOST_JUDGES = 8
MOST_MODEL = 256
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}\Z")


@dataclass(frozen=True)
class UpstreamPlace:
    """One upstream as the operator states it. ``key`` is empty for a server that needs none."""

    name: str
    url: str
    model: str
    key: str = ""


def read_upstreams(
    urls: Sequence[str], models: Sequence[str], key_files: Sequence[str]
) -> list[UpstreamPlace]:
    """Returns the upstreams of ``--upstream``, ``--upstream-model`` and ``--upstream-key-file``,
    each of the form ``NAME=VALUE``; raises `InputError`.

    Example::

        read_upstreams(["openai=https://api.openai.com/v1"], ["openai=gpt-x"], [])
    """
    places = named_values("--upstream", urls)
    named = named_values("--upstream-model", models)
    files = named_values("--upstream-key-file", key_files)
    if len(places) > MOST_UPSTREAMS:
        raise InputError(f"{len(places)} upstreams; a gateway has at most {MOST_UPSTREAMS}")
    for option, found in (("--upstream-model", named), ("--upstream-key-file", files)):
        if odd := found.keys() - places.keys():
            raise InputError(f"{option} names {min(odd)}, which no --upstream does")
    return [_place(name, url, named, files) for name, url in places.items()]


def _place(
    name: str, url: str, models: Mapping[str, str], files: Mapping[str, str]
) -> UpstreamPlace:
    variable = KEY_VARIABLE + name.upper().replace("-", "_")
    if "?" in url:
        raise InputError(
            f"--upstream {name}: its URL has a query",
            hint="give the base URL of OpenAI's clients, such as https://api.openai.com/v1",
        )
    if not 0 < len(models.get(name, "")) <= MOST_MODEL:
        raise InputError(
            f"--upstream {name} needs the provider's name for its model",
            hint=f"give --upstream-model {name}=MODEL",
        )
    key = read_token(files.get(name, ""), variable)
    check_server_url(f"--upstream {name}", url, key=key)
    return UpstreamPlace(name, url, models[name], key)


def check_server_url(option: str, url: str, *, key: str) -> None:
    """Raises `InputError` for what is no URL of a server, holds credentials, or would have ``key``
    sent in clear text."""
    parts = http_parts(url)
    if parts is None:
        raise InputError(
            f"{option}: no http:// or https:// URL",
            hint="give an address such as https://api.example.com/v1",
        )
    if "@" in parts.netloc:
        raise InputError(f"{option}: the URL contains credentials", hint="put its key into a file")
    if key and parts.scheme == "http" and not _is_loopback(parts.hostname or ""):
        raise InputError(
            f"{option}: its key would be sent in clear text", hint="give an https:// URL"
        )


def read_judges(
    urls: Sequence[str], key_files: Sequence[str], *, share: float
) -> tuple[Judge, ...]:
    """Returns the judges of ``--judge`` and ``--judge-key-file``, each of the form ``NAME=VALUE``;
    raises `InputError`."""
    places, files = named_values("--judge", urls), named_values("--judge-key-file", key_files)
    if odd := files.keys() - places.keys():
        raise InputError(f"--judge-key-file names {min(odd)}, which no --judge does")
    if len(places) > MOST_JUDGES:
        raise InputError(f"{len(places)} judges; a gateway has at most {MOST_JUDGES}")
    found = []
    for name, url in places.items():
        key = read_token(files[name]) if name in files else ""
        check_server_url(f"--judge {name}", url, key=key)
        _warn_of_clear_text(f"--judge {name}", url)
        found.append(Judge(name, url, key, share))
    return tuple(found)


def read_filter(
    before: str, after: str, key_file: str, *, open_on_failure: bool = False
) -> ContentFilter:
    """Returns the content filter of ``--filter-request``, ``--filter-answer`` and
    ``--filter-key-file``; raises `InputError`."""
    key = read_token(key_file) if key_file else ""
    for option, url in (("--filter-request", before), ("--filter-answer", after)):
        if url:
            check_server_url(option, url, key=key)
            _warn_of_clear_text(option, url)
    return ContentFilter(before=before, after=after, key=key, open_on_failure=open_on_failure)


def _warn_of_clear_text(option: str, url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme == "http" and not _is_loopback(parts.hostname or ""):
        _LOG.warning("%s gets users' texts in clear text: %s is no https:// URL", option, url)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def named_values(option: str, values: Sequence[str]) -> dict[str, str]:
    """Returns the values of an option of the form ``NAME=VALUE`` by their names; raises
    `InputError`."""
    found: dict[str, str] = {}
    for value in values:
        name, given, rest = value.partition("=")
        if not given or not rest or not _NAME.match(name):
            raise InputError(
                f"{option} needs NAME=VALUE, and a name of small letters, digits and hyphens"
            )
        if name in found:
            raise InputError(f"{option} names {name} twice")
        found[name] = rest
    return found


def target_of(
    version: int | None, upstream: str, served: Callable[[int], ServedVersion]
) -> ServedVersion | None:
    """Returns the version or upstream that a person names; None without either. ``served`` returns
    a version of the run. Raises `InputError` for both, and for a name that is none."""
    if not upstream:
        return None if version is None else served(version)
    if version is not None:
        raise InputError("give --version or --upstream, not both")
    if not _NAME.match(upstream):
        raise InputError(
            f"{upstream[:64]!r} is no name of an upstream",
            hint="1 to 32 small letters, digits and hyphens, as in the gateway's --upstream",
        )
    return ServedVersion.of_upstream(upstream)
