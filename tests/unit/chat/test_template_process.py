"""The process with limits renders what `apply_chat_template` renders in this one, to the byte."""

import copy
import json

from test_call_dialects import TEMPLATES
from test_model_families import FAMILIES

from deltawire.chat.messages import Message, Tool, ToolCall
from deltawire.chat.template_process import TemplateProcess
from deltawire.chat.text import Text

OWN = {
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ messages }}{{ add_generation_prompt }}",
    "a date": "{{ strftime_now('%Y %B %j') }}",
    "documents": "{% for d in documents %}{{ d.title }}: {{ d.text }}\n{% endfor %}",
    "tools": "{{ tools | tojson(indent=2) }}\n{% for tool in tools or [] %}{{ tool }}{% endfor %}",
    "a part that is generated": "a {% generation %}b{{ messages[0].content }}{% endgeneration %}",
    "trimmed blocks": "  {% if true %}\n  x\n  {% endif %}\n",
    "loop controls": "{% for n in [1, 2] %}{{ n }}{% if n %}{% break %}{% endif %}{% endfor %}",
    "a namespace": "{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}{{ dict(a=1) }}",
    "variables": "{{ enable_thinking }} {{ effort }} {{ when }} {{ absent is defined }}",
    "JSON": "{{ messages | tojson }}{{ messages | tojson(sort_keys=true, separators=[',', ':']) }}",
    "an error": "{{ raise_exception('no') }}",
    "a wrong type": "{{ 'a' + messages }}",
    "what is hidden": "{{ messages.__class__.__mro__ }}",
    "a change": "{{ messages.append(1) }}",
    "a syntax error": "{% if %}",
}
CALL = ToolCall("add", {"a": 1, "b": [0.5, None, True], "é": {"<": "'\"&"}})
CONVERSATIONS = [
    [Message("user", "hi")],
    [
        Message("system", "  é\u2028𝄞 \ud83d\ude00 \ud800 <b>&amp;</b>\x00\x1b\r\n "),
        Message("user", "{{ 1 + 1 }} {% raw %} \\u0041", name="Zoë"),
        Message("assistant", "", calls=(CALL,)),
        Message("tool", '{"sum": 1.5}', call=CALL.identity),
        Message("assistant", "done"),
    ],
]
TOOL = Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "number"}}})


def outcome(render):
    try:
        return render()
    except Exception as error:
        return (isinstance(error, TypeError), str(error))


def test_texts_and_errors_are_those_of_the_library(byte_tokenizer):
    templates = {**TEMPLATES, **{name: family[0] for name, family in FAMILIES.items()}, **OWN}
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.bos_token = "<s>"
    variables = {"enable_thinking": False, "effort": 2.5, "when": [1, "é"]}
    documents = [{"title": "é", "text": "𝄞"}]
    process = Text(tokenizer, origin="a bucket")._process
    assert isinstance(process, TemplateProcess)
    texts = 0
    for name, template in templates.items():
        for messages in CONVERSATIONS:
            rows = [Text(tokenizer)._row(message, []) for message in messages]
            for more in (
                {"tools": None, "add_generation_prompt": True},
                {"tools": [TOOL.schema], "add_generation_prompt": False, "documents": documents},
            ):
                wanted = outcome(
                    lambda template=template, rows=rows, more=more: tokenizer.apply_chat_template(
                        rows, chat_template=template, tokenize=False, **more, **variables
                    )
                )
                arguments = {**tokenizer.special_tokens_map, **variables, **more}
                found = outcome(
                    lambda template=template, rows=rows, arguments=arguments: process.render(
                        template, rows, arguments, within_s=60.0
                    )
                )
                assert found == wanted, (name, json.dumps(rows))
                texts += isinstance(found, str)
    assert texts > 2 * len(templates)


def test_a_conversation_has_the_same_tokens(byte_tokenizer):
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = TEMPLATES["hermes"]
    here, there = Text(tokenizer), Text(tokenizer, origin="a bucket")
    for messages in CONVERSATIONS:
        assert there.prompt(messages, [TOOL]) == here.prompt(messages, [TOOL])
    assert (there.end, there.opening("add")) == (here.end, here.opening("add"))
    asked = [Message("user", "more")]
    assert there.bridge(asked, after=[5]) == here.bridge(asked, after=[5])
