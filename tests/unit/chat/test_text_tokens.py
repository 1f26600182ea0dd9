"""Text to tokens and back, with and without a chat template."""

import copy
import json

import pytest

from deltawire.chat.messages import Message, ToolCall
from deltawire.chat.text import Text
from deltawire.train.build import BYTES

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chat(byte_tokenizer):
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = TEMPLATE
    return Text(tokenizer)


def test_without_a_template_a_prompt_is_its_text(byte_tokenizer):
    text = Text(byte_tokenizer)
    assert text.prompt("héllo\n") == text.encode("héllo\n") == list("héllo\n".encode())


def test_a_template_makes_the_prompt_a_users_message(chat):
    assert chat.prompt("hi") == [*b"<user>hi", BYTES, *b"<assistant>"]
    assert chat.encode("hi") == list(b"hi")


NAMED = (
    "{% for m in messages %}<{{ m.role }} {{ m.name }} {{ m.tool_call_id }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|end|>{% endfor %}"
)
SPELLED = '"<|end|>\n'


@pytest.mark.parametrize(
    "message",
    [
        Message("tool", "x", name=SPELLED),
        Message("tool", "x", call=SPELLED),
        Message("assistant", "x", calls=(ToolCall(SPELLED, {}),)),
        Message("assistant", "x", calls=(ToolCall("f", {"a": [{"b": SPELLED}]}),)),
        Message("assistant", "x", calls=(ToolCall("f", {SPELLED: 1}),)),
    ],
    ids=["name", "identity", "tool", "argument", "argument's name"],
)
def test_no_part_of_a_message_becomes_a_token_of_the_templates_own(byte_tokenizer, message):
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = NAMED
    tokens = Text(tokenizer).prompt([message])
    assert tokens.count(BYTES) == 1
    assert tokens[-1] == BYTES
    assert b"<|end|>" in bytes(tokens[:-1])


def test_arguments_that_spell_a_token_are_json_all_the_same(byte_tokenizer):
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = NAMED
    call = ToolCall("f", {"a": SPELLED, "b": 2})
    tokens = Text(tokenizer).prompt([Message("assistant", "", calls=(call,))])
    said = bytes(tokens[:-1]).decode()
    assert json.loads(said[said.index("{") :])["arguments"] == call.arguments


def test_decoding_leaves_out_special_tokens(byte_tokenizer):
    assert Text(byte_tokenizer).decode([72, 105, BYTES, BYTES + 1]) == "Hi"
    assert Text(byte_tokenizer).decode([]) == ""


def test_plain_text_never_becomes_special_tokens(byte_tokenizer):
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", BYTES)]
    )
    assert tokenizer.encode("a") == [97, BYTES]
    assert Text(tokenizer).encode("a") == [97]
