"""Calls are read in the form that the model's own chat template spells them."""

import copy

import pytest

from deltawire.chat.calls import HERMES, LLAMA, MAX_CALLS, MISTRAL, SAMPLE_CALL, call_format_of
from deltawire.chat.messages import Message, ToolCall
from deltawire.chat.text import Text
from deltawire.errors import InputError
from deltawire.train.build import byte_tokenizer

END = "<|end|>"
SAID = "{% for m in messages %}{% if m.tool_calls %}"
PLAIN = (
    "{% else %}<{{ m.role }}>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEMPLATES = {
    "hermes": SAID
    + "<assistant>{% for c in m.tool_calls %}<tool_call>\n"
    + '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    + "</tool_call>{% endfor %}<|end|>"
    + PLAIN,
    "hermes, arguments first": SAID
    + '<assistant>{% for c in m.tool_calls %}<tool_call>\n{ "arguments": '
    + '{{ c.function.arguments | tojson }}, "name": "{{ c.function.name }}"}\n'
    + "</tool_call>{% endfor %}<|end|>"
    + PLAIN,
    "llama": SAID
    + "{% set c = m.tool_calls[0].function %}<assistant>"
    + '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}<|end|>'
    + PLAIN,
    "mistral": SAID
    + "[TOOL_CALLS] [{% for c in m.tool_calls %}"
    + "{% if c.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}"
    + '{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{{ ", " if not loop.last }}'
    + "{% endfor %}]<|end|>"
    + PLAIN,
    "mistral, each apart": SAID
    + "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}"
    + "[ARGS]{{ c.function.arguments | tojson }}{% endfor %}<|end|>"
    + PLAIN,
    "mistral, with names": SAID
    + "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}"
    + "[ARGS]{{ c.function.arguments | tojson }}{% endfor %}<|end|>"
    + PLAIN,
    "of no known form": SAID
    + "{% for c in m.tool_calls %}<tool_call>\ncall {{ c.function.name }}\n"
    + "{% for k, v in c.function.arguments.items() %}{{ k }} is {{ v }}"
    + "{% endfor %}</tool_call>{% endfor %}<|end|>"
    + PLAIN,
    "a list after a mark": SAID
    + '<assistant><|tool|>[{"name": "{{ m.tool_calls[0].function.name }}", '
    + '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}]<|end|>'
    + PLAIN,
    "without calls": "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}",
    "refusing calls": SAID + "{{ raise_exception('no calls here') }}" + PLAIN,
}


def text_of(template, *, special=()):
    tokenizer = copy.deepcopy(byte_tokenizer())
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = template
    return Text(tokenizer)


def calls_of(written):
    return [(call.name, dict(call.arguments)) for call in written.calls]


OPENINGS = {
    "hermes": (HERMES, '<tool_call>\n{"name":', '<tool_call>\n{"name": "add", "arguments":'),
    "hermes, arguments first": (HERMES, "<tool_call>", None),
    "llama": (LLAMA, '{"name":', '{"name": "add", "parameters":'),
    "mistral": (MISTRAL, '[TOOL_CALLS] [{"name":', '[TOOL_CALLS] [{"name": "add", "arguments":'),
    "mistral, each apart": (MISTRAL, "[TOOL_CALLS]", "[TOOL_CALLS]add[ARGS]"),
    "mistral, with names": (MISTRAL, "[TOOL_CALLS]", None),
    "of no known form": (HERMES, None, None),
    "a list after a mark": (HERMES, None, None),
    "without calls": (HERMES, None, None),
    "refusing calls": (HERMES, None, None),
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_template_tells_its_dialect_and_how_a_call_begins(kind):
    text = text_of(TEMPLATES[kind])
    dialect, any_call, named = OPENINGS[kind]
    assert text._dialect is dialect
    for name, expected in ((None, any_call), ("add", named)):
        if expected is None:
            with pytest.raises(InputError, match="does not define how a call begins"):
                text.opening(name)
        else:
            assert text.opening(name) == (expected, list(expected.encode()))


@pytest.mark.parametrize("kind", [kind for kind, said in OPENINGS.items() if said[1]])
def test_what_the_template_spells_is_read_back(kind):
    """Several calls at once too, where a template spells several."""
    text = text_of(TEMPLATES[kind])
    many = (ToolCall("add", {"a": {"b": ["}", '"', "]"]}}, "t00001c00"), SAMPLE_CALL)
    calls = many[:1] if kind == "llama" else many
    rendered = text._tokenizer.apply_chat_template(
        [{"role": "user", "content": "."}, _assistant(calls)], tokenize=False
    )
    turn = rendered.split("<user>.<|end|>")[1].removeprefix("<assistant>").removesuffix(END)
    written = text.read_calls(turn, turn=7)
    assert calls_of(written) == [(c.name, c.arguments) for c in calls]
    assert (written.content, written.broken) == ("", ())
    assert [c.identity for c in written.calls] == [f"t00007c{n:02}" for n in range(len(calls))]


def _assistant(calls):
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": c.identity, "function": {"name": c.name, "arguments": dict(c.arguments)}}
            for c in calls
        ],
    }


READ = [
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})], "", 0),
    (LLAMA, ' {"name": "f", "arguments": {}}\n', [("f", {})], "", 0),
    (LLAMA, '{"name":"f","parameters":{}}; {"name":"g","parameters":{}}',
     [("f", {}), ("g", {})], "", 0),
    (LLAMA, '{"name": "f", "parameters": {}} and so on', [("f", {})], "and so on", 0),
    (LLAMA, 'It is {"name": "f", "parameters": {}}', [], None, 0),
    (LLAMA, '{"answer": 3}', [], None, 0),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}', [], "", 1),
    (LLAMA, '{"name": "f", "parameters": {"a": NaN}}', [], "", 1),
    (LLAMA, '{"name": "f"}', [], "", 1),
    (LLAMA, '{"name": 3, "parameters": {}}', [], "", 1),
    (LLAMA, '{"name": ' * 3, [], "", 1),
    (LLAMA, '<tool_call>{"name": "f", "arguments": {}}</tool_call>', [("f", {})], "", 0),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}]', [("f", {})], "", 0),
    (MISTRAL, 'so [TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abcdefghi"}] done',
     [("f", {})], "so  done", 0),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}',
     [("f", {"a": 1}), ("g", {})], "", 0),
    (MISTRAL, "[TOOL_CALLS]", [], "", 1),
    (MISTRAL, "[TOOL_CALLS][]", [], "", 1),
    (MISTRAL, "[TOOL_CALLS]f[ARGS]7", [], "", 1),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}, 3]', [("f", {})], "", 1),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1', [], "", 1),
    (MISTRAL, "no call", [], None, 0),
    (MISTRAL, "[TOOL_CALLS]" + "[" * 100_000, [], "", 1),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', [("f", {})], "", 0),
    (HERMES, '<tool_call>{"name": "f"} <tool_call>{"name": "g"}</tool_call>',
     [("g", {})], "", 1),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "text", "calls", "content", "broken"), READ)
def test_reading_one_turn(dialect, text, calls, content, broken):
    written = dialect.read(text)
    assert calls_of(written) == calls
    assert written.content == (text if content is None else content)
    assert len(written.broken) == broken


@pytest.mark.parametrize(
    ("dialect", "one"),
    [
        (HERMES, '<tool_call>{"name": "f"}</tool_call>'),
        (LLAMA, '{"name": "f", "parameters": {}};'),
        (MISTRAL, "[TOOL_CALLS]f[ARGS]{}"),
    ],
)
def test_a_turn_has_so_many_calls_and_no_more(dialect, one):
    written = dialect.read(one * (MAX_CALLS + 3))
    assert (len(written.calls), len(written.broken)) == (MAX_CALLS, 3)
    assert len({call.identity for call in written.calls}) == MAX_CALLS


def test_a_call_is_not_seen_where_tools_are_explained():
    """A template that speaks of calls in its prompt, and then spells them otherwise."""
    rendered = (
        '<tool_call>{"name": …}</tool_call> is how to call. [TOOL_CALLS] too.'
        '<assistant>call shown_tool({"shown_key": "shown value"})'
    )
    assert call_format_of(rendered, "<assistant>") is None


def test_a_special_token_that_begins_a_call_is_found():
    text = text_of(TEMPLATES["mistral, each apart"], special=["[TOOL_CALLS]", "[ARGS]", "[INST]"])
    mark, args, other = 258, 259, 260
    drawn = [*b"so", other, mark, *b"add", args, *b'{"a": 1}', 256]
    assert text.decode(drawn) == 'so[TOOL_CALLS]add[ARGS]{"a": 1}'
    assert calls_of(text.read_calls(text.decode(drawn))) == [("add", {"a": 1})]
    assert text.opening("add") == ("[TOOL_CALLS]add[ARGS]", [mark, *b"add", args])
    assert text.encode("[TOOL_CALLS]") == list(b"[TOOL_CALLS]")
    assert text.prompt([Message("user", "[TOOL_CALLS]")])[6:18] == list(b"[TOOL_CALLS]")


def test_a_tool_whose_name_spells_a_token_cannot_be_forced():
    text = text_of(TEMPLATES["llama"], special=["secret"])
    with pytest.raises(InputError, match="spells a token"):
        text.opening("my.secret.tool")
