"""Finds a version's anchor, in its manifest or made later."""

from deltawire.sync import read_manifest
from deltawire.sync.chain.objects import read_compacted_delta
from deltawire.sync.chain.payloads import read_payload


def anchor_of(bucket, run, version):
    """Returns the object that states a version's anchor and the payload's reference, or None."""
    manifest = read_manifest(bucket, run, version)
    if manifest is not None and manifest.anchor is not None:
        return manifest, manifest.anchor
    later = read_compacted_delta(bucket, run, None, version)
    return None if later is None else (later, later.payload)


def anchor_payload(bucket, run, version):
    """Reads a version's anchor."""
    return read_payload(bucket, run, *anchor_of(bucket, run, version))
