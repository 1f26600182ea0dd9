"""Concurrent creates, reads, puts and deletes of one object have an order that explains them."""

import pytest
from disk_s3_server import DiskS3Server, KillsItsServer
from linearizing import NO_ANSWER, Operation, is_linearizable, record

SERVERS = [pytest.param(kind, marks=pytest.mark.drills) for kind in ("s3", "moto", "disk")]


@pytest.mark.parametrize("kind", ["folder", "memory", *SERVERS])
def test_what_a_store_answers_has_an_order(new_bucket, kind):
    bucket = new_bucket(kind)
    for number in range(3):
        history = record(bucket, f"one/{number}", clients=6, rounds=4)
        assert len(history) == 48
        assert is_linearizable(history)


@pytest.mark.drills
def test_a_server_that_is_killed_keeps_what_it_answered(tmp_path):
    server, lost = DiskS3Server(tmp_path / "objects"), 0
    try:
        for at in range(2, 26, 2):
            inner = server.open_bare("killed", retry_config={"max_retries": 0})
            bucket = KillsItsServer(inner, server, at)
            history = record(bucket, f"one/{at}", clients=4, rounds=4)
            bucket.killing.join()
            assert len(history) == 32
            assert is_linearizable(history)
            lost += sum(one.answer is NO_ANSWER for one in history)
    finally:
        server.kill()
    assert lost, "no kill met a request"


def operation(verb, value, answer, began, ended):
    return Operation(verb, value, answer, began, ended)


def test_two_winners_of_a_create_have_none():
    both = [operation("create", name, True, 0.0, 1.0) for name in (b"a", b"b")]
    assert not is_linearizable(both)
    assert is_linearizable([both[0], operation("create", b"b", False, 0.0, 1.0)])


def test_a_stale_answer_has_none():
    written = [operation("put", b"a", None, 0.0, 1.0), operation("put", b"b", None, 2.0, 3.0)]
    assert not is_linearizable([*written, operation("get", None, b"a", 4.0, 5.0)])
    assert is_linearizable([*written, operation("get", None, b"a", 2.5, 5.0)])


def test_a_write_without_an_answer_may_be_done_late_or_never():
    lost = operation("create", b"a", NO_ANSWER, 0.0, float("inf"))
    assert is_linearizable([lost, operation("get", None, None, 1.0, 2.0)])
    assert is_linearizable([lost, operation("get", None, b"a", 1.0, 2.0)])
    read_twice = [
        operation("get", None, b"a", 1.0, 2.0), operation("get", None, None, 3.0, 4.0)
    ]  # fmt: skip
    assert not is_linearizable([lost, *read_twice])
