"""Makes, removes and lists the tags of a run, and prints what it did."""

from __future__ import annotations

from deltawire.display import safe_json
from deltawire.errors import InputError
from deltawire.launch.branches.version_names import VersionName, open_version
from deltawire.runtime.trusted import ReaderTrust
from deltawire.sync.chain.tags import add_tag, read_tags, remove_tag
from deltawire.wire.seal import Signer


def tag_version(
    location: str, name: str, trust: ReaderTrust, signer: Signer | None, *, as_json: bool
) -> None:
    """Tags the version that ``location`` names (see `add_tag`)."""
    bucket, run, version = open_version(location, trust)
    tag = add_tag(bucket, run, version, name, signer=signer)
    _print(name, tag.version, tag.digest, "", as_json=as_json)


def remove(location: str, name: str, trust: ReaderTrust, *, as_json: bool) -> None:
    """Removes a tag (see `remove_tag`); raises `InputError` for a location that names a version."""
    bucket, run, _ = _run_only(location).open(trust)
    tag = remove_tag(bucket, run, name)
    _print(name, tag.version, tag.digest, "removed from ", as_json=as_json)


def list_tags(location: str, trust: ReaderTrust, *, delete: bool, as_json: bool) -> None:
    """Prints the tags, in the order of their versions; raises as `remove` and `read_tags`."""
    if delete:
        raise InputError("--delete needs the name of a tag")
    bucket, run, _ = _run_only(location).open(trust)
    tags = read_tags(bucket, run, so="the tags are not listed")
    for name, tag in sorted(tags.items(), key=lambda one: (one[1].version, one[0])):
        _print(name, tag.version, tag.digest, "", as_json=as_json)


def _run_only(location: str) -> VersionName:
    name = VersionName.parse(location)
    if (name.version, name.tag) != (None, None):
        raise InputError(
            f"{location[:200]!r} names a version",
            hint="deltawire tag RUN@V NAME makes a tag; RUN lists tags, RUN NAME --delete removes",
        )
    return name


def _print(name: str, version: int, digest: str, done: str, *, as_json: bool) -> None:
    if as_json:
        print(  # noqa: T201
            safe_json({"name": name, "version": version, "digest": digest, "removed": bool(done)})
        )
    else:
        print(f"{name}: {done}version {version}, digest {digest}")  # noqa: T201
