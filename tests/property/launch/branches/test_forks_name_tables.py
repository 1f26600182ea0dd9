"""A fork that names its parent's piece tables reads as one that copies them, and holds less."""

import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire import codec
from deltawire.errors import CorruptError, DeltawireError
from deltawire.launch.branches import forking
from deltawire.launch.branches.forking import fork_run
from deltawire.store import forked, open_bare_bucket, retrying, without_retries
from deltawire.store.forked import ForkedBucket
from deltawire.sync import (
    Publisher,
    Subscriber,
    create_run,
    find_run,
    load_mirror,
    prune,
    read_manifest,
    read_run,
)
from deltawire.sync.chain.payloads import read_payload
from deltawire.sync.chain.tags import remove_tag
from deltawire.sync.follow.mirror import empty_mirror
from deltawire.sync.maintain.fsck import check_run
from deltawire.sync.maintain.relay import Relay
from deltawire.testing.faulty import FaultyBucket, flip_bit
from deltawire.testing.payload_reader import FormatError
from deltawire.testing.reader import Reader
from deltawire.testing.tiny import same_bits
from deltawire.wire import keys, payload
from deltawire.wire.run import Run, TensorSpec
from deltawire.wire.signing import Ed25519Signer, verify

SIGNER = Ed25519Signer(b"a key for forks that name tables")
SPECS = [
    TensorSpec("w/é", (40, 9), "BF16"),
    TensorSpec("none", (0,), "F32"),
    TensorSpec("b", (7,), "F32"),
]
VERSIONS = 7


def weights(version):
    """Few of the weights change from one version to the next."""
    rng = np.random.default_rng(5)
    found = {
        spec.name: np.frombuffer(
            rng.bytes(spec.count * codec.ITEMSIZE[spec.dtype]), codec.unsigned_of(spec.dtype)
        ).copy()
        for spec in SPECS
    }
    for number in range(1, version + 1):
        found["w/é"][np.random.default_rng(number).integers(360, size=9)] ^= 1
    return {spec.name: found[spec.name].reshape(spec.shape) for spec in SPECS}


def publish(bucket, run, mirror, versions, **options):
    options = {"anchor_every": 5, "blob_bytes": 300, "compaction_strides": (2,), **options}
    publisher = Publisher(bucket, run, mirror, signer=SIGNER if run.public_key else None, **options)
    for version in versions:
        publisher.publish(weights(version), metadata={"step": version})
        publisher.wait_for_anchor()
    publisher.close()


def start(place, *, signed=False, **options):
    """A run of some versions, with an anchor in version 0's manifest and one that came later."""
    first = {name: bits.reshape(-1) for name, bits in weights(0).items()}
    run = Run(
        id="ab" * 16, name="r", created_at=0.0, tensors=SPECS, chunk=50,
        digest=codec.digest_model(first).hex(), public_key=SIGNER.public_key if signed else "",
    )  # fmt: skip
    bucket = open_bare_bucket(str(place), create=True)
    run = create_run(bucket, run, signer=SIGNER if signed else None)
    publish(bucket, run, empty_mirror(run), range(VERSIONS), epoch=1, **options)
    return bucket


def fork(bucket, version, name="try", *, copies=False):
    """Forks a run; the slow twin copies the piece tables into the fork."""
    run = read_run(bucket)
    with pytest.MonkeyPatch.context() as patch:
        if copies:
            patch.setattr(forking, "_tables_above", lambda manifest: manifest)
        signer = SIGNER if run.public_key else None
        made = fork_run(open_bare_bucket(bucket.url), run, version, name, signer=signer)
    return open_bare_bucket(made.url)


def plain(url, *, above=None):
    folder = Path(open_bare_bucket(url).url.removeprefix("file://"))

    def get(key):
        return (folder / key).read_bytes() if (folder / key).is_file() else None

    return Reader(get, verify=verify, above=above)


def facts(bucket, version):
    """Reads a version as readers do: its manifest, tables, parts of them, and bits."""
    run = read_run(bucket)
    manifest = read_manifest(bucket, run, version)
    found = [manifest.base, manifest.base_digest, manifest.digest, manifest.metadata]
    for ref in manifest.payloads:
        found.append(read_payload(bucket, run, manifest, ref))
        part = read_payload(bucket, run, manifest, ref, {0: (50, 150)}).pieces
        found.append([(p.start, p.hash) for p in part if p.tensor == 0 and 50 <= p.start < 150])
    mirror = load_mirror(bucket, run, at=version)
    found.append({name: bits.tobytes() for name, bits in mirror.tensors.items()})
    return found


def stored_bytes(bucket):
    return sum(one.bytes for one in bucket.list_objects(""))


@settings(deadline=None, max_examples=8)
@given(
    st.integers(0, VERSIONS - 1), st.sampled_from([2, 5, 100]), st.booleans(),
    st.sampled_from([0, 200, 12 << 10]), st.booleans(),
)  # fmt: skip
def test_it_reads_as_one_that_copies(tmp_path_factory, version, every, signed, inline, later):
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deltawire.wire.piece_table.INLINE_BYTES", inline)
        parent = start(folder / "fast", signed=signed, anchor_every=every)
        shutil.copytree(folder / "fast", folder / "slow")
        fast = fork(parent, version)
        slow = fork(open_bare_bucket(str(folder / "slow")), version, copies=True)
        assert read_run(fast).id == read_run(slow).id
        if later:  # Both are trained on, and forked again.
            for one in (fast, slow):
                run = read_run(one)
                publish(one, run, load_mirror(one, run), range(version + 1, version + 3), epoch=2)
            fast, slow = fork(fast, version + 1), fork(slow, version + 1, copies=True)
    run = read_run(fast)
    listed = fast.list(keys.MANIFESTS)
    assert listed == slow.list(keys.MANIFESTS)
    assert not fast.list(keys.BLOBS)
    for key in listed:
        number = int(key[-15:-5])
        assert facts(fast, number) == facts(slow, number)
    newest = version + later
    assert same_bits(load_mirror(fast, run).tensors, weights(newest))
    first = int(listed[0][-15:-5])
    follower = Subscriber(fast, run, load_mirror(fast, run, at=first), stepwise=True)
    while follower.mirror.version < newest:
        follower.commit(follower.prepare())
        assert same_bits(follower.mirror.tensors, weights(follower.mirror.version))
    assert_plain(fast, newest)
    assert not check_run(fast, deep=True).faults
    assert stored_bytes(fast) <= stored_bytes(slow) + 200 * len(listed)


def assert_plain(fork, version):
    """The reader that was written from the document reads it, with one for each run above."""
    folder, above = Path(fork.url.removeprefix("file://")), None
    for place in (folder.parents[3], folder.parents[1], folder):
        if (place / "run.json").is_file():
            above = plain(str(place), above=above)
    found = above.read(version)
    assert found == {n: bits.reshape(-1).tolist() for n, bits in weights(version).items()}


@pytest.fixture
def parent(tmp_path):
    return start(tmp_path / "run")


@pytest.mark.parametrize("signed", [False, True])
def test_a_relay_of_a_fork_needs_no_parent(tmp_path, signed):
    """Tables are blobs in the copy, which retention there keeps."""
    parent = start(tmp_path / "run", signed=signed)
    made = fork(parent, 4)
    run, copy = read_run(made), open_bare_bucket(str(tmp_path / "copy"), create=True)
    publish(made, run, load_mirror(made, run), [5], epoch=2)
    relay = Relay(made, copy, start=0)
    relay.advance()
    relay.close()
    shutil.rmtree(tmp_path / "run")
    for _ in range(2):
        prune(copy, run, cutoff=4, grace_s=0, signer=SIGNER if signed else None)
    for version in (4, 5):
        assert same_bits(load_mirror(copy, run, at=version).tensors, weights(version))
    assert not check_run(copy, deep=True).faults


def test_the_parents_retention_keeps_the_tables(parent):
    made = fork(parent, 4)
    run, above = read_run(made), read_run(parent)
    for _ in range(2):
        assert prune(parent, above, cutoff=6, grace_s=0).pruned_below == 0
    assert same_bits(load_mirror(open_bare_bucket(made.url), run).tensors, weights(4))
    remove_tag(parent, above, keys.fork_tag("try"))
    for _ in range(2):
        prune(parent, above, cutoff=6, grace_s=0)
    assert read_manifest(parent, above, 3).pruned
    with pytest.raises(CorruptError, match="missing"):
        load_mirror(open_bare_bucket(made.url), run)


def test_retention_of_the_fork_closes_what_it_began_with(parent):
    made = fork(parent, 4)
    run = read_run(made)
    publish(made, run, load_mirror(made, run), [5, 6], epoch=2, anchor_every=1)
    for _ in range(2):
        prune(made, run, cutoff=6, grace_s=0)
    shutil.rmtree(Path(parent.url.removeprefix("file://")) / "weights")
    assert read_manifest(made, run, 4).pruned
    assert same_bits(load_mirror(open_bare_bucket(made.url), run).tensors, weights(6))


def pair(fork, parent):
    """A fork's bucket of two that fail on command."""
    inner = FaultyBucket(forked_inner(fork))
    upper = FaultyBucket(open_bare_bucket(parent.url))
    return ForkedBucket(inner, lambda: upper), inner, upper


def forked_inner(fork):
    fork = without_retries(fork)
    assert isinstance(fork, ForkedBucket)
    return fork.inner


@pytest.mark.parametrize("side", [0, 1], ids=["fork", "parent"])
@pytest.mark.parametrize(
    "kind",
    ["flip", *(pytest.param(one, marks=pytest.mark.drills) for one in ("lost", "hidden"))],
)
def test_each_answer_is_wrong_once(parent, side, kind, monkeypatch):
    """A reader of the whole gets the right bits or an error, and the right bits when it repeats."""
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)
    made, at, ended = fork(parent, 3), 0, False
    run, right = read_run(made), weights(3)
    while not ended:
        at += 1
        bucket, *sides = pair(made, parent)
        faulty = sides[side]
        if kind == "flip":
            faulty.damage("*", partial(flip_bit, number=999 * at), at=at, times=1)
        elif kind == "lost":
            faulty.fail(at=at)
        else:
            faulty.replace("get", "*", answer=lambda _: None, at=at)
        with suppress(DeltawireError):
            assert same_bits(load_mirror(bucket, run, at=3).tensors, right)
        ended = len(faulty.operations) < at
        faulty.heal()
        assert same_bits(load_mirror(bucket, run, at=3).tensors, right)
    assert at > 8


@pytest.mark.parametrize(
    "done", [False, pytest.param(True, marks=pytest.mark.drills)], ids=["before", "after"]
)
def test_each_request_to_the_fork_fails(parent, done, monkeypatch):
    """The same call goes on; before it does, no reader takes the place for a run."""
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)
    run, at, ended = read_run(parent), 0, False
    while not ended:
        at, name = at + 1, f"try{at}"
        place = open_bare_bucket(f"{parent.url}/forks/{name}", create=True)
        faulty = FaultyBucket(place)
        faulty.fail(at=at, times=None, done=done)
        with monkeypatch.context() as patch, suppress(DeltawireError):
            patch.setattr(forking, "open_bucket", lambda *_, faulty=faulty, **__: faulty)
            fork_run(parent, run, 3, name)
            ended = len(faulty.operations) < at
        if not ended and not done:
            assert find_run(place) is None
        fork_run(parent, run, 3, name)
        assert same_bits(load_mirror(place, read_run(place)).tensors, weights(3))
        assert not check_run(place, deep=True).faults
    assert at > 5


@pytest.mark.parametrize("junk", [b"", b"junk", b"[" * 100_000, b"\xff", b" " * (3 << 20)])
def test_junk_among_the_manifests_is_passed_over(parent, junk):
    """Also one that is larger than a manifest may be."""
    made = fork(parent, 4)
    run = read_run(made)
    (first, *_) = made.list(keys.MANIFESTS)
    parent.put(first.replace("0000000000", "0000000001"), junk)
    bucket = open_bare_bucket(made.url)
    with pytest.raises(CorruptError, match="missing"):
        load_mirror(bucket, run, at=1)
    made.put(keys.manifest(1), junk)
    assert bucket.get(keys.blob("ab" * 32), limit=9) is None
    manifest = read_manifest(bucket, run, 3)
    assert read_payload(bucket, run, manifest, manifest.delta).pieces


def test_a_table_is_no_longer_than_its_reader_takes(parent):
    made = fork(parent, 4)
    table = read_manifest(made, read_run(made), 3).delta.table
    key = keys.blob(table.blob)
    assert len(made.get(key, limit=table.bytes)) == table.bytes
    with pytest.raises(CorruptError, match="at most"):
        made.get(key, limit=table.bytes - 1)
    with pytest.raises(CorruptError, match="ends after"):
        made.read_ranges(key, [(0, 1), (table.bytes - 1, 2)])


def test_another_table_above_is_not_taken(parent):
    """The parent's manifest is another, with a sound seal."""
    made = fork(parent, 4)
    key = keys.blob(read_manifest(made, read_run(made), 3).delta.table.blob)
    assert made.get(key, limit=1 << 14)
    parent.put(keys.manifest(3), parent.get(keys.manifest(2), limit=1 << 14))
    bucket = open_bare_bucket(made.url)
    assert bucket.get(key, limit=1 << 14) is None
    assert bucket.read_ranges(key, [(0, 4)]) is None


def test_earlier_releases_name_the_release_that_reads_it(parent, monkeypatch):
    """They know one codec."""
    made = fork(parent, 4)
    monkeypatch.setattr(payload, "FORK_CODEC", "unknown")
    with pytest.raises(CorruptError, match=r"'dw1-fork'.*deltawire 0\.2 or newer"):
        load_mirror(made, read_run(made))


def test_store_and_wire_agree_on_the_codec():
    assert forked.TABLE_ABOVE == payload.FORK_CODEC


@pytest.mark.parametrize("copied", [1, 3])
def test_a_fork_that_an_earlier_release_began_is_finished(tmp_path, copied, monkeypatch):
    """It wrote manifests with inline tables, and was killed before the run's description."""
    parent = start(tmp_path / "run", anchor_every=100)
    whole = fork(parent, 4, "twin", copies=True)
    begun = open_bare_bucket(f"{parent.url}/forks/try", create=True)
    for key in whole.list(keys.MANIFESTS)[:copied]:
        data = whole.get(key, limit=1 << 21)
        begun.create(key, data)
    # The id of a fork has its name, so those manifests are of another one here.
    run = read_run(parent)
    monkeypatch.setattr(forking, "_refuse_another", lambda *_: False)
    made = fork_run(open_bare_bucket(parent.url), run, 4, "try")
    found = open_bare_bucket(made.url)
    names = dict(found._named_tables()) if isinstance(found, ForkedBucket) else None
    assert names, "the versions after the first ones name tables above"
    assert set(names.values()) == {f"{n:010d}" for n in range(copied, 5)}


def test_a_table_is_found_past_a_tombstone_and_a_damaged_manifest(tmp_path):
    parent = start(tmp_path / "run", anchor_every=100)
    made = fork(parent, 4)
    first, second = made.list(keys.MANIFESTS)[:2]
    wanted = dict(made._named_tables())
    for data in (b"{}", b'{"pruned": true}', b"[]", b"[" * 100_000, b"\xff"):
        for key in (first, second):
            before = made.get(key, limit=1 << 21)
            made.put(key, data)
            found = dict(open_bare_bucket(made.url)._named_tables())
            assert found.items() <= wanted.items()
            assert set(found.values()) == set(wanted.values()) - {key[-15:-5]}, (data, key)
            made.put(key, before)


def test_a_damaged_blob_costs_one_more_look_at_the_manifests(tmp_path):
    parent = start(tmp_path / "run", anchor_every=100)
    made = fork(parent, 4)
    listed = []
    inner = made.inner
    real = inner.list
    inner.list = lambda *a, **k: (listed.append(a), real(*a, **k))[1]
    for number in range(6):
        assert made.get(keys.blob(f"{number:064x}"), limit=100) is None
    assert len(listed) <= 2


@pytest.mark.parametrize("junk", [b"[]", b"{", b"\xff", b"[" * 100_000, b'{"delta": 1}',
                                  b'{"delta": {"table": {"inline": "?"}}}'])  # fmt: skip
def test_the_plain_reader_takes_damage_above_for_missing(tmp_path, junk):
    parent = start(tmp_path / "run", anchor_every=100)
    made = fork(parent, 4)
    parent.put(keys.manifest(2), junk)
    above = plain(parent.url)
    with pytest.raises(FormatError):
        plain(made.url, above=above).read(4)
