"""Comparisons after an update: equal, different, not readable, no answer."""

import logging
import threading

import msgspec
import pytest
import torch
from loops import Policy, SmallEngine

from deltawire.attest import digests
from deltawire.attest.sides import Side
from deltawire.engines.live_parts import METHOD
from deltawire.errors import InputError, RetryError, StoppedError
from deltawire.integrations import checking
from deltawire.integrations.asking import in_process
from deltawire.integrations.checking import WeightCheck
from deltawire.integrations.sharing import digest_export


class Loop:
    """A trainer that updates one engine and compares."""

    def __init__(self, *options, drops=(), **more):
        self.policy = Policy()
        self.engine = SmallEngine(self.policy.served(), drops)
        self.check = WeightCheck(*options, **more)

    def update(self, ask=None):
        if self.check.due():
            reference = self.reference()
            self.engine.update(self.policy.served())
            self.check.examine(reference, lambda: {"e": ask or in_process(self.engine, "e")})
        self.policy.step()

    def reference(self):
        return self.check.reference(lambda: digests(self.policy, dtype="bfloat16"))


def test_honest_updates_are_equal(caplog):
    loop = Loop("stop")
    for _ in range(3):
        loop.update()
        assert loop.check.last["e"].equal
    assert not caplog.records


def test_a_dropped_tensor_stops_the_training_and_is_named_with_its_version():
    loop = Loop("stop", drops=("norm",))
    loop.update()
    with pytest.raises(StoppedError, match=r"update 2 in 1 of 12 tensors: norm \(.*update 1"):
        loop.update()


def test_a_warning_lets_the_training_go_on(caplog):
    loop = Loop("warn", drops=("norm",))
    for _ in range(2):
        loop.update()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "norm" in record.getMessage()


def test_updates_are_left_out():
    loop = Loop("stop", every=3)
    for _ in range(4):
        loop.update()
        assert loop.check.last
        loop.engine.drops = ("norm",) if loop.check.updates < 3 else ()
    assert loop.check.updates == 4


def test_an_engine_that_does_not_answer_is_no_mismatch_and_said_once(caplog):
    def refuse(_):
        raise RetryError("it is away")

    loop = Loop("stop")
    for _ in range(2):
        loop.update(refuse)
    (record,) = caplog.records
    assert "was not compared: it is away" in record.getMessage()
    assert not loop.check.last


def test_what_is_not_readable_is_not_equal_and_no_mismatch(caplog):
    loop = Loop("stop")
    for module in loop.engine.modules:
        module.__dict__.pop("_deltawire_changes", None)
    ask = in_process(loop.engine, "e")
    loop.check.due()
    loop.check.examine(loop.reference(), lambda: {"e": ask})
    assert not loop.check.last["e"].equal
    assert "not readable" in caplog.text


def test_an_update_under_way_is_looked_at_again():
    """Half of an update is not a mismatch if the rest arrives before the next look."""
    loop = Loop("stop")
    loop.update()
    half = {name: held for name, held in loop.policy.served().items() if name < "k"}
    for module in loop.engine.modules:
        module.load_weights(half.items())
    looks = []

    def ask(reference):
        found = in_process(loop.engine, "e")(reference)
        looks.append(found)
        loop.engine.update(loop.policy.served())  # The other half.
        return found

    loop.check.examine(loop.reference(), lambda: {"e": ask})
    assert len(looks) == 2
    assert loop.check.last["e"].equal


def test_weights_that_keep_changing_are_said_to():
    loop = Loop("warn")

    def ask(reference):
        loop.policy.step()
        loop.engine.update(loop.policy.served())
        return in_process(loop.engine, "e")(reference)

    loop.check.due()
    loop.check.examine(loop.reference(), lambda: {"e": ask})
    assert "an update is under way" in loop.check.last["e"].notes[0]


def test_a_trainer_without_engines_says_so(caplog):
    loop = Loop("stop")
    loop.check.examine(loop.reference(), dict)
    assert "there is no engine to compare" in caplog.text


def test_options_are_checked():
    with pytest.raises(InputError, match="on_mismatch"):
        WeightCheck("ignore")
    with pytest.raises(InputError, match="every"):
        WeightCheck(every=0)


def test_an_answer_that_cannot_be_read_is_said(caplog):
    class Odd:
        def collective_rpc(self, method, args):
            assert method == METHOD
            return [{"rank": "none"}]

    loop = Loop("stop")
    loop.update(in_process(Odd(), "odd"))
    assert "the answer of odd cannot be read" in caplog.text
    assert msgspec.json.encode(loop.check.last) == b"{}"


def test_weights_that_cannot_be_digested_are_said_and_end_no_training(caplog):
    def refuse():
        raise InputError("a packed weight")

    check = WeightCheck("stop")
    for _ in range(2):
        check.examine(check.reference(refuse), lambda: {"e": lambda _: []})
    (record,) = caplog.records
    assert "nothing was compared: a packed weight" in record.getMessage()


@pytest.mark.parametrize("error", [NotImplementedError("no such method"), MemoryError("full")])
def test_a_foreign_error_is_said_and_ends_no_training(caplog, error):
    def fail(*_):
        raise error

    loop = Loop("stop")
    loop.update(fail)
    reference = loop.reference()
    loop.check.examine(reference, fail)
    loop.check.examine(loop.check.reference(fail), fail)
    said = f"{type(error).__name__}: {error}"
    assert [one.getMessage() for one in caplog.records] == [
        f"e was not compared: {said}",
        f"nothing was compared: {said}",
    ]


def test_what_is_logged_is_short_and_holds_no_control_characters(caplog):
    def fail(_):
        raise ValueError("\x1b[2J" + "x" * 9999)

    loop = Loop("stop")
    loop.update(fail)
    (record,) = caplog.records
    assert len(record.getMessage()) < 600
    assert "\x1b" not in record.getMessage()
    parts = in_process(loop.engine, "e")
    caplog.clear()
    check = WeightCheck("warn")
    odd = {**loop.policy.served(), "norm": loop.policy.served()["norm"] + 1}
    reference = Side("\x1b[2J", digests(odd))
    check.examine(reference, lambda: {"e": lambda _: parts(reference)})
    assert "holds other weights" in caplog.text
    assert "\x1b" not in caplog.text


def test_engines_are_asked_at_the_same_time_within_one_limit(monkeypatch, caplog):
    monkeypatch.setattr(checking, "LIMIT_S", 5.0)
    loop = Loop("stop")
    both, end = threading.Barrier(2), threading.Event()

    def ask(reference):
        both.wait(5)  # Breaks if the second one is asked after the first.
        return in_process(loop.engine, "e")(reference)

    def never(_):
        end.wait(60)
        raise InputError("too late")

    loop.check.examine(loop.reference(), lambda: {"a": ask, "b": ask})
    assert loop.check.last.keys() == {"a", "b"}
    monkeypatch.setattr(checking, "LIMIT_S", 0.05)
    loop.check.examine(loop.reference(), lambda: {"c": never, "d": never})
    end.set()
    assert "c was not compared: no answer within" in caplog.text
    assert "d was not compared: no answer within" in caplog.text


def test_the_rest_of_a_collective_stream_is_read_after_an_error():
    read = []

    def stream():
        for number in range(5):
            read.append(number)
            yield f"t{number}", None if number == 1 else torch.ones(2)

    found = digest_export(stream())
    assert read == list(range(5))
    assert found.startswith("nothing was compared: AttributeError")
