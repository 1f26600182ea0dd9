"""Deletes old versions of a run once, and prints what was deleted."""

from __future__ import annotations

import json

from deltawire.dashboard.wording import byte_size
from deltawire.runtime.trusted import ANY, ReaderTrust, open_trusted
from deltawire.sync import newest_readable, prune, read_run
from deltawire.wire.seal import Signer


def prune_run(
    location: str,
    *,
    retain: int,
    grace_s: float,
    trust: ReaderTrust = ANY,
    signer: Signer | None = None,
    dry_run: bool = False,
    as_json: bool = False,
) -> None:
    """Keeps the newest ``retain`` versions of the run at ``location`` readable and prunes older
    ones, as `prune` does. Raises `InputError` if there is no run, and `SignatureError` if it is not
    the one that ``trust`` pins.
    """
    bucket = open_trusted(location, trust)
    run = read_run(bucket, public_key=signer.public_key if signer else "")
    newest = newest_readable(bucket, run)
    cutoff = -1 if newest is None else newest.version - retain + 1
    found = prune(
        bucket, run, cutoff=max(cutoff, 0), grace_s=grace_s, signer=signer, dry_run=dry_run
    )
    if as_json:
        stated = {
            "newest": None if newest is None else newest.version,
            "floor": found.floor,
            "pruned_below": found.pruned_below,
            "blobs": len(found.blobs),
            "bytes": found.bytes,
            "refused": found.refused,
            "dry_run": dry_run,
        }
        print(json.dumps(stated))  # noqa: T201
        return
    would = "would be deleted" if dry_run else "deleted"
    print(  # noqa: T201
        f"versions from {found.floor} on are readable; those below {found.pruned_below} "
        f"{would}: {len(found.blobs)} blobs, {byte_size(found.bytes)}"
    )
    for error in found.refused:
        print(f"ignored: {error}")  # noqa: T201
