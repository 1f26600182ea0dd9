"""The ledger is a set of (worker, sequence), whatever the order and however often."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.wire.ledger import CommitMetadata, Ledger, ranges_of

WORKERS = ("a", "b")
SETTLED = st.lists(st.tuples(st.sampled_from(WORKERS), st.integers(0, 12)), max_size=40)


def filled(pairs):
    ledger = Ledger()
    for worker, sequence in pairs:
        ledger.settle(worker, sequence)
    return ledger


@settings(deadline=None, max_examples=60)
@given(SETTLED)
def test_equals_a_set(pairs):
    ledger, model = Ledger(), set()
    for worker, sequence in pairs:
        ledger.settle(worker, sequence)
        model.add((worker, sequence))
        for name in (*WORKERS, "stranger"):
            assert ledger.count(name) == sum(1 for owner, _ in model if owner == name)
            held = {n for n in range(15) if ledger.settled(name, n)}
            assert held == {n for owner, n in model if owner == name}


@settings(deadline=None, max_examples=60)
@given(SETTLED, st.randoms(use_true_random=False))
def test_any_order_and_any_repeats_give_the_same(pairs, random):
    shuffled = pairs + pairs[::2]
    random.shuffle(shuffled)
    # Not dict equality: a worker with nothing settled may or may not be listed.
    one, two = filled(pairs), filled(shuffled)
    for worker in WORKERS:
        assert one.below.get(worker, 0) == two.below.get(worker, 0)
        assert one.above.get(worker, []) == two.above.get(worker, [])


@settings(deadline=None, max_examples=60)
@given(SETTLED)
def test_holds_only_what_is_out_of_order(pairs):
    ledger = filled(pairs)
    for worker in WORKERS:
        mine = {n for owner, n in pairs if owner == worker}
        first_gap = next(n for n in range(15) if n not in mine)
        assert ledger.below.get(worker, 0) == first_gap
        assert ledger.above.get(worker, []) == sorted(n for n in mine if n > first_gap)


@settings(deadline=None, max_examples=60)
@given(SETTLED, SETTLED)
def test_a_copy_is_an_independent_ledger(pairs, more):
    ledger = filled(pairs)
    before = msgspec.to_builtins(ledger)
    copy = ledger.copy()
    assert copy == ledger
    for worker, sequence in more:
        copy.settle(worker, sequence)
    assert msgspec.to_builtins(ledger) == before


def test_new_ledgers_share_nothing():
    Ledger().settle("a", 0)
    assert Ledger().count("a") == 0


@settings(deadline=None, max_examples=60)
@given(SETTLED)
def test_survives_json(pairs):
    ledger = filled(pairs)
    assert msgspec.json.decode(msgspec.json.encode(ledger), type=Ledger) == ledger


@settings(deadline=None, max_examples=60)
@given(SETTLED, SETTLED, st.integers(0, 100))
def test_metadata_survives_the_manifest(consumed, dropped, step):
    metadata = CommitMetadata(step=step, consumed=consumed, dropped=ranges_of(set(dropped)))
    assert sorted(metadata.dropped_groups()) == sorted(set(dropped))
    plain = msgspec.json.decode(msgspec.json.encode(metadata.to_dict()))
    assert list(plain) == ["deltawire.step"]
    assert CommitMetadata.of(plain, run="r", version=1) == metadata
    assert CommitMetadata.of({"other": 1}, run="r", version=1) == CommitMetadata()
