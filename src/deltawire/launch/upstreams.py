"""Reads which other providers' models a gateway may ask, and the keys for them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from deltawire.errors import InputError
from deltawire.launch.tokens import read_token
from deltawire.runtime.children import UPSTREAM_KEY as KEY_VARIABLE
from deltawire.wire.decisions import ServedVersion

MOST_UPSTREAMS = 16
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
    places = _named("--upstream", urls)
    named = _named("--upstream-model", models)
    files = _named("--upstream-key-file", key_files)
    if len(places) > MOST_UPSTREAMS:
        raise InputError(f"{len(places)} upstreams; a gateway has at most {MOST_UPSTREAMS}")
    for option, found in (("--upstream-model", named), ("--upstream-key-file", files)):
        if odd := found.keys() - places.keys():
            raise InputError(f"{option} names {min(odd)}, which no --upstream does")
    return [_place(name, url, named, files) for name, url in places.items()]


def _place(
    name: str, url: str, models: Mapping[str, str], files: Mapping[str, str]
) -> UpstreamPlace:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise InputError(
            f"--upstream {name}: no http:// or https:// URL",
            hint="give the base URL of OpenAI's clients, such as https://api.openai.com/v1",
        )
    variable = KEY_VARIABLE + name.upper().replace("-", "_")
    if "@" in parts.netloc:
        raise InputError(
            f"--upstream {name}: the URL contains credentials", hint=f"put its key into {variable}"
        )
    if not 0 < len(models.get(name, "")) <= MOST_MODEL:
        raise InputError(
            f"--upstream {name} needs the provider's name for its model",
            hint=f"give --upstream-model {name}=MODEL",
        )
    key = read_token(files.get(name, ""), variable)
    if key and parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise InputError(
            f"--upstream {name}: its key would be sent in clear text", hint="give an https:// URL"
        )
    return UpstreamPlace(name, url, models[name], key)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _named(option: str, values: Sequence[str]) -> dict[str, str]:
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
