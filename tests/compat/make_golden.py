"""Writes the golden run of the format version of today: run it once when the version changes.

python tests/compat/make_golden.py tests/compat/golden/format-1
"""

import hashlib
import json
import sys
from pathlib import Path

import msgspec

from deltawire.store import open_bucket
from deltawire.sync import Publisher, create_run, prune
from deltawire.sync.follow.mirror import empty_mirror
from deltawire.testing.tiny import start_run, weights
from deltawire.wire.signing import Ed25519Signer

SIGNER = Ed25519Signer(b"a key for golden runs, no secret")
VERSIONS = 9


def main(folder: str) -> None:
    table = start_run(open_bucket("memory://"))
    signed = msgspec.structs.replace(
        table, id="60" * 16, name="golden", created_at=1.0, public_key=SIGNER.public_key,
        aliases={"lm_head.weight": "embed.weight"}, config={"kept": [1, None, "é"]},
    )  # fmt: skip
    bucket = open_bucket(str(Path(folder) / "bucket"), create=True)
    run = create_run(bucket, signed, signer=SIGNER)
    publisher = Publisher(
        bucket, run, empty_mirror(run), epoch=3, anchor_every=3, compaction_strides=(2, 4),
        blob_bytes=200, signer=SIGNER,
    )  # fmt: skip
    expected = {}
    for version in range(VERSIONS):
        tensors = weights(version)
        publisher.publish(tensors, metadata={"step": version})
        expected[version] = {
            name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in tensors.items()
        }
    publisher.close()
    # Closed and swept below version 3: tombstones and a boundary belong to the format too.
    prune(bucket, run, cutoff=3, grace_s=0, signer=SIGNER)
    Path(folder, "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
