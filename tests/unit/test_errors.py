"""Every error is one line, with its place and its hint."""

import pickle

import pytest

from deltawire import errors
from deltawire.errors import (
    CorruptError,
    DeltawireError,
    FencedError,
    ResyncError,
    ThrottledError,
    UnreadableError,
)

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, DeltawireError)
]
LINE_BREAKS = "a\nb\r\nc\x0bd\x0ce\x1cf\x85g\u2028h\u2029i\tj"


def test_the_kinds_are_known():
    assert {kind.__name__ for kind in KINDS} == {
        "DeltawireError", "RetryError", "ResyncError", "CorruptError", "InputError",
        "FencedError", "BugError", "SignatureError", "StoppedError", "UnreadableError",
        "ThrottledError", "OutOfMemoryError",
    }  # fmt: skip
    shared = (CorruptError, ThrottledError, UnreadableError)
    codes = [kind.exit_code for kind in KINDS if not issubclass(kind, shared)]
    assert len(set(codes)) == len(codes)
    assert CorruptError.exit_code == ResyncError.exit_code
    assert 0 not in codes


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_prints_as_one_line(kind):
    error = kind(LINE_BREAKS, hint=LINE_BREAKS, run=LINE_BREAKS, version=0, key=LINE_BREAKS)
    assert len(str(error).splitlines()) == 1
    assert "a b c d e f g h i j" in str(error)


def test_place_and_hint():
    error = FencedError("taken", hint="stop", run="s3://b", version=0, key="k")
    assert str(error) == "taken (run s3://b, version 0, key k); stop"
    assert str(FencedError("taken")) == "taken"
    assert str(FencedError("taken", key="k")) == "taken (key k)"
    assert str(FencedError("taken", hint="stop")) == "taken; stop"


def test_survives_pickling_between_processes():
    error = CorruptError("bad", hint="h", run="r", version=3, key="k")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is CorruptError
    assert str(copy) == str(error) == "bad (run r, version 3, key k); h"


def test_nothing_in_it_is_obeyed_by_a_terminal():
    error = CorruptError("tensor '\x1b]0;mine\x07\x1b[2J'", key="\x9b31m\u202e\x00")
    assert str(error).isprintable()
    assert str(error) == "tensor '·]0;mine··[2J' (key ·31m··)"
