"""A signed run with very few weights: its owner, its roles, and a stranger."""

import time

import numpy as np

from deltawire import codec
from deltawire.runtime.signed_bucket import SignedBucket, grant_role
from deltawire.store import open_bucket
from deltawire.sync import Mirror, Publisher, create_run, load_mirror
from deltawire.sync.chain.objects import committed_versions
from deltawire.wire.roles import Pin
from deltawire.wire.run import Run, TensorSpec
from deltawire.wire.signing import Ed25519Signer

OWNER, WORKER, OTHER, STRANGER = (Ed25519Signer(bytes([i]) * 32) for i in range(1, 5))
ROLES = {
    "trainer": OWNER, "worker-w0": WORKER, "worker-w1": OTHER, "evaluator": OTHER,
    "supervisor": OTHER,
}  # fmt: skip
TENSORS = [TensorSpec("w", (64,), "BF16")]


class SignedRun:
    """Version 0 is published; ``plain`` is the bucket as a writer without a key has it."""

    def __init__(self, location="memory://", *, owner=OWNER, run_id="", versions=1):
        self.plain = open_bucket(str(location), create=True)
        bits = {"w": np.zeros(64, np.uint16)}
        self.run = create_run(
            self.plain,
            Run(
                id=run_id or "ab" * 16,
                name="signed",
                created_at=time.time(),
                tensors=TENSORS,
                digest=codec.digest_model(bits).hex(),
                public_key=owner.public_key,
                config={},
            ),
            signer=owner,
        )
        self.owner = owner
        self.pin = Pin(owner.public_key, self.run.id)
        for role, signer in ROLES.items():
            self.grant(role, signer)
        for version in range(versions):
            self.publish(version)

    def publish(self, version):
        """Publish a version, with a publisher whose threads end here."""
        mirror = Mirror({"w": np.zeros(64, np.uint16)}, -1, codec.ZERO)
        if committed_versions(self.plain):
            mirror = load_mirror(self.plain, self.run)
        publisher = Publisher(
            self.plain, self.run, mirror, epoch=0, compaction_strides=(), signer=self.owner
        )
        publisher.publish({"w": np.full(64, version, np.uint16)})
        publisher.close()

    def grant(self, role, signer, *, bucket=None, revoke=False):
        return grant_role(
            bucket or self.plain, self.owner, run_id=self.run.id, role=role,
            public_key=signer.public_key, revoke=revoke,
        )  # fmt: skip

    def bucket(self, role="", *, signer=None, pinned=True, **options):
        """The bucket of a process in ``role``, or of a reader."""
        signer = signer or ROLES.get(role)
        pin = self.pin if pinned else None
        return SignedBucket(self.plain, pin=pin, signer=signer, role=role, **options)
