"""Text to tokens and back, with and without a chat template."""

import copy

import pytest

from deltawire.engines.text import Text
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
    assert text.prompt("héllo\n") == text.plain("héllo\n") == list("héllo\n".encode())


def test_a_template_makes_the_prompt_a_users_message(chat):
    assert chat.prompt("hi") == [*b"<user>hi", BYTES, *b"<assistant>"]
    assert chat.plain("hi") == list(b"hi")


def test_decoding_leaves_out_special_tokens(byte_tokenizer):
    assert Text(byte_tokenizer).decode([72, 105, BYTES, BYTES + 1]) == "Hi"
    assert Text(byte_tokenizer).decode([]) == ""


def test_plain_text_gets_no_tokens_of_its_own(byte_tokenizer):
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", BYTES)]
    )
    assert tokenizer.encode("a") == [97, BYTES]
    assert Text(tokenizer).plain("a") == [97]
