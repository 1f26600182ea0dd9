"""Clients cannot misuse receipts and feedback, and only what is allowed is stored."""

import asyncio
import hashlib
import hmac
import json
import logging
import time
from types import SimpleNamespace

import aiohttp
import msgspec
import pytest
from live_answers import config_of
from live_gateway import GENERATION, HOOK, KEYS, TOKEN, live_serving, published

from deltawire.errors import InputError
from deltawire.live.capture.consent import ConsentRule
from deltawire.live.capture.presidio import replace_spans
from deltawire.live.capture.pseudonyms import Pseudonyms
from deltawire.live.capture.redaction import load_redact
from deltawire.live.feedback.client import FeedbackClient
from deltawire.live.feedback.limits import FeedbackLimiter, FeedbackLimits
from deltawire.live.gateway import app as live_calls
from deltawire.live.learning.grouping import GroupMaker
from deltawire.live.learning.learner import LiveGroups
from deltawire.live.learning.records import LiveRecords
from deltawire.rl.control.lineages import read_lineages
from deltawire.testing.tiny import start_run
from deltawire.wire.captures import MAX_EDIT
from deltawire.wire.receipts import read_receipt, seal_receipt

PLANTED = "planted-text-4711"


@pytest.fixture
def bucket():
    return published(1)


@pytest.fixture
def serve(bucket, tmp_path, monkeypatch):
    def run(scenario, **options):
        async def whole():
            async with live_serving(bucket, tmp_path / "state", monkeypatch, **options) as at:
                await scenario(at)

        asyncio.run(whole())

    return run


def test_forged_foreign_truncated_and_anothers_receipts_look_the_same(serve, bucket):
    async def scenario(at):
        text = await at.receipt()
        receipt = read_receipt(text, keys=KEYS, run=start_run(bucket).id)
        name, key = GENERATION.fingerprint, GENERATION.receipt_key
        forged = seal_receipt(receipt, name, bytes(32))
        foreign = seal_receipt(msgspec.structs.replace(receipt, run="f" * 32), name, key)
        answers = [await at.report(one) for one in (forged, foreign, text[:-5], "", "dw2..", text)]
        other_user = await at.report(text, headers={"x-deltawire-user": "mallory"})
        assert answers[-1][0] == 200
        assert [status for status, _ in answers[:-1]] == [404] * 5
        assert len({json.dumps(body) for _, body in [*answers[:-1], other_user]}) == 1
        assert at.recorder.intake.counts["unknown"] == 6

    serve(scenario)


def test_a_retry_is_one_report_and_other_content_is_a_conflict(serve):
    async def scenario(at):
        text = await at.receipt()
        first = await at.report(text, id="click-1")
        assert first == (200, {"id": "click-1"})
        assert [await at.report(text, id="click-1") for _ in range(3)] == [first] * 3
        status, body = await at.report(text, id="click-1", value="down")
        assert (status, body["error"]["code"]) == (409, "conflict")
        unnamed = [await at.report(text, value="down") for _ in range(2)]
        assert unnamed[0] == unnamed[1]
        together = await asyncio.gather(
            *(at.report(text, kind="accept", value=1, id="click-2") for _ in range(8))
        )
        assert {status for status, _ in together} == {200}
        _, rows = await at.uploaded()
        assert sorted(row.id for row in rows) == sorted(["click-1", "click-2", unnamed[0][1]["id"]])

    serve(scenario)


def test_an_edit_has_a_text_within_its_limit_and_no_other_kind_has(serve):
    async def scenario(at):
        text = await at.receipt()
        edit = {"kind": "edit", "value": 1}
        assert (await at.report(text, **edit, id="e", text="better"))[0] == 200
        assert (await at.report(text, **edit, id="e", text="better"))[0] == 200
        assert (await at.report(text, **edit, id="e", text="other"))[0] == 409
        longest = "\u00e4" * MAX_EDIT  # Two bytes each; more than the body may have, as \\u00e4.
        status, data, _ = await at.call(
            "POST", "/v1/feedback", headers={"Content-Type": "application/json"},
            data=msgspec.json.encode({"receipt": text, "kind": "edit", "text": longest[:-9999]}),
        )  # fmt: skip
        assert (status, data[:6]) == (200, b'{"id":')
        refused = [
            await at.report(text, **edit, text=""),
            await at.report(text, **edit, text=" \n"),
            await at.report(text, **edit, text="x" * (MAX_EDIT + 1)),
            await at.report(text, **{**edit, "value": 2}, text="better"),
            await at.report(text, kind="thumbs", text="better"),
        ]
        assert [status for status, _ in refused] == [400] * 5
        assert "an edit has no text" in refused[0][1]["error"]["message"]
        assert "thumbs has no text" in refused[4][1]["error"]["message"]
        _, rows = await at.uploaded()
        assert {row.text for row in rows} == {"better", longest[:-9999]}

    serve(scenario)


def test_ids_belong_to_their_user_and_their_source(serve, bucket):
    async def scenario(at):
        mine, yours = await at.receipt(), await at.receipt(user="bob")
        assert (await at.report(mine, id="click"))[0] == 200
        assert (await at.report(yours, id="click", value="down"))[0] == 200
        answer = read_receipt(mine, keys=KEYS, run=start_run(bucket).id).answer
        detected = f"retry-{answer}"
        assert (await at.report(mine, kind="accept", value=1, id=detected))[0] == 200
        hook = [{"receipt": mine, "kind": "event_order", "value": 7, "id": "click"}]
        body = json.dumps(hook).encode()
        signature = hmac.new(HOOK, body, hashlib.sha256).hexdigest()
        status, data, _ = await at.call(
            "POST", "/v1/feedback/webhook", token="", data=body,
            headers={"x-deltawire-signature": signature},
        )  # fmt: skip
        assert (status, json.loads(data)["results"]) == (200, [{"status": 200, "id": "click"}])
        await at.ask()  # The same message once more: a retry.
        await at.uploaded()
        records = LiveRecords(bucket)
        records.poll()
        about = records.reports[answer]
        assert about["client", "click"].kind == "thumbs"
        assert about["webhook", "click"].kind == "event_order"
        assert about["client", detected].kind == "accept"
        assert about["detector", detected].value == 1.0
        assert at.recorder.intake.counts["conflicting"] == 0

    serve(scenario)


def test_ids_are_remembered_over_a_restart(serve):
    texts = []

    async def before(at):
        texts.append(await at.receipt())
        assert (await at.report(texts[0], id="click"))[0] == 200

    async def after(at):
        assert (await at.report(texts[0], id="click"))[0] == 200
        assert (await at.report(texts[0], id="click", value="down"))[0] == 409
        assert at.recorder.intake.counts["repeated"] == 1

    serve(before)
    serve(after)


def test_feedback_before_the_answer_is_in_the_bucket_is_taken(serve, bucket):
    async def scenario(at):
        text = await at.receipt()
        assert not bucket.list("live/captures/")
        assert (await at.report(text))[0] == 200
        (capture,), (row,) = await at.uploaded()
        assert row.answer == capture.answer

    serve(scenario)


def test_a_replayed_receipt_has_one_vote_however_often_and_wherever_it_is_sent(
    bucket, tmp_path, monkeypatch
):
    async def scenario():
        async with (
            live_serving(bucket, tmp_path / "one", monkeypatch) as one,
            live_serving(bucket, tmp_path / "two", monkeypatch) as two,
        ):
            text = await one.receipt()
            for at in (one, two):
                assert (await at.report(text, kind="accept", value=1, id="click"))[0] == 200
            for number in range(6):
                at = (one, two)[number % 2]
                found = await at.report(text, kind="accept", value=1, id=f"replay-{number}")
                assert found[0] == 200
            refused = await two.report(text, kind="accept", value=0, id="click")
            assert refused[0] == 409
            assert await asyncio.to_thread(one.recorder.uploader.upload)
            assert await asyncio.to_thread(two.recorder.uploader.upload)

    asyncio.run(scenario())
    records = LiveRecords(bucket)
    records.poll()
    (answer,) = records.answers
    assert sorted(records.reports[answer]) == [
        ("client", name) for name in ("click", *(f"replay-{n}" for n in range(6)))
    ]
    maker = GroupMaker(config_of(user_cap=1.0), records)
    (matured,) = maker.matured(time.time() + 100)
    assert matured.reward == 0.75, "the weight of one accept, not of eight"


def test_a_receipt_that_is_replayed_after_it_was_trained_on_trains_nothing_again(
    bucket, tmp_path, monkeypatch
):
    def learner():
        records = LiveRecords(bucket)
        records.poll()
        return LiveGroups(bucket, "live", GroupMaker(config_of(), records), first=1)

    async def scenario():
        async with live_serving(bucket, tmp_path, monkeypatch) as at:
            texts = [await at.receipt(user=f"u{n}") for n in range(4)]
            for number, text in enumerate(texts):
                assert (await at.report(text, kind="accept", value=number % 2))[0] == 200
            await at.uploaded()
            records = LiveRecords(bucket)
            records.poll()
            groups = LiveGroups(bucket, "live", GroupMaker(config_of(), records), first=0)
            assert groups.store("n0", time.time() + 100)
            for number, text in enumerate(texts):
                replay = await at.report(text, kind="reject", value=1, id=f"again-{number}")
                assert replay[0] == 200
            await at.uploaded()
            records.poll()
            assert not groups.store("n1", time.time() + 100)
            assert not learner().store("n1", time.time() + 100), "nor after a restart"

    asyncio.run(scenario())
    (lineage,) = read_lineages(bucket)
    assert [one.reward for one in lineage.answers] == [0.0, 0.75, 0.0, 0.75]


@pytest.mark.parametrize(
    "body",
    [
        {"kind": "thumbs", "value": 3},
        {"kind": "thumbs", "value": "great"},
        {"kind": "detected_retry", "value": 1},
        {"kind": "event_", "value": 1},
        {"kind": "kept_share", "value": -0.1},
        {"kind": "score", "value": 1e300},
        {"kind": "accept", "at": 5.0},
        {"kind": "accept", "at": time.time() + 1e5},
        {"kind": "accept", "extra": 1},
        {"kind": "accept", "id": "x" * 1000},
    ],
)
def test_reports_that_make_no_sense_are_refused(serve, body):
    async def scenario(at):
        text = await at.receipt()
        status, data, _ = await at.call("POST", "/v1/feedback", json={"receipt": text} | body)
        assert status == 400, data
        assert await at.uploaded() != []
        assert not (await at.uploaded())[1]

    serve(scenario)


def test_a_flood_is_limited_by_user_and_by_answer(serve):
    async def scenario(at):
        texts = [await at.receipt(f"question {number}") for number in range(4)]
        flood = [
            (await at.report(texts[n % 4], id=f"f{n}", kind="score", value=n))[0] for n in range(30)
        ]
        assert flood.count(200) == 10
        assert flood.count(429) == 20
        other = await at.receipt(user="bob")
        assert (await at.report(other))[0] == 200

    serve(scenario, limits=FeedbackLimits(per_minute=10, per_day=100, per_answer=5))


def test_limits_by_the_day_and_by_answer_whoever_asks():
    now = SimpleNamespace(at=0.0)
    limiter = FeedbackLimiter(FeedbackLimits(60, 5, 3), lambda: now.at)
    assert [limiter.take(f"u{n}", "a") is None for n in range(5)] == [True] * 3 + [False] * 2
    assert [limiter.take("u", f"b{n}") is None for n in range(7)] == [True] * 5 + [False] * 2
    now.at = 86_400.0
    assert limiter.take("u", "c") is None


def test_bodies_of_100_mb_are_refused_without_being_read(serve):
    async def scenario(at):
        sent = 0

        async def pour():
            nonlocal sent
            for _ in range(1600):
                sent += 1 << 16
                yield b"x" * (1 << 16)

        headers = {"Authorization": f"Bearer {TOKEN}"}
        for path in ("/v1/feedback", "/v1/chat/completions", "/v1/feedback/webhook"):
            sent = 0
            try:
                async with at.client.post(at.url(path), data=pour(), headers=headers) as answer:
                    assert answer.status == 413
            except (OSError, aiohttp.ClientError):
                pass  # The connection was closed while it was sending.
            assert sent < 100 << 20 or "chat" in path
        assert (await at.ask())[0] == 200

    serve(scenario)


def test_the_webhook_takes_signed_lists_only(serve):
    async def scenario(at):
        texts = [await at.receipt() for _ in range(2)]
        rows = [{"receipt": t, "kind": "event_purchase", "value": 3, "id": t[-9:]} for t in texts]
        body = json.dumps([*rows, {"receipt": "x", "kind": "accept"}]).encode()
        signature = hmac.new(HOOK, body, hashlib.sha256).hexdigest()
        for wrong in ("", "0" * 64, signature[:-1]):
            headers = {"x-deltawire-signature": wrong}
            found = await at.call(
                "POST", "/v1/feedback/webhook", token="", data=body, headers=headers
            )
            assert found[0] == 401
        headers = {"x-deltawire-signature": f"sha256={signature}"}
        for _ in range(2):
            status, data, _ = await at.call(
                "POST", "/v1/feedback/webhook", token="", data=body, headers=headers
            )
            assert status == 200
            assert [one["status"] for one in json.loads(data)["results"]] == [200, 200, 404]
        _, found = await at.uploaded()
        assert [r.source for r in found if r.source != "detector"] == ["webhook"] * 2

    serve(scenario)


def test_webhooks_without_a_valid_signature_take_no_room_from_users(serve, monkeypatch):
    monkeypatch.setattr(live_calls, "WEBHOOKS_BYTES", 1 << 20)

    async def scenario(at):
        async with asyncio.timeout(50):
            statuses = await asyncio.gather(
                *(
                    at.call("POST", "/v1/feedback/webhook", token="", data=b"x" * (400 << 10))
                    for _ in range(8)
                )
            )
        assert {status for status, *_ in statuses} <= {401, 503}
        assert at.bodies.held == 0, "webhooks have a budget apart"
        assert (await at.ask())[0] == 200

    serve(scenario)


def test_without_a_secret_there_is_no_webhook(serve):
    async def scenario(at):
        assert (await at.call("POST", "/v1/feedback/webhook", token="", data=b"[]"))[0] == 401
        assert (await at.call("POST", "/v1/feedback/webhook", data=b"[]"))[0] == 404

    serve(scenario, hook=b"")


def test_feedback_needs_a_token(serve):
    async def scenario(at):
        text = await at.receipt()
        body = {"receipt": text, "kind": "accept"}
        assert (await at.call("POST", "/v1/feedback", token="wrong", json=body))[0] == 401
        client = FeedbackClient(at.url(""), TOKEN)
        assert await asyncio.to_thread(client.send, text, "accept", id="one") == "one"
        with pytest.raises(InputError, match="no answer with this receipt"):
            await asyncio.to_thread(client.send, text[:-1], "accept")

    serve(scenario)


def everything_in(bucket, folder):
    data = [bucket.get(key, limit=1 << 30) for key in bucket.list("")]
    return b"".join([*data, *(path.read_bytes() for path in folder.rglob("*") if path.is_file())])


def test_a_redaction_that_raises_stores_nothing_and_users_are_served(
    serve, bucket, tmp_path, caplog
):
    caplog.set_level(logging.DEBUG)

    def fail(texts):
        raise ValueError(texts[0])

    async def scenario(at):
        text = await at.receipt(PLANTED)
        receipt = read_receipt(text, keys=KEYS, run=start_run(bucket).id)
        assert not receipt.recorded
        assert not (await at.uploaded())[0]
        assert at.recorder.state().counts["redaction_failures"] == 1
        assert at.recorder.state().counts["withheld"] == 1

    serve(scenario, redact=fail, keep_text=True)
    assert PLANTED.encode() not in everything_in(bucket, tmp_path)
    assert PLANTED not in caplog.text


def test_an_open_redaction_stores_what_it_could_not_redact(serve, bucket, tmp_path):
    async def scenario(at):
        await at.receipt(PLANTED)
        (row,), _ = await at.uploaded()
        assert PLANTED.encode() in row.text

    serve(scenario, redact=lambda texts: [], redact_failure="open", keep_text=True)


def test_redacted_answers_keep_no_tokens(serve, bucket, tmp_path):
    async def scenario(at):
        await at.receipt(f"my name is {PLANTED}")
        (row,), _ = await at.uploaded()
        assert row.unusable == "redacted"
        assert not row.tokens + row.prompt + row.logprobs
        assert row.drawn == 3, "the guardrail of long answers needs their number"
        assert b"<NAME>" in row.text

    def redact(texts):
        return [text.replace(PLANTED, "<NAME>") for text in texts]

    serve(scenario, redact=redact, keep_text=True)
    assert PLANTED.encode() not in everything_in(bucket, tmp_path)


def test_users_are_stored_as_pseudonyms_only(serve, bucket, tmp_path):
    async def scenario(at):
        text = await at.receipt(user="alice@example.com")
        await at.report(text)
        await at.uploaded()

    serve(scenario)
    assert b"alice" not in everything_in(bucket, tmp_path)
    assert Pseudonyms(b"a").user("alice") != Pseudonyms(b"b").user("alice")


@pytest.mark.parametrize("word", ["false", "0", "no", "off", "No", " OFF ", "FALSE"])
def test_a_refusal_in_a_request_outweighs_every_rule(word):
    """Each word that refuses, under each rule that would allow the answer without it."""
    alice = Pseudonyms(b"secret").user("alice")
    for rule in (ConsentRule(users=frozenset([alice])), ConsentRule(share=1.0)):
        assert rule.allows("", alice)
        assert not rule.allows(word, alice)


def test_consent_rules():
    names = Pseudonyms(b"secret")
    alice = names.user("alice")
    assert not ConsentRule().on
    assert not ConsentRule().allows("true", alice)
    assert ConsentRule(header=True).allows("true", "")
    assert not ConsentRule(header=True).allows("", alice)
    listed = ConsentRule(users=frozenset([alice]))
    assert listed.allows("", alice)
    assert not listed.allows("false", alice)
    assert not listed.allows("true", names.user("bob"))
    users = [names.user(str(number)) for number in range(2000)]
    shared = [ConsentRule(share=0.25).allows("", user) for user in users]
    assert 0.2 < sum(shared) / len(shared) < 0.3
    assert shared == [ConsentRule(share=0.25).allows("", user) for user in users]
    assert not ConsentRule(share=1.0).allows("", "")


def test_spans_of_presidio_are_replaced_also_where_they_overlap():
    def found(start, end, kind):
        return SimpleNamespace(start=start, end=end, entity_type=kind)

    text = "I am Ada Lovelace, call 123"
    results = [found(24, 27, "PHONE"), found(5, 17, "PERSON"), found(9, 17, "PERSON")]
    assert replace_spans(text, results) == "I am <PERSON>, call <PHONE>"
    with pytest.raises(InputError, match="cannot load"):
        load_redact("no.such.module:function")
