"""An object that others put where a worker's next group belongs does not stop the worker."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from deltawire.rl.rollout.group_numbers import MAX_UNGRANTED, next_sequence
from deltawire.rl.rollout.trainer_link import TrainerLink
from deltawire.rl.rollout.uploader import Uploader
from deltawire.store import open_bucket
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.rollouts import encode_group
from deltawire.wire.status import Challenge, TrainerStatus

STATUS = TrainerStatus(phase="training", version=0, digest="", epoch=1, credits={"w": 5}, at=0.0)


@pytest.fixture
def bucket():
    return open_bucket("memory://")


def process_on(bucket, claimed=None):
    worker = None if claimed is None else SimpleNamespace(stored=claimed)
    before = None if claimed is None else SimpleNamespace(worker=worker)
    return SimpleNamespace(
        name="w",
        bucket=bucket,
        heartbeat=SimpleNamespace(predecessor=before, count_finished=lambda: None),
        lease=SimpleNamespace(confirm=lambda **_: None, held=True, number=0),
        events=SimpleNamespace(record=lambda _: None),
    )


@pytest.mark.parametrize("junk", [b"", b"junk", None], ids=["empty", "junk", "a forged group"])
def test_foreign_objects_do_not_stop_a_worker(bucket, make_group, junk):
    """Junk under its next number once ended the worker with an error."""
    for sequence in range(3):
        data = encode_group(make_group("w", [0])) if junk is None else junk
        bucket.put(keys.rollout("w", sequence), data)
    own = make_group("w", [0], task="own")
    own = replace(own, nonce="mine")
    thread = Uploader(bucket, "w", 0, process_on(bucket))
    thread.start()
    thread.submit(own)
    thread.close()
    assert thread.error is None
    assert thread.stored == 4
    assert bucket.get(keys.rollout("w", 3), limit=1 << 20) == encode_group(own)


def test_numbers_that_were_not_granted_do_not_count(bucket):
    """Somebody stored a group under the last number there is, and named it in a heartbeat."""
    for sequence in (0, 1, 2):
        bucket.put(keys.rollout("w", sequence), b"x")
    bucket.put(keys.rollout("w", 9_999_999_999), b"x")
    assert next_sequence(process_on(bucket)) == 3
    assert next_sequence(process_on(bucket, claimed=2)) == 3
    assert next_sequence(process_on(bucket, claimed=MAX_UNGRANTED)) == MAX_UNGRANTED
    bucket.put(keys.TRAINER, encode_json(STATUS))
    assert next_sequence(process_on(bucket, claimed=9_999_999_999)) == 3
    assert next_sequence(process_on(bucket, claimed=4)) == 4


def test_a_worker_waits_for_its_secret_and_reads_it_again(bucket):
    link = TrainerLink(bucket, "w", silence_s=30.0)
    link._read_secret(msgspec.structs.replace(STATUS, credits={}))
    assert link.secret is None
    bucket.put(keys.challenge("w"), encode_json(Challenge(worker="w", secret="ab" * 16)))
    link._read_secret(STATUS)
    assert link.secret == "ab" * 16
    bucket.put(keys.challenge("w"), encode_json(Challenge(worker="w", secret="cd" * 16)))
    link._read_secret(STATUS)
    assert link.secret == "ab" * 16
    bucket.put(keys.challenge("w"), b"junk")
    link._read_secret(msgspec.structs.replace(STATUS, epoch=2))
    assert link.secret == "ab" * 16
    bucket.put(keys.challenge("w"), encode_json(Challenge(worker="w", secret="cd" * 16)))
    link._read_secret(msgspec.structs.replace(STATUS, epoch=2))
    assert link.secret == "cd" * 16
