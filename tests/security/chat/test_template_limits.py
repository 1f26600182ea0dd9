"""A chat template that came from a bucket takes neither the memory nor the time of a process."""

import copy
from types import SimpleNamespace

import pytest

from deltawire.chat import template_process
from deltawire.chat.messages import Message
from deltawire.chat.requests import text_of
from deltawire.chat.template_process import TemplateError, TemplateProcess
from deltawire.config import ChatConfig
from deltawire.config.machine import POLICY
from deltawire.errors import InputError

ROWS = [{"role": "user", "content": "hi"}]
HOSTILE = {
    "a string of 6 GiB": ("{{ ('a' * 6442450944)|length }}", 60.0, "takes more than 512 MiB"),
    "100 MB of output": (
        "{% for n in range(1000) %}{{ 'a' * 100000 }}{% endfor %}",
        60.0,
        "writes more than 64 MiB",
    ),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", 60.0, "recursion"),
    "a power of a power": ("{{ 9**(9**9) }}", 1.0, "takes more than (1 s|512 MiB)"),
    "nested loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        1.0,
        "takes more than 1 s",
    ),
}


def test_each_limit_is_one_error_and_the_next_rendering_works():
    process = TemplateProcess("s3://bucket/run")
    for template, within_s, message in HOSTILE.values():
        with pytest.raises((InputError, TemplateError), match=message) as raised:
            process.render(template, ROWS, {}, within_s=within_s)
        if raised.type is InputError:
            assert "the chat template of s3://bucket/run" in str(raised.value)
        text = process.render("{{ messages[0].content }}", ROWS, {}, within_s=60.0)
        assert text == "hi"
    child = process._child
    process.close()
    assert child is not None
    assert child.returncode is not None


def test_more_than_a_request_may_hold_is_refused(monkeypatch):
    monkeypatch.setattr(template_process, "MAX_BYTES", 1000)
    process = TemplateProcess("s3://bucket/run")
    with pytest.raises(InputError, match="given more than"):
        process.render("x", [{"role": "user", "content": "a" * 1000}], {}, within_s=5.0)


def test_only_templates_that_this_machine_trusts_are_rendered_without_limits(
    byte_tokenizer, tmp_path, monkeypatch
):
    """The template takes more than a process with limits has, and no more than this one has."""
    policy = tmp_path / "policy.toml"
    monkeypatch.setenv(POLICY, str(policy))
    policy.write_text("")
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = "{{ ('a' * 700000000)|length }}"
    asked, config = [Message("user", "hi")], SimpleNamespace(chat=ChatConfig())
    with pytest.raises(InputError, match=r"of the run in s3://b/r takes more than 512 MiB"):
        text_of(config, tokenizer, bucket="s3://b/r").prompt(asked)
    assert text_of(config, tokenizer, bucket="").prompt(asked) == [*b"700000000"]
    policy.write_text("trusted_templates = true")
    assert text_of(config, tokenizer, bucket="s3://b/r").prompt(asked) == [*b"700000000"]
