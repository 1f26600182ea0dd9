"""The window of requests in stores that let requests wait, and in those that are only slow."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scale.storm import simulate_store
from benchmarks.scale.storm_stores import KeepingUp, Queueing, Refusing
from deltawire.store.answer_times import (
    CLASSES,
    FIRST_ROUND,
    PATIENCE,
    ROUND,
    SLOW,
    AnswerTimes,
    class_of,
)
from deltawire.store.host_limit import HostLimit
from deltawire.store.request_limit import MOST, SLOW_LEAST, RequestWindow
from deltawire.store.translation import outcome_of

OBJECT = 1 << 20


def storm(store, *, readers=1, objects=4000, size=OBJECT, adaptive=True):
    return simulate_store(
        store, needed_s=1.0, readers=readers, sizes=[size] * objects, adaptive=adaptive
    )


@pytest.mark.parametrize(("servers", "readers"), [(4, 1), (16, 1), (32, 4), (64, 16)])
def test_it_settles_near_the_knee_of_a_store_that_lets_requests_wait(servers, readers):
    queue = {"servers": servers, "work_s": 0.1}
    objects = 2000 if readers > 4 else 4000
    found = storm(Queueing(**queue), readers=readers, objects=objects)
    fixed = storm(Queueing(**queue), readers=readers, objects=objects, adaptive=False)
    assert found.under_way < 2 * servers
    assert found.last_s < 1.06 * fixed.last_s, "the store has enough to do"
    # Without the rule all places are taken: 64 a reader.
    assert fixed.under_way > 0.95 * MOST * readers


def test_of_a_link_that_is_full_no_more_than_a_few_objects_are_asked_for_at_once():
    link = {"servers": 1, "work_s": 0.005, "rate": 1e8}
    found = storm(Queueing(**link), objects=600, size=8 << 20)
    fixed = storm(Queueing(**link), objects=600, size=8 << 20, adaptive=False)
    assert found.under_way < 6
    assert found.last_s < 1.02 * fixed.last_s


def varied(now, size, rng):
    return True, 0.1 * rng.expovariate(1.0)


def one_connection_each(now, size, rng):
    return True, 0.02 * rng.uniform(0.75, 1.25) + size / 8e7


class Other:
    """A store that is a function."""

    def __init__(self, ask):
        self.ask = ask


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeepingUp(latency_s=0.3),
        lambda: KeepingUp(latency_s=0.1, slow_share=0.01, slowness=10),
        lambda: KeepingUp(latency_s=0.1, slow_share=0.05, slowness=10),
        lambda: Other(varied),
    ],
    ids=["far", "1 % take ten times", "5 % take ten times", "exponential"],
)
def test_a_store_that_keeps_up_gets_as_many_requests_as_ever(make):
    found, fixed = storm(make(), objects=8000), storm(make(), objects=8000, adaptive=False)
    assert found.last_s < 1.05 * fixed.last_s
    assert found.under_way > 0.98 * fixed.under_way


MIB = 1 << 20


@pytest.mark.parametrize(
    "sizes",
    [[1000], [1000, 8 * MIB], [17 * MIB, 31 * MIB], [40 * MIB, 256 * MIB], [33 * MIB, 64 * MIB]],
    ids=str,
)
@pytest.mark.parametrize("mixed", [True, False])
def test_objects_of_other_sizes_are_not_taken_for_slow_answers(sizes, mixed):
    rng = random.Random(1)
    drawn = [rng.choice(sizes) for _ in range(2000)]
    asked = drawn if mixed else sorted(drawn)
    taken = [
        simulate_store(
            Other(one_connection_each), needed_s=1.0, readers=1, sizes=asked, adaptive=adaptive
        )
        for adaptive in (True, False)
    ]
    assert taken[0].last_s < 1.15 * taken[1].last_s


@pytest.mark.parametrize("readers", [1, 16])
def test_a_store_that_refuses_bytes_is_as_late_as_it_is_slow(readers):
    rng = random.Random(2)
    sizes = [rng.choice([1000, 8 << 20]) for _ in range(1000)]
    store = Refusing(rate=sum(sizes) * readers / 60, latency_s=0.1, by_bytes=True)
    found = simulate_store(store, needed_s=60, readers=readers, sizes=sizes)
    assert found.last_vs_needed < 1.1
    assert found.attempts < 1.3


def test_a_store_that_becomes_another_one_is_used_as_much_as_before():
    """From 20 to 300 ms: the latency is not the window's doing, as its smallest size shows."""

    def moves(now, size, rng):
        return True, (0.02 if now < 2 else 0.3) * rng.uniform(0.75, 1.25)

    found = storm(Other(moves), objects=16000)
    fixed = storm(Other(moves), objects=16000, adaptive=False)
    assert found.last_s < 2 * fixed.last_s
    assert found.under_way > 0.95 * fixed.under_way


def asked(window, now, taken_s):
    window.sent(window.most - 1, now)
    window.answered(now, now + taken_s, OBJECT)
    return now + taken_s + 0.001


def test_slow_answers_leave_a_few_requests_and_refusals_fewer():
    window, now = RequestWindow(), 0.0
    for _ in range(100):
        now = asked(window, now, 0.1)
    assert window.size > 32
    for _ in range(40 * ROUND):
        now = asked(window, now, 0.5)
        assert window.size >= SLOW_LEAST
        if window.size == SLOW_LEAST:
            break
    assert window.size == SLOW_LEAST
    for _ in range((PATIENCE - 1) * ROUND):
        assert window.size == SLOW_LEAST, "it is not known yet whether others are to blame"
        now = asked(window, now, 0.5)
    for _ in range(100):
        now = asked(window, now, 0.5)
    assert window.size > 6, "now 0.5 s are what the store takes"
    window.refused(now, now + 0.5)
    window.refused(now + 1, now + 1.5)
    window.refused(now + 2, now + 2.5)
    window.refused(now + 3, now + 3.5)
    assert window.size < 2


def test_answers_without_an_object_say_nothing():
    window, now = RequestWindow(), 0.0
    for number in range(400):
        window.sent(63, now)
        window.answered(now, now + (0.1 if number < 200 else 5.0))
        now += 6.0
    assert window.size == MOST


def test_the_processes_of_a_host_share_what_they_know(tmp_path):
    now = [100.0]
    one, other = (HostLimit(tmp_path / "limit", clock=lambda: now[0]) for _ in range(2))

    def ask(limit, taken_s):
        with limit.request(outcome_of) as request:
            now[0] += taken_s
            request.size = OBJECT
        now[0] += 1.0

    for _ in range(2 * ROUND):
        ask(one, 0.1)
    ask(other, 1.0)
    assert other.window._times._count[class_of(OBJECT)] == 2 * ROUND + 1
    assert 0 < other.window._times._lowest_s[class_of(OBJECT)] < 0.2


def test_sizes_within_a_factor_below_the_limit_are_compared():
    assert class_of(0) == class_of(65535) == 0
    assert class_of(1 << 16) == class_of(92681) == 1
    assert class_of(92682) == class_of((1 << 17) - 1) == 2
    assert class_of((1 << 30) - 1) == CLASSES - 1
    assert class_of(1 << 30) is None


@given(st.integers(1 << 16, (1 << 30) - 1))
def test_a_link_takes_less_than_the_limit_longer_for_any_object_of_a_class(size):
    assert math.sqrt(2) < SLOW
    assert class_of(math.ceil(size * math.sqrt(2))) != class_of(size)


def shrunk():
    """A window that is held, since slow answers made it smaller."""
    window, now = RequestWindow(), 0.0
    for _ in range(100):
        now = asked(window, now, 0.1)
    size = window.size
    while window.size >= size:
        now = asked(window, now, 0.5)
    assert window._held
    return window, now


def test_a_window_that_only_lists_grows_again():
    window, now = shrunk()
    for _ in range(3000):
        window.sent(63, now)
        window.answered(now, now + 0.01)
        now += 0.02
    assert window.size == MOST


def test_a_window_that_was_not_used_grows_again():
    window, now = shrunk()
    window.sent(0, now + 10)
    assert window.size < 4
    now += 10
    for _ in range(8):
        window.sent(63, now)
        window.answered(now, now + 0.01)
        now += 0.02
    assert window.size > 4


@given(st.lists(st.tuples(st.integers(0, 1 << 33), st.floats(0, 1e4)), max_size=300))
def test_its_state_is_taken_over_as_it_is(answers):
    times, other = AnswerTimes(), AnswerTimes()
    for size, taken_s in answers:
        if times.note(size, taken_s, 8.0) > SLOW and times.settled():
            times.begin()
        other.restore(times.state())
        assert other.state() == times.state()


def test_a_lowest_mean_that_chance_made_is_forgotten():
    times = AnswerTimes()
    for _ in range(FIRST_ROUND):
        times.note(1000, 0.05, 1.0)
    answers = 0
    while times.note(1000, 0.1, 1.0) > SLOW or answers < ROUND:
        answers += 1
        assert answers < 10_000
    assert answers > 1000, "a store that is slow for a few rounds is not forgiven"
