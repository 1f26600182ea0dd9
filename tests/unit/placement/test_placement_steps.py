"""Several steps are composed into one, and the mirror is unchanged even after a failure."""

import pytest

from deltawire import codec
from deltawire.errors import CorruptError
from deltawire.placement.steps import step_to
from deltawire.sync import Subscriber, load_mirror
from deltawire.testing.tiny import same_bits, start_publisher, weights


@pytest.fixture
def run(new_bucket):
    """A bucket with versions 0 to 6 of which only the first is an anchor, and its run."""
    bucket = new_bucket("memory")
    publisher = start_publisher(bucket, anchor_every=100)
    for version in range(7):
        publisher.publish(weights(version))
        publisher.flush()
    publisher.close()
    return bucket, publisher.run


def applied(mirror, update):
    """The bits that the mirror would hold after ``update``."""
    moved = mirror.copy()
    moved.move(update.pieces, update.version, update.digest, update.held)
    return moved


@pytest.mark.parametrize("version", range(1, 7))
def test_a_route_of_many_edges_is_one_step(run, version):
    bucket, table = run
    mirror = load_mirror(bucket, table, at=0)
    update = step_to(Subscriber(bucket, table, mirror), version)
    assert (mirror.version, same_bits(mirror.tensors, weights(0))) == (0, True)
    assert mirror.held_digest == codec.digest_model(mirror.tensors)
    assert (update.base, update.version) == (0, version)
    moved = applied(mirror, update)
    assert same_bits(moved.tensors, weights(version))
    assert update.digest == update.held == codec.digest_model(moved.tensors)
    for name, patch in update.patches.items():
        assert (mirror.tensors[name][patch.positions] != patch.bits).all()
        assert (patch.positions[1:] > patch.positions[:-1]).all()


def test_a_part_of_the_model_takes_the_step_too(run):
    bucket, table = run
    wanted = {"embed.weight": (6, 20), "norm": None}
    mirror = load_mirror(bucket, table, at=0, wanted=wanted)
    moved = applied(mirror, step_to(Subscriber(bucket, table, mirror), 5))
    for name, bits in moved.tensors.items():
        start = moved.starts.get(name, 0)
        right = weights(5)[name].reshape(-1)[start : start + bits.size]
        assert bits.tobytes() == right.tobytes()
    assert moved.held == moved.compute_held()


def test_there_is_no_step_to_the_version_that_is_held(run):
    bucket, table = run
    assert step_to(Subscriber(bucket, table, load_mirror(bucket, table, at=3)), 3) is None


@pytest.mark.parametrize("missing", range(1, 6))
def test_damage_along_the_route_leaves_the_mirror_unchanged(run, missing):
    bucket, table = run
    mirror = load_mirror(bucket, table, at=0)
    subscriber = Subscriber(bucket, table, mirror)
    bucket.delete(f"weights/manifests/{missing:010d}.json")
    with pytest.raises(CorruptError):
        step_to(subscriber, 6)
    assert (mirror.version, same_bits(mirror.tensors, weights(0))) == (0, True)
    assert mirror.held_digest == codec.digest_model(mirror.tensors)
