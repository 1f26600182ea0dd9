"""Tags: names of versions, which keep them from retention.

A tag at a version keeps this version and every later one readable, as a trainer's checkpoint does.
Retention and the writer of a tag may work at once. Each writes its object first and then looks for
the other's::

    tag         create the tag ─────▶ list the floors ─▶ one above it: withdraw the tag
    retention   create the floor ───▶ read the tags ───▶ one below it: keep what it needs

So one of the two sees the other, or both do, and no version is both tagged and deleted.
"""

from __future__ import annotations

from functools import partial

from deltawire.errors import CorruptError, InputError
from deltawire.store import Bucket, in_parallel
from deltawire.sync.chain.evidence import listed_twice, require_evidence
from deltawire.sync.chain.objects import check_signed, check_signer, read_manifest
from deltawire.wire import keys
from deltawire.wire.coordination import MAX_TAG_BYTES, Tag, decode_tag
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer, seal


def read_tags(bucket: Bucket, run: Run, *, so: str) -> dict[str, Tag]:
    """Returns all tags by name.

    Raises `UnreadableError` for a tag that cannot be read; ``so`` tells what was not done.
    """
    names = [name for key in listed_twice(bucket, keys.TAGS) if (name := keys.tag_of(key))]

    def read(name: str) -> Tag | None:
        return require_evidence(bucket, keys.tag(name), partial(find_tag, bucket, run, name), so=so)

    found = zip(names, in_parallel(bucket, read, names), strict=True)
    return {name: tag for name, tag in found if tag is not None}


def find_tag(bucket: Bucket, run: Run, name: str) -> Tag | None:
    """Reads a tag, None if there is none; raises `CorruptError`, and `InputError` for a name that
    no tag has."""
    key = keys.tag(name)
    data = bucket.get(key, limit=MAX_TAG_BYTES)
    if data is None:
        return None
    check_signed(bucket, run, data, key)
    return decode_tag(data, table=run, run=bucket.url, key=key)


def tagged_version(bucket: Bucket, run: Run, name: str) -> int:
    """Returns the version that a tag names.

    Raises `InputError` if there is no such tag, and `CorruptError` if its version has other
    weights than when it was tagged.
    """
    tag = find_tag(bucket, run, name)
    if tag is None:
        raise InputError(
            f"the run has no tag {name}",
            hint="deltawire tag RUN lists its tags",
            run=bucket.url,
            key=keys.tag(name),
        )
    manifest = read_manifest(bucket, run, tag.version)
    if manifest is not None and manifest.digest != tag.digest:
        raise CorruptError(
            f"the tag {name} states other weights than version {tag.version} has",
            hint="remove the tag, and tag the version that you mean",
            run=bucket.url,
            version=tag.version,
            key=keys.tag(name),
        )
    return tag.version


def add_tag(
    bucket: Bucket, run: Run, version: int, name: str, *, signer: Signer | None = None
) -> Tag:
    """Tags a version; a repeated call finds its tag and changes nothing.

    Raises `InputError` if the version is not committed, or closed by retention, or if another one
    has the name; the tag is then not there. Two calls with the same name must not run at once: one
    that withdraws its tag takes it from the other.

    Example::

        add_tag(bucket, run, 120, "best", signer=signer)
    """
    check_signer(bucket, run, signer)
    key = keys.tag(name)
    manifest = read_manifest(bucket, run, version)
    if manifest is None or manifest.pruned:
        why = "is not committed" if manifest is None else "was deleted by retention"
        raise InputError(
            f"version {version} {why}",
            hint="deltawire log RUN lists the versions",
            run=bucket.url,
            version=version,
        )
    tag = Tag(run=run.id, version=version, digest=manifest.digest)
    if not bucket.create(key, seal(tag, key=key, signer=signer)):
        read = partial(find_tag, bucket, run, name)
        other = require_evidence(bucket, key, read, so="nothing was tagged")
        if other != tag:
            there = "another version" if other is None else f"version {other.version}"
            raise InputError(
                f"{there} has the tag {name} already",
                hint="remove that tag first, or choose another name",
                run=bucket.url,
                key=key,
            )
    above = [
        number
        for one in listed_twice(bucket, keys.RETENTION_FLOORS)
        if (number := keys.trailing_number(one)) is not None and number > version
    ]
    if above:
        bucket.delete(key)
        raise InputError(
            f"retention has closed the versions below {max(above)}, so version {version} may go",
            hint="tag a newer version; if no retention made that floor, fsck says so",
            run=bucket.url,
            version=version,
            key=keys.retention_floor(max(above)),
        )
    return tag


def remove_tag(bucket: Bucket, run: Run, name: str) -> Tag:
    """Removes a tag; returns it. Raises `InputError` if there is none, and `CorruptError`."""
    tag = find_tag(bucket, run, name)
    if tag is None:
        raise InputError(f"the run has no tag {name}", run=bucket.url, key=keys.tag(name))
    bucket.delete(keys.tag(name))
    return tag
