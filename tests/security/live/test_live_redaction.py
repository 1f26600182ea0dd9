"""Whatever a person typed or a model said is redacted, or not stored at all."""

import asyncio
import json

import pytest
from aiohttp import web
from live_gateway import ADMIN, WORDS, TokenReplica, live_serving, published

from deltawire.live.gateway.texts import flat_text

PLANTED = "planted-text-4711"
HI = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def hidden(text):
    """A text as JSON that spells each character by its number."""
    return '"' + "".join(f"\\u{ord(one):04x}" for one in text) + '"'


TYPED = {
    "content": {"messages": [{"role": "user", "content": PLANTED}]},
    "a part": {"messages": [{"role": "user", "content": [{"type": "text", "text": PLANTED}]}]},
    "a name": {"messages": [HI | {"name": PLANTED}]},
    "a role": {"messages": [HI, {"role": PLANTED, "content": "x"}]},
    "reasoning": {"messages": [{"role": "assistant", "reasoning_content": PLANTED}, HI]},
    "an argument": {
        "messages": [
            {"role": "assistant", "tool_calls": [CALL | {"function": {"arguments": PLANTED}}]}, HI,
        ]
    },
    "an argument that spells numbers": {
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [CALL | {"function": {"arguments": f'{{"a": {hidden(PLANTED)}}}'}}],
            },
            HI,
        ]
    },
    "a function's name": {
        "messages": [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": PLANTED}}]}]
    },
    "a call's id": {"messages": [{"role": "tool", "content": "x", "tool_call_id": PLANTED}]},
    "a tool's description": {"tools": [TOOL | {"function": {"name": "f", "description": PLANTED}}]},
    "a tool's parameter": {"tools": [TOOL | {"function": {"parameters": {PLANTED: {}}}}]},
    "a document": {"documents": [{"title": "t", "text": f"a\n{PLANTED}\nb"}]},
    "a document's key": {"documents": [{PLANTED: True}]},
    "a variable": {"chat_template_kwargs": {"persona": {"of": [PLANTED]}}},
    "a member that no template renders": {"mm_processor_kwargs": {"deep": [[PLANTED]]}},
}  # fmt: skip
SAID = {
    "reasoning_content": PLANTED,
    "reasoning": PLANTED,
    "tool_calls": [CALL | {"function": {"name": "f", "arguments": f'{{"a": "{PLANTED}"}}'}}],
}
OPAQUE = {
    "an image": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "data:x"}, "text": "x"}],
            }
        ]
    },
    "a template of the client": {"chat_template": "{{ 'planted' ~ '-text' }}"},
    "messages of no kind": {"messages": ["x"]},
}


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Returns the traces of an answer to each of ``bodies``, with a redaction function that
    replaces `PLANTED`: rows, every byte in the bucket and the state folder, and the counts."""

    def serve(*bodies, prepare=None):
        bucket = published(1)

        def replace(texts):
            return [text.replace(PLANTED, "<NAME>") for text in texts]

        async def whole():
            async with live_serving(
                bucket, tmp_path / "state", monkeypatch, redact=replace, keep_text=True
            ) as at:
                for body in bodies:
                    if prepare is not None:
                        prepare(at.fake, body)
                    more = body if prepare is None else {}
                    status, data, _ = await at.call(
                        "POST", "/v1/chat/completions", json={"messages": [HI]} | more,
                        headers={"x-deltawire-capture": "true"},
                    )  # fmt: skip
                    assert status == 200, data
                rows, _ = await at.uploaded()
                return rows, at.recorder.state().counts

        rows, counts = asyncio.run(whole())
        held = [bucket.get(key, limit=1 << 30) for key in bucket.list("")]
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        return rows, b"".join([*held, *(path.read_bytes() for path in files)]), counts

    return serve


def are_redacted(rows, names):
    for row, name in zip(rows, names, strict=True):
        assert row.unusable == "redacted", name
        assert not row.tokens + row.prompt + row.logprobs, name
        assert b"<NAME>" in row.text, name


def test_an_answer_without_a_name_is_stored_as_it_is(stored):
    (row,), _, counts = stored({"tools": [TOOL], "documents": [{"text": "of nobody"}], "seed": 47})
    assert row.unusable == ""
    assert len(row.token_ids) == 3
    assert json.loads(row.text)["texts"] == [
        "Hi", "type: function\nfunction:\nname: f\nparameters:\ntype: object", "text: of nobody",
        "".join(WORDS),
    ]  # fmt: skip
    assert "withheld" not in counts


def test_what_a_person_typed_is_redacted(stored):
    rows, held, _ = stored(*TYPED.values())
    are_redacted(rows, TYPED)
    assert PLANTED.encode() not in held


def test_what_a_model_said_is_redacted(stored):
    def prepare(fake, name):
        fake.says = {name: SAID[name]}

    rows, held, _ = stored(*SAID, prepare=prepare)
    are_redacted(rows, SAID)
    assert PLANTED.encode() not in held


def test_what_is_in_the_tokens_and_not_shown_is_redacted(stored):
    def prepare(fake, name):
        fake.draws, fake.prompt_text = WORDS, None
        if name == "drawn":  # As with ``include_reasoning: false``.
            fake.draws = [f"<think>{PLANTED}</think>Hello", " there", "!"]
        else:  # An earlier turn's thoughts, in the prompt of an engine that continues from tokens.
            fake.prompt_text = f"<think>{PLANTED}"

    rows, held, _ = stored("drawn", "prompt", prepare=prepare)
    are_redacted(rows, ("drawn", "prompt"))
    assert PLANTED.encode() not in held


def test_what_is_no_text_is_not_stored(stored):
    rows, _, counts = stored(*OPAQUE.values())
    assert rows == []
    assert counts["withheld"] == len(OPAQUE)


def test_a_prompt_of_token_ids_is_not_stored(tmp_path, monkeypatch):
    async def completions(self, request):
        text = {"index": 0, "text": "Hello", "finish_reason": "stop", "token_ids": [100]}
        text["logprobs"] = {"tokens": ["Hello"], "token_logprobs": [-0.5]}
        return web.json_response({"choices": [text], "prompt_token_ids": [5, 6]})

    monkeypatch.setattr(TokenReplica, "completions", completions)
    bucket = published(1)

    async def whole():
        async with live_serving(
            bucket, tmp_path / "state", monkeypatch, redact=lambda texts: texts
        ) as at:
            for prompt in ([5, 6], [[5, 6]], ["x"], "x"):
                status, data, _ = await at.call(
                    "POST", "/v1/completions", json={"prompt": prompt},
                    headers={"x-deltawire-capture": "true"},
                )  # fmt: skip
                assert status == 200, data
            rows, _ = await at.uploaded()
            assert [row.unusable for row in rows] == [""], "the prompt that is a text"
            assert at.recorder.state().counts["withheld"] == 3

    asyncio.run(whole())


def test_an_answer_that_cannot_be_shown_is_not_stored(stored):
    cases = [
        ({"audio": PLANTED}, WORDS),
        ({"something_new": PLANTED}, WORDS),
        ({}, ["token_id:100", "token_id:101", "token_id:102"]),
        ({}, [None, "a", "b"]),
    ]

    def prepare(fake, case):
        fake.says, fake.draws = case

    rows, held, counts = stored(*cases, prepare=prepare)
    assert rows == []
    assert counts["withheld"] == len(cases)
    assert PLANTED.encode() not in held


def test_a_refusal_is_text_and_is_redacted(stored):
    rows, held, counts = stored(
        {"refusal": PLANTED}, prepare=lambda f, case: setattr(f, "says", case)
    )
    assert len(rows) == 1
    assert not counts.get("withheld")
    assert PLANTED.encode() not in held


def test_notes_are_redacted(tmp_path, monkeypatch):
    def redact(texts):
        if "fail" in texts[0]:
            raise ValueError(texts[0])
        return [text.replace(PLANTED, "<NAME>") for text in texts]

    bucket = published(1)

    async def whole():
        async with live_serving(bucket, tmp_path / "state", monkeypatch, redact=redact) as at:
            text = await at.receipt()
            assert (await at.report(text, note=f"by {PLANTED}"))[0] == 200
            assert (await at.report(text, note=f"fail {PLANTED}", kind="accept", value=1))[0] == 200
            _, rows = await at.uploaded()
            assert {row.kind: row.note for row in rows} == {"thumbs": "by <NAME>", "accept": ""}
            status, state, _ = await at.call("GET", "/live/state", token=ADMIN)
            assert status == 200
            assert json.loads(state)["counts"]["redaction_failures"] == 1

    asyncio.run(whole())
    held = [bucket.get(key, limit=1 << 30) for key in bucket.list("")]
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert PLANTED.encode() not in b"".join([*held, *files])


def test_deep_and_nested_values_are_flat():
    deep = {"a": "x"}
    for _ in range(100_000):
        deep = [deep]
    assert flat_text(deep) == "a: x"
    assert flat_text('{"a": "{\\"b\\": \\"\\\\u0041\\"}"}').endswith("b: A")
    assert flat_text({"n": 1.5, "yes": True, "no": None, "e": []}) == "n: 1.5\nyes:\nno:\ne:"
    del deep


def test_an_edit_that_redaction_changes_or_cannot_check_has_no_text(tmp_path, monkeypatch):
    def redact(texts):
        if "fail" in texts[0]:
            raise ValueError(texts[0])
        return [text.replace(PLANTED, "<NAME>") for text in texts]

    bucket = published(1)

    async def whole():
        async with live_serving(bucket, tmp_path / "state", monkeypatch, redact=redact) as at:
            texts = {"plain": "better", "changed": f"by {PLANTED}", "failed": f"fail {PLANTED}"}
            for name, text in texts.items():
                receipt = await at.receipt()
                answer = await at.report(receipt, kind="edit", value=1, id=name, text=text)
                assert answer == (200, {"id": name})
            _, rows = await at.uploaded()
            kept = {row.id: row.text for row in rows if row.kind == "edit"}
            assert kept == {"plain": "better", "changed": "", "failed": ""}
            held = [bucket.get(key, limit=1 << 30) for key in bucket.list("live/")]
            files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
            assert not any(PLANTED.encode() in place for place in (*held, *files))

    asyncio.run(whole())
