"""Reads what this machine allows a run to do: isolation, ceilings, environments, trusted modules.

A run's configuration comes from its bucket, where every writer can change it. The user of a machine
therefore decides what a run may ask of a worker on it, in a TOML file that the environment
variable ``DELTAWIRE_MACHINE_POLICY`` names, or in ``/etc/deltawire/policy.toml``::

    isolation = "process"              # the weakest isolation that a run may ask for
    environments = ["workspace"]       # names of environments, and mcp for commands that serve
                                       # tools; all that are built in, if left out
    trusted_modules = ["my_package"]   # modules that a run may name, with those of
                                       # DELTAWIRE_TRUSTED_MODULES
    snapshot_dir = "/mnt/nvme"         # a folder on a local disk, for trainers that offload what
                                       # their publishers hold (train.publisher_offload)
    data_dirs = ["/data"]              # files and folders of rows that a run may name, with those
                                       # of DELTAWIRE_DATA_DIRS
    urls = ["https://tools.example/"]  # servers of tools and environments that a run may name, with
                                       # those of DELTAWIRE_ALLOWED_URLS
    interpreters = { openenv = "/opt/openenv/bin/python" }  # what a server of that environment is
                                       # started with, if not this interpreter
    trusted_templates = true           # render chat templates of runs without limits on memory
    workers = ["w*", "lab-7"]          # names whose groups a trainer on this machine reads, with *
                                       # for any characters; all that the run allows, if left out
    [ceilings]                         # a run gets the smaller of its own limit and this one
    wall_s = 600.0
    memory_mib = 4096

Without a file, commands are isolated by namespaces and limited by the ceilings below.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import msgspec

from deltawire.errors import InputError

Isolation = Literal["namespaces", "process"]

POLICY = "DELTAWIRE_MACHINE_POLICY"
TRUSTED = "DELTAWIRE_TRUSTED_MODULES"
"""The environment variable: module names, separated by commas."""
DATA = "DELTAWIRE_DATA_DIRS"
"""The environment variable: files and folders, separated as in PATH."""
URLS = "DELTAWIRE_ALLOWED_URLS"
"""The environment variable: URLs, separated by commas."""
DEFAULT_PATH = Path("/etc/deltawire/policy.toml")


class Ceilings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The most that one command of a run may use; ``at_once`` bounds commands of one worker."""

    wall_s: float = 600.0
    cpu_s: float = 600.0
    cores: int = 8
    memory_mib: int = 8192
    processes: int = 512
    disk_mib: int = 1024
    files: int = 100_000
    output_kib: int = 1024
    at_once: int = 64


class MachinePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The environments, modules and limits that this machine allows.

    Example::

        policy = machine_policy()
        policy.require_environment("workspace")
        seconds = policy.at_most("wall_s", 3600.0)
    """

    isolation: Isolation = "namespaces"
    environments: list[str] | None = None
    trusted_modules: list[str] = []
    data_dirs: list[str] = []
    urls: list[str] = []
    interpreters: dict[str, str] = {}
    workers: list[str] | None = None
    snapshot_dir: str = ""
    trusted_templates: bool = False
    ceilings: Ceilings = Ceilings()

    def require_isolation(self, asked: Isolation) -> None:
        """Raises `InputError` if a run asks for weaker isolation than this machine allows."""
        if asked == "process" and self.isolation == "namespaces":
            raise InputError(
                'the run asks for isolation = "process", which this machine does not allow',
                hint=f'if you trust the run, set isolation = "process" in the file that {POLICY} '
                "names",
            )

    def require_environment(self, name: str) -> None:
        """Raises `InputError` if this machine does not run the environment."""
        if self.environments is not None and name not in self.environments:
            raise InputError(
                f"this machine does not run the environment {name!r}",
                hint=f"its policy allows {', '.join(self.environments) or 'none'}",
            )

    def require_trust(self, module: str, setting: str = "a setting") -> None:
        """Raises `InputError` unless this machine's user has named ``module`` as trusted;
        ``setting`` is what names it."""
        trusted = {*self.trusted_modules, *os.environ.get(TRUSTED, "").split(",")}
        if module not in trusted:
            raise InputError(
                f"{setting} names code of module {module}, which this machine does not trust",
                hint=f"if you trust it, set {TRUSTED}={module} for every process of the run",
            )

    def require_data(self, path: str, setting: str) -> Path:
        """Returns a path of rows that a run names in ``setting``; raises `InputError` unless this
        machine's user has named it or a folder that it lies in."""
        named = [*self.data_dirs, *filter(None, os.environ.get(DATA, "").split(os.pathsep))]
        found = Path(path).resolve()
        if any(found.is_relative_to(Path(one).resolve()) for one in named):
            return Path(path)
        raise InputError(
            f"{setting} names {path[:400]}, which this machine does not give to runs",
            hint=f"if the run may read it, set {DATA} to it, or to a folder above it, for every "
            "process of the run on this machine",
        )

    def require_url(self, url: str, setting: str) -> str:
        """Returns a URL that a run names in ``setting``.

        Raises `InputError` unless this machine's user has named it, or one of the same scheme,
        host and port whose path is a folder that its path lies in; and of the same query, if that
        one has a query. The message holds neither user, password nor query.
        """
        named = [*self.urls, *filter(None, os.environ.get(URLS, "").split(","))]
        if any(_reaches(one, url) for one in named):
            return url
        raise InputError(
            f"{setting} names {_shown(url)}, which this machine does not let runs reach",
            hint=f"if the run may send requests to it, set {URLS} to it for every process of the "
            "run on this machine; user names and passwords in a URL are not supported",
        )

    def publisher_dir(self, offload: Literal["none", "disk"]) -> Path | None:
        """Returns the folder for what publishers hold, None for memory; ``offload`` is a run's
        ``train.publisher_offload``.

        Raises `InputError` if the run offloads and this machine names no folder.
        """
        if offload == "none":
            return None
        if not self.snapshot_dir:
            raise InputError(
                'the run asks for train.publisher_offload = "disk", and this machine has no folder '
                "for it",
                hint=f"set snapshot_dir in {DEFAULT_PATH}, or in the file that {POLICY} names, to "
                "a folder on a local disk",
            )
        return Path(self.snapshot_dir)

    def at_most(self, name: str, asked: float) -> float:
        """Returns the smaller of a run's limit and this machine's ceiling of that name."""
        ceiling: float = getattr(self.ceilings, name)
        return min(asked, ceiling)


def give_data(paths: Iterable[str]) -> None:
    """Lets this process and its children read rows that a configuration of this machine names;
    never pass it paths that were read from a bucket."""
    named = filter(None, os.environ.get(DATA, "").split(os.pathsep))
    added = (str(Path(path).resolve()) for path in paths)
    os.environ[DATA] = os.pathsep.join(dict.fromkeys([*named, *added]))


def give_urls(urls: Iterable[str]) -> None:
    """Lets this process and its children reach servers that a configuration of this machine names;
    never pass it URLs that were read from a bucket."""
    named = filter(None, os.environ.get(URLS, "").split(","))
    os.environ[URLS] = ",".join(dict.fromkeys([*named, *urls]))


def _reaches(allowed: str, url: str) -> bool:
    try:
        one, other = urlsplit(allowed), urlsplit(url)
        same = (one.scheme, one.hostname, one.port) == (other.scheme, other.hostname, other.port)
    except ValueError:  # a port that is no number
        return False
    path, encoded = unquote(other.path), other.path
    while path != encoded:
        path, encoded = unquote(path), path
    # Some servers leave out what follows a semicolon.
    segments = [segment.partition(";")[0] for segment in path.replace("\\", "/").split("/")]
    if not same or not other.hostname or other.username is not None:
        return False
    if ".." in segments or "%" in path or one.query not in ("", other.query):
        return False
    folder = one.path.rstrip("/")
    return other.path == one.path or f"{other.path}/".startswith(f"{folder}/")


def _shown(url: str) -> str:
    """The part of a URL that holds no secret."""
    try:
        parts = urlsplit(url)
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:
        return "a URL that cannot be read"
    return f"{parts.scheme}://{parts.hostname}{port}{parts.path}"[:400]


def machine_policy() -> MachinePolicy:
    """Returns the policy of this machine. Raises `InputError` if its file is missing or wrong."""
    named = os.environ.get(POLICY)
    path = Path(named) if named else DEFAULT_PATH
    try:
        raw: dict[str, Any] = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        if named:
            raise InputError(
                f"there is no machine policy at {path}", hint=f"see {POLICY}"
            ) from error
        return MachinePolicy()
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read the machine policy {path}: {error}") from error
    try:
        return msgspec.convert(raw, MachinePolicy)
    except msgspec.ValidationError as error:
        raise InputError(f"machine policy {path}: {error}") from error
