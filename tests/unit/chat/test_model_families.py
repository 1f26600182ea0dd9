# ruff: noqa: E501  -- the templates keep their published line structure
"""Chat templates of published model families: calls, ends of turns, and beginnings.

Each template has the statements of the published one for messages, calls and the start of an
answer; the lists of tools and the modes of thinking, which these tests do not use, are left out.
"""

import copy

import pytest
from tokenizers import processors

from deltawire.chat.calls import DEEPSEEK, GLM, HARMONY, HERMES
from deltawire.chat.messages import Message, Tool, ToolCall
from deltawire.chat.text import Text
from deltawire.rl.trainer.warm_start import answer_end
from deltawire.train.build import byte_tokenizer

CHATML = (
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
QWEN_XML = (
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'assistant' and message.tool_calls %}"
    "{{- '<|im_start|>' + message.role + '\n' + content }}"
    "{%- for tool_call in message.tool_calls %}"
    "{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}"
    "{%- if loop.first %}{%- if content|trim %}"
    "{{- '\n\n<tool_call>\n<function=' + tool_call.name + '>\n' }}{%- else %}"
    "{{- '<tool_call>\n<function=' + tool_call.name + '>\n' }}{%- endif %}{%- else %}"
    "{{- '\n<tool_call>\n<function=' + tool_call.name + '>\n' }}{%- endif %}"
    "{%- for args_name, args_value in tool_call.arguments|items %}"
    "{{- '<parameter=' + args_name + '>\n' }}"
    "{%- set args_value = args_value | tojson | safe if args_value is mapping or "
    "(args_value is sequence and args_value is not string) else args_value | string %}"
    "{{- args_value }}{{- '\n</parameter>\n' }}{%- endfor %}"
    "{{- '</function>\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + content + '\n</tool_response>' }}"
    "{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}" + CHATML
)
GLM_MOE = (
    "[gMASK]<sop>{% for m in messages %}"
    "{%- if m.role == 'user' -%}<|user|>\n{{ m.content }}"
    "{%- elif m.role == 'assistant' -%}<|assistant|>\n{{ '\n<think></think>' }}"
    "{%- if m.content.strip() -%}{{ '\n' + m.content.strip() }}{%- endif -%}"
    "{% if m.tool_calls %}{% for tc in m.tool_calls %}"
    "{%- if tc.function %}{%- set tc = tc.function %}{%- endif %}{{ '\n<tool_call>' + tc.name }}\n"
    "{% set _args = tc.arguments or {} %}{% for k, v in _args.items() %}"
    "<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>\n"
    "{% endfor %}</tool_call>{% endfor %}{% endif %}"
    "{%- elif m.role == 'tool' -%}{{- '<|observation|>' }}"
    "{{- '\n<tool_response>\n' }}{{- m.content }}{{- '\n</tool_response>' }}"
    "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
DEEPSEEK_V3 = (
    "{{ bos_token }}{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{'<｜User｜>' + message['content']}}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['tool_calls'] %}"
    "{%- for tool in message['tool_calls'] %}{%- if loop.first %}"
    "{{'<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + "
    "tool['function']['name'] + '\n' + '```json' + '\n' + tool['function']['arguments'] + '\n' + "
    "'```' + '<｜tool▁call▁end｜>'}}{%- else %}"
    "{{'\n' + '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + "
    "'\n' + '```json' + '\n' + tool['function']['arguments'] + '\n' + '```' + '<｜tool▁call▁end｜>'}}"
    "{%- endif %}{%- endfor %}{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}"
    "{%- elif message['role'] == 'assistant' %}"
    "{{'<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>'}}{%- endif %}"
    "{%- if message['role'] == 'tool' %}"
    "{{'<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>' + message['content'] + "
    "'<｜tool▁output▁end｜><｜tool▁outputs▁end｜>'}}{%- endif %}{%- endfor -%}"
    "{% if add_generation_prompt %}{{'<｜Assistant｜>'}}{% endif %}"
)
DEEPSEEK_V31 = (
    DEEPSEEK_V3.replace("tool['type'] + '<｜tool▁sep｜>' + ", "")
    .replace("'\n' + '```json' + '\n' + ", "'<｜tool▁sep｜>' + ")
    .replace(" + '\n' + '```' +", " +")
)
GPT_OSS = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}"
    "{%- if 'tool_calls' in message -%}{%- set tool_call = message.tool_calls[0] -%}"
    "{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}"
    "{{- '<|start|>assistant to=' }}"
    "{{- 'functions.' + tool_call.name + '<|channel|>commentary ' }}"
    "{{- (tool_call.content_type if tool_call.content_type is defined else 'json') + '<|message|>' }}"
    "{{- tool_call.arguments|tojson }}{{- '<|call|>' }}"
    "{%- elif loop.last and not add_generation_prompt %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}"
    "{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}"
    "{%- endif -%}"
    "{%- elif message.role == 'tool' -%}"
    "{{- '<|start|>functions.' + message.name }}"
    "{{- ' to=assistant<|channel|>commentary<|message|>' + message.content|tojson + '<|end|>' }}"
    "{%- elif message.role == 'user' -%}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}"
    "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
)
LLAMA = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + "
    "message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{%- endif %}"
)
CHAT_TOKENS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
GLM_TOKENS = ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"]
DEEPSEEK_TOKENS = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
]
HARMONY_TOKENS = [
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|message|>",
    "<|call|>",
]


def text_of(template, special, *, bos=None):
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    if bos:
        tokenizer.bos_token = bos
    tokenizer.chat_template = template
    return Text(tokenizer)


def token(text, spelled):
    return next(n for n, found in text._special_texts.items() if found == spelled)


FAMILIES = {
    "Qwen3-Coder, Qwen3.5, Nemotron-3": (QWEN_XML, CHAT_TOKENS, HERMES),
    "GLM-4-MoE": (GLM_MOE, GLM_TOKENS, GLM),
    "DeepSeek-V3": (DEEPSEEK_V3, DEEPSEEK_TOKENS, DEEPSEEK),
    "DeepSeek-V3.1": (DEEPSEEK_V31, DEEPSEEK_TOKENS, DEEPSEEK),
    "gpt-oss": (GPT_OSS, HARMONY_TOKENS, HARMONY),
}
ARGUMENTS = {"path": "a <b>.txt", "lines": [1, 2], "deep": {"x": None}, "count": 3, "as_text": "7"}
TOOL = Tool(
    "read_file",
    "Reads a file.",
    {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "lines": {"type": "array"},
            "deep": {"type": "object"},
            "count": {"type": "integer"},
            "as_text": {"type": ["string", "null"]},
        },
    },
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_calls_are_read_as_its_template_spells_them(family):
    template, special, dialect = FAMILIES[family]
    bos = special[0] if "begin" in special[0] else None
    text = text_of(template, special, bos=bos)
    assert text._dialect is dialect
    call = ToolCall("read_file", ARGUMENTS, "t00000c00")
    messages = [Message("user", "read it"), Message("assistant", "", calls=(call,))]
    prompt = text.decode(text.prompt(messages[:1]))
    whole = text.decode(text.prompt(messages))
    turn = whole[len(prompt) :].removesuffix("<|start|>assistant").removesuffix("<|assistant|>")
    parsed = text.read_calls(turn, tools=[TOOL])
    assert [(c.name, dict(c.arguments)) for c in parsed.calls] == [("read_file", ARGUMENTS)]
    assert parsed.broken == ()
    opening, tokens = text.opening("read_file")
    assert opening.strip()
    assert opening.strip() in whole
    assert text.decode(tokens) == opening


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_familys_calls_that_are_cut_off_are_broken(family, share):
    template, special, _ = FAMILIES[family]
    text = text_of(template, special, bos=special[0] if "begin" in special[0] else None)
    call = ToolCall("read_file", ARGUMENTS, "t00000c00")
    rendered = text.decode(
        text.prompt([Message("user", "."), Message("assistant", "", calls=(call,))])
    )
    opening = text.opening("read_file")[0].strip()
    start = rendered.rindex(opening)
    body = rendered[start:]
    cut = body[: len(opening) + int(share * (body.rindex("7") - len(opening)))]
    parsed = text.read_calls(cut, tools=[TOOL])
    assert parsed.calls == ()
    assert len(parsed.broken) == 1


def test_types_of_bare_arguments_without_a_schema():
    """Of bare text, numbers and structures are what they look like; everything else is text."""
    body = "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n"
        for name, value in {
            "a": "3",
            "b": "[1]",
            "c": "x",
            "d": '"q"',
            "e": "null",
            "f": "",
        }.items()
    )
    parsed = HERMES.read(f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>")
    expected = {"a": 3, "b": [1], "c": "x", "d": '"q"', "e": None, "f": ""}
    assert dict(parsed.calls[0].arguments) == expected


def test_calls_without_arguments():
    xml = HERMES.read("<tool_call>\n<function=f>\n</function>\n</tool_call>")
    assert [(c.name, c.arguments) for c in xml.calls] == [("f", {})]
    bare = GLM.read("<tool_call>f\n</tool_call>")
    assert [(c.name, c.arguments) for c in bare.calls] == [("f", {})]
    assert HERMES.read("<tool_call>f\n</tool_call>").broken


@pytest.mark.parametrize(
    ("drawn", "first"),
    [("<|return|>", "<|start|>"), ("<|call|>", "<|start|>"), ("x", "<|end|>")],
)
def test_a_harmony_turn_that_has_ended_gets_no_second_end(drawn, first):
    """gpt-oss ends an answer with return and a call with call; the template's history says end."""
    text = text_of(GPT_OSS, HARMONY_TOKENS)
    last = token(text, drawn) if drawn.startswith("<") else ord(drawn)
    tokens = text.bridge([Message("user", "more")], after=[5, last])
    assert tokens[0] == token(text, first)


def test_a_harmony_answer_is_its_final_channel():
    turn = (
        "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>Looking.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    parsed = HARMONY.read(turn)
    assert [(c.name, c.arguments) for c in parsed.calls] == [("add", {"a": 1})]
    assert parsed.content == "Looking."
    final = HARMONY.read("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
                         "<|channel|>final<|message|>42<|return|>")  # fmt: skip
    assert (final.content, final.calls, final.broken) == ("42", (), ())


@pytest.mark.parametrize(
    ("template", "special", "end"),
    [
        (QWEN_XML, CHAT_TOKENS, "<|im_end|>"),
        (DEEPSEEK_V3, DEEPSEEK_TOKENS, "<｜end▁of▁sentence｜>"),
        (GPT_OSS, HARMONY_TOKENS, "<|return|>"),
        (LLAMA, ["<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>"], "<|eot_id|>"),
    ],
)
def test_a_warm_start_teaches_the_end_of_the_template(template, special, end):
    """Not the smallest of the ids at which generation stops, which may be another one."""
    text = text_of(template, special, bos=special[0] if "begin" in special[0] else None)
    assert text.end == token(text, end)


def test_a_base_models_prompts_begin_with_its_bos():
    tokenizer = copy.deepcopy(byte_tokenizer())
    assert Text(tokenizer).prompt("hi") == list(b"hi")
    assert Text(tokenizer).end == tokenizer.eos_token_id
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    number = tokenizer.bos_token_id
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", number)]
    )
    text = Text(tokenizer)
    assert text.prompt("hi") == [number, *b"hi"]
    assert text.prompt("") == [number]
    assert text.encode("hi") == list(b"hi")
    assert text.bridge([Message("user", "ho")], after=[104]) == list(b"ho")


def test_a_warm_start_uses_the_end_of_the_template():
    """The answers' last token is the template's end, though a smaller id stops as well."""
    text = text_of(
        LLAMA, ["<|begin_of_text|>", "<|eom_id|>", "<|eot_id|>"], bos="<|begin_of_text|>"
    )
    end, other = token(text, "<|eot_id|>"), token(text, "<|eom_id|>")
    assert other < end
    assert answer_end(text, [other, end]) == end
    assert answer_end(text, [other]) == other
