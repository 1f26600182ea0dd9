"""A run's system prompt, chat template and template variables."""

import pytest

from deltawire.chat.messages import Message
from deltawire.chat.text import Text
from deltawire.errors import InputError
from deltawire.train.build import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if not thinking %}(quick){% endif %}{% endif %}"
)


def shown(text, tokens):
    return "".join(chr(t) if t < 256 else "<|end|>" for t in tokens)


def test_variables_reach_the_template_in_prompts_and_bridges():
    quick = Text(byte_tokenizer(), template=TEMPLATE)
    deep = Text(byte_tokenizer(), template=TEMPLATE, template_kwargs={"thinking": True})
    assert shown(quick, quick.prompt("Hi")) == "[user]Hi<|end|>[assistant](quick)"
    assert shown(deep, deep.prompt("Hi")) == "[user]Hi<|end|>[assistant]"
    assert shown(deep, deep.bridge([Message("user", "More")], after=[65, 256])) == (
        "[user]More<|end|>[assistant]"
    )


def test_a_template_replaces_the_models_own():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}!"
    own, other = Text(tokenizer), Text(tokenizer, template=TEMPLATE)
    assert shown(own, own.prompt("Hi")) == "Hi!"
    assert shown(other, other.prompt("Hi")).startswith("[user]Hi")
    assert tokenizer.chat_template.endswith("!"), "other users of the tokenizer keep theirs"


def test_a_system_prompt_comes_first_unless_there_is_one():
    text = Text(byte_tokenizer(), template=TEMPLATE, system="Be brief.")
    assert shown(text, text.prompt("Hi")).startswith("[system]Be brief.<|end|>[user]Hi")
    own = [Message("system", "Be long."), Message("user", "Hi")]
    assert shown(text, text.prompt(own)).startswith("[system]Be long.<|end|>[user]Hi")
    plain = Text(byte_tokenizer(), system="Be brief. ")
    assert shown(plain, plain.prompt("Hi")) == "Be brief. Hi"


def test_what_is_no_variable_is_refused():
    with pytest.raises(InputError, match="cannot set add_generation_prompt"):
        Text(byte_tokenizer(), template=TEMPLATE, template_kwargs={"add_generation_prompt": False})
    with pytest.raises(InputError, match=r"and the model has none; set chat\.template"):
        Text(byte_tokenizer(), template_kwargs={"thinking": True})
