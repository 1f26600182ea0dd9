"""The deployment's secret is created and rotated by processes that die, and by two at once."""

import threading

import pytest
from live_gateway import published

from deltawire.errors import InputError, RetryError
from deltawire.launch.live_secret import (
    OtherSecretError,
    SecretPlace,
    create_secret,
    rotate_secret,
)
from deltawire.live.deployment_secret import Generation, read_generations
from deltawire.store import DelegatingBucket
from deltawire.sync import read_run
from deltawire.wire import keys
from deltawire.wire.signing import Ed25519Signer

OLD = Generation.adopt(Ed25519Signer(bytes(range(32))))


class Dying(DelegatingBucket):
    """Fails a create before or after it is done, as if the process had ended there."""

    def __init__(self, inner, *, at, after):
        super().__init__(inner)
        self.left, self.after = at, after

    def create(self, key, data):
        self.left -= 1
        if self.left == 0 and not self.after:
            raise RetryError("planted", run=self.url, key=key)
        made = super().create(key, data)
        if self.left == 0:
            raise RetryError("planted after the write", run=self.url, key=key)
        return made


def fingerprints(bucket):
    return [one.fingerprint for one in read_generations(bucket, read_run(bucket).id)]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [1, 2])
def test_a_creation_that_was_killed_goes_on_with_the_same_secret(tmp_path, at, after):
    bucket = published(1)
    run, place = read_run(bucket), SecretPlace(tmp_path / "live.secret")
    with pytest.raises(RetryError, match="planted"):
        create_secret(Dying(bucket, at=at, after=after), run, place, adopt=[OLD])
    held = place.generations()
    assert [one.adopted for one in held] == [True, False]
    if not (at == 2 and after):
        with pytest.raises(InputError, match="no secret for pseudonyms"):
            place.read(bucket, run)
    secret = create_secret(bucket, run, place, adopt=[OLD])
    assert fingerprints(bucket) == [one.fingerprint for one in held]
    assert secret.current.fingerprint == held[1].fingerprint
    assert create_secret(bucket, run, place).current.fingerprint == held[1].fingerprint


def test_a_creation_that_lost_leaves_a_key_that_the_winner_can_adopt(tmp_path):
    bucket = published(1)
    run = read_run(bucket)
    lost, won = (SecretPlace(tmp_path / name) for name in ("lost", "won"))
    with pytest.raises(RetryError, match="planted"):
        create_secret(Dying(bucket, at=2, after=False), run, lost, adopt=[OLD])
    create_secret(bucket, run, won, adopt=[OLD])
    with pytest.raises(InputError, match="lacks generation 1"):
        create_secret(bucket, run, lost)
    other = published(1)
    run = read_run(other)
    mine = SecretPlace(tmp_path / "mine")
    create_secret(other, run, mine)
    elsewhere = SecretPlace(tmp_path / "elsewhere")
    elsewhere.path.write_bytes(mine.path.read_bytes())
    create_secret(other, run, elsewhere, adopt=[OLD])
    with pytest.raises(InputError, match="lacks generation 1"):
        mine.read(other, run)
    assert create_secret(other, run, mine, adopt=[OLD]).numbered[1] == OLD
    assert mine.read(other, run).current_number == 0


def test_a_file_that_cannot_be_written_names_nothing_in_the_bucket(tmp_path):
    bucket = published(1)
    place = SecretPlace(tmp_path / "file" / "live.secret")
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InputError):
        create_secret(bucket, read_run(bucket), place)
    assert not fingerprints(bucket)


def test_of_two_creations_at_once_one_is_the_deployments(tmp_path):
    for attempt in range(8):
        bucket = published(1)
        run, barrier = read_run(bucket), threading.Barrier(2)
        done, lost, said = [], [], []

        places = [SecretPlace(tmp_path / f"{attempt}-{name}") for name in ("a", "b")]

        def create(place, at=(bucket, run, barrier), done=done, lost=lost, said=said):
            bucket, run, barrier = at
            barrier.wait(30)
            try:
                done.append(create_secret(bucket, run, place))
            except OtherSecretError:
                lost.append(place)
            except InputError as error:  # It came after the other had finished.
                lost.append(place)
                said.append(str(error))

        threads = [threading.Thread(target=create, args=(place,)) for place in places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        (secret,), (place,) = done, lost
        assert not place.path.exists()
        assert all("not in" in text for text in said)
        assert fingerprints(bucket) == [secret.current.fingerprint]


@pytest.mark.parametrize("when", ["file", "before", "after"])
def test_a_rotation_that_was_killed_goes_on_and_loses_no_generation(tmp_path, monkeypatch, when):
    bucket = published(1)
    run, place = read_run(bucket), SecretPlace(tmp_path / "live.secret")
    first = create_secret(bucket, run, place)
    target = Dying(bucket, at=1, after=when == "after")
    with monkeypatch.context() as patch:
        if when == "file":

            def fail(*_):
                raise InputError("planted")

            patch.setattr("deltawire.launch.live_secret.replace_private", fail)
        with pytest.raises((InputError, RetryError), match="planted"):
            rotate_secret(target, run, place)
    between = place.read(bucket, run)
    in_use = first.current.fingerprint
    assert (between.current.fingerprint == in_use) == (when != "after")
    held = [one.fingerprint for one in place.generations()]
    secret = rotate_secret(bucket, run, place)
    assert fingerprints(bucket)[0] == in_use
    assert secret.current.fingerprint != in_use
    if when == "before":
        assert secret.current.fingerprint == held[-1]
    assert set(held) <= {one.fingerprint for one in place.generations()}
    assert fingerprints(bucket) == [one.fingerprint for one in place.generations()]


def test_of_two_rotations_with_other_files_the_second_changes_nothing(tmp_path):
    bucket = published(1)
    run = read_run(bucket)
    one, two = (SecretPlace(tmp_path / name) for name in ("one", "two"))
    create_secret(bucket, run, one)
    two.path.write_bytes(one.path.read_bytes())
    with pytest.raises(RetryError, match="planted"):
        rotate_secret(Dying(bucket, at=1, after=False), run, two)
    used = rotate_secret(bucket, run, one).current.fingerprint
    with pytest.raises(InputError, match="lacks generation 1"):
        rotate_secret(bucket, run, two)
    assert fingerprints(bucket)[1:] == [used]
    two.path.write_bytes(one.path.read_bytes() + two.path.read_bytes())  # The hint's text.
    assert two.read(bucket, run).current.fingerprint == used


def test_two_rotations_of_one_file_do_not_meet(tmp_path):
    bucket = published(1)
    run, place = read_run(bucket), SecretPlace(tmp_path / "live.secret")
    create_secret(bucket, run, place)
    from deltawire.launch.live_secret import _changing

    with _changing(place), pytest.raises(InputError, match="another process changes"):
        rotate_secret(bucket, run, place)
    assert len(place.generations()) == 1


def test_a_damaged_or_misplaced_fingerprint_hides_no_generation(tmp_path):
    bucket = published(1)
    run, place = read_run(bucket), SecretPlace(tmp_path / "live.secret")
    create_secret(bucket, run, place)
    rotate_secret(bucket, run, place)
    kept = bucket.get(keys.live_secret(0), limit=1 << 12)
    for data in (b"{", bucket.get(keys.live_secret(1), limit=1 << 12)):
        bucket.put(keys.live_secret(0), data)
        with pytest.raises(Exception, match=r"secret|generation"):
            place.read(bucket, run)
    bucket.delete(keys.live_secret(0))
    with pytest.raises(InputError, match="another run or number"):
        place.read(bucket, run)
    bucket.put(keys.live_secret(0), kept)
    place.read(bucket, run)
