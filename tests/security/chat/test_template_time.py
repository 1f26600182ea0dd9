"""A model's chat template cannot hold a worker for longer than its limit."""

import copy
import threading
import time

import pytest

from deltawire.chat import text as text_module
from deltawire.chat.messages import Message
from deltawire.chat.text import Text
from deltawire.chat.time_limit import within
from deltawire.errors import InputError

ENDLESS = {
    "nested loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}"
    ),
}


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("threaded", [False, True])
def test_a_template_that_does_not_end_is_refused(byte_tokenizer, monkeypatch, name, threaded):
    monkeypatch.setattr(text_module, "RENDER_WITHIN_S", 0.2)
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = ENDLESS[name]
    errors, began = [], time.monotonic()

    def render():
        try:
            Text(tokenizer).prompt([Message("user", "hi")])
        except InputError as error:
            errors.append(str(error))

    if threaded:
        thread = threading.Thread(target=render)
        thread.start()
        thread.join(120)
    else:
        render()
    assert time.monotonic() - began < 60
    (error,) = errors
    assert "takes more than 0.2 s" in error


def test_the_limit_leaves_no_exception_for_later():
    """The timer fires about when the call returns: the error comes from the call, or not at all."""
    for round_ in range(200):
        until = time.monotonic() + 0.002

        def spin(until=until):
            while time.monotonic() < until:
                pass
            return 7

        try:
            assert within(0.002 + (round_ % 5 - 2) * 1e-4, spin, name="it") == 7
        except InputError:
            continue
        for _ in range(1000):
            pass


def test_other_errors_of_the_call_are_its_own():
    with pytest.raises(KeyError):
        within(5.0, lambda: {}["x"], name="it")


def test_a_limit_that_ends_as_the_call_ends_leaves_nothing_to_arrive_later():
    """The exception is raised by `within` or not at all, however close the race."""
    results = {"value": 0, "late": 0}

    def spin(until):
        while time.monotonic() < until:
            pass
        return 1

    for _ in range(200):
        limit_s = 0.002
        until = time.monotonic() + limit_s
        try:
            assert within(limit_s, lambda until=until: spin(until), name="a call") == 1
            results["value"] += 1
        except InputError:
            results["late"] += 1
        for _ in range(1000):
            pass
    assert sum(results.values()) == 200


def test_an_error_of_the_call_comes_through_though_its_time_is_over():
    def fail():
        raise KeyError("the call's own")

    for limit_s in (0.0, 0.001, 5.0):
        with pytest.raises((KeyError, InputError)):
            within(limit_s, fail, name="a call")
