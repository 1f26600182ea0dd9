"""Edits of users become pairs of a learner's groups, under the caps."""

import asyncio
import hashlib
import hmac
import json

import msgspec
import numpy as np
import pytest
from live_answers import LIVE, NOW, answer, put_rows, report
from live_gateway import HOOK, PROMPT, live_serving, published

from deltawire.chat.text import Text
from deltawire.config import parse_config
from deltawire.errors import RetryError
from deltawire.live.learning.edits import EditEncoder, edit_name, newest_edit
from deltawire.live.learning.grouping import GroupMaker
from deltawire.live.learning.learner import LiveGroups
from deltawire.live.learning.records import LiveRecords
from deltawire.rl.control.lineages import read_lineages
from deltawire.rl.control.rollout_reader import Bounds
from deltawire.store import open_bucket
from deltawire.wire import keys
from deltawire.wire.rollouts import decode_group

PAIRS_ONLY = {"policy_coefficient": 0.0}


@pytest.fixture
def bucket():
    return open_bucket("memory://")


def config_of(kind="dpo", *, loss=None, **live):
    loss = {"advantage": "given", "preference": {"kind": kind}, **(loss or {})}
    return parse_config(
        {**LIVE, "train": {"loss": loss}, "live": {**LIVE["live"], **live}}, source="test"
    )


def edit(number, text="better", *, after_s=1.0, **changes):
    return report(number, "edit", 1.0, after_s=after_s, text=text, **changes)


@pytest.fixture
def maker_of(bucket, byte_tokenizer):
    def make(config):
        records = LiveRecords(bucket)
        records.poll()
        return GroupMaker(config, records, edits=EditEncoder(Text(byte_tokenizer), config))

    return make


def stored(bucket, sequence=0):
    key = keys.rollout("live", sequence)
    return decode_group(bucket.get(key, limit=1 << 28), run="", key=key)


def test_the_tokens_of_an_edit_are_its_text_after_the_thinking(byte_tokenizer):
    """Control tokens in the text stay text, and the turn ends as the served one did."""
    text = Text(byte_tokenizer)
    config = config_of()
    thinking = {"budgets": [8], "answer_tokens": 8, "start": "<think>", "end": "</think>"}
    rollout = {"group_size": 4, "max_tokens": 64, "context": 256, "thinking": thinking}
    marked = parse_config({**LIVE, "rollout": rollout}, source="test")
    thought = text.spell("<think>hm</think>")
    served = np.array([*thought, *text.encode("worse"), text.end], "<i4")
    capture = msgspec.structs.replace(
        answer(1, tokens=len(served)), tokens=served.tobytes(), finish="stop"
    )
    found = EditEncoder(text, marked).tokens(capture, edit(1))
    assert found.tolist() == [*thought, *text.encode("better"), text.end]
    control = byte_tokenizer.decode([text.end])
    found = EditEncoder(text, marked).tokens(capture, edit(1, f"a{control}b"))
    assert found.tolist().count(text.end) == 1
    assert found[-1] == text.end
    plain = EditEncoder(text, config)
    cut = msgspec.structs.replace(capture, finish="length", tokens=served[:-1].tobytes())
    assert EditEncoder(text, marked).tokens(cut, edit(1))[-1] == text.end
    assert not len(plain.tokens(capture, edit(1, "x" * 10_000))), "longer than the context"
    same = msgspec.structs.replace(
        capture, tokens=np.array([*b"better", text.end], "<i4").tobytes()
    )
    assert not len(plain.tokens(same, edit(1))), "the served answer itself"


def test_the_newest_edit_with_a_text_counts():
    edits = [edit(1, "old"), edit(1, "new", after_s=5.0), edit(1, "", after_s=9.0)]
    assert newest_edit([*edits, report(1)]).text == "new"
    assert newest_edit(reversed(edits)).text == "new"
    assert newest_edit([report(1)]) is None
    assert len({edit_name(one) for one in edits}) == 3


def test_edits_are_in_the_group_with_the_weight_of_their_answer(bucket, maker_of):
    numbers = range(1, 5)
    put_rows(
        bucket, 0, [answer(n) for n in numbers],
        [report(n, value=float(n % 2)) for n in numbers] + [edit(2, "two"), edit(3, "three")],
    )  # fmt: skip
    config = config_of()
    groups = LiveGroups(bucket, "live", maker_of(config), first=0)
    assert groups.store("n", NOW + 100)
    (lineage,) = read_lineages(bucket)
    group = stored(bucket)
    assert Bounds.of(config, 300).fault(group) == ""
    for one, t in zip(lineage.answers, group.trajectories, strict=True):
        number = int(one.answer, 16)
        assert one.edit == (edit_name(edit(number)) if number in (2, 3) else "")
        assert t.reward == pytest.approx(one.advantage * one.weight)
        if one.edit:
            assert bytes(t.better.tokens_T[:3].tolist()) in (b"two", b"thr")
            assert t.better.weight == one.weight
        else:
            assert t.better is None


def test_an_answer_with_only_an_edit_has_no_advantage(bucket, maker_of):
    numbers = range(1, 5)
    put_rows(
        bucket, 0, [answer(n) for n in numbers],
        [report(n, value=float(n % 2)) for n in (1, 2, 3)] + [edit(4)],
    )  # fmt: skip
    found = maker_of(config_of()).prepare(NOW + 100, 4)
    assert [bool(one.advantage) for one in found] == [True, True, True, False]
    assert sum(one.advantage for one in found) == pytest.approx(0, abs=1e-6)
    assert found[3].weight > 0
    plain = maker_of(config_of())
    plain.edits = None
    assert plain.prepare(NOW + 100, 4) is None, "without pairs it has nothing to train on"


def test_where_only_pairs_are_trained_on_others_are_left_out(bucket, maker_of):
    numbers = range(1, 8)
    put_rows(
        bucket, 0, [answer(n) for n in numbers],
        [report(n) for n in numbers] + [edit(n) for n in (1, 3, 4, 6)],
    )  # fmt: skip
    maker = maker_of(config_of(loss=PAIRS_ONLY))
    found = maker.prepare(NOW + 100, 4)
    assert [int(one.answer, 16) for one in found] == [1, 3, 4, 6]
    assert maker.states["unpaired"] == 3
    assert maker.prepare(NOW + 100, 4) is None
    assert "3 unpaired" in maker.lacks


@pytest.mark.parametrize("kind", ["dpo", "ipo", "supervised"])
@pytest.mark.parametrize("loss", [PAIRS_ONLY, {}, {"aggregation": "seq_mean_token_mean"}])
def test_no_user_has_more_than_the_cap_of_pairs_and_policy_together(bucket, maker_of, kind, loss):
    """One user has edits of many tokens."""
    config = config_of(kind, loss=loss)
    numbers = range(1, 5)
    put_rows(
        bucket, 0, [answer(n) for n in numbers],
        [report(n, value=float(n % 2)) for n in numbers]
        + [edit(n, "x" * (100 if n == 1 else 4)) for n in numbers],
    )  # fmt: skip
    maker = maker_of(config)
    sizes = {}
    measure = maker._influence_sizes

    def kept(chosen, advantages_E):
        found = measure(chosen, advantages_E)
        sizes.update(zip([one.capture.answer for one in chosen], found.tolist(), strict=True))
        return found

    maker._influence_sizes = kept
    found = maker.prepare(NOW + 100, 4)
    shares = np.array([one.weight * sizes[one.answer] for one in found])
    assert shares.max() <= 0.5 * shares.sum() * (1 + 1e-9)
    if kind == "dpo":
        assert found[0].weight < 0.7, "or the cap was not needed"


def test_after_a_kill_the_same_group_is_stored_though_a_newer_edit_came(bucket, maker_of):
    numbers = range(1, 5)
    put_rows(
        bucket, 0, [answer(n) for n in numbers],
        [report(n, value=float(n % 2)) for n in numbers] + [edit(n, f"first{n}") for n in numbers],
    )  # fmt: skip
    config = config_of()
    whole = open_bucket("memory://")
    for key in bucket.list(""):
        whole.put(key, bucket.get(key, limit=1 << 28))
    records = LiveRecords(whole)
    records.poll()
    maker = maker_of(config)
    assert LiveGroups(whole, "live", GroupMaker(config, records, edits=maker.edits), first=0).store(
        "n", NOW + 100
    )
    bucket.put(keys.live_lineage("live", 0), whole.get(keys.live_lineage("live", 0), limit=1 << 28))
    put_rows(bucket, 1, [], [edit(n, f"second{n}", after_s=50.0) for n in numbers])
    again = LiveGroups(bucket, "live", maker_of(config), first=0)
    assert again.store("n", NOW + 200)
    key = keys.rollout("live", 0)
    assert bucket.get(key, limit=1 << 28) == whole.get(key, limit=1 << 28)
    assert bytes(stored(bucket).trajectories[0].better.tokens_T[:6].tolist()) == b"first1"


def test_an_edit_that_cannot_be_read_is_waited_for(bucket, maker_of):
    numbers = range(1, 5)
    put_rows(
        bucket, 0, [answer(n) for n in numbers],
        [report(n, value=float(n % 2)) for n in numbers] + [edit(1)],
    )  # fmt: skip
    groups = LiveGroups(bucket, "live", maker := maker_of(config_of()), first=0)
    kept = dict(maker.records.reports[f"{1:032x}"])
    maker.better_answer = lambda *_: None
    with pytest.raises(RetryError, match="the edit of an answer of group 0 cannot be read"):
        groups.store("n", NOW + 100)
    del maker.better_answer
    assert kept == maker.records.reports[f"{1:032x}"]
    assert groups.store("n", NOW + 100)
    assert stored(bucket).trajectories[0].better is not None


def test_edits_of_users_and_of_a_judge_at_the_webhook_become_pairs(
    tmp_path, monkeypatch, byte_tokenizer
):
    bucket = published(1)

    async def whole():
        async with live_serving(bucket, tmp_path / "state", monkeypatch) as at:
            for user in ("ann", "bob", "cid"):
                receipt = await at.receipt(user=user)
                headers = {"x-deltawire-user": user}
                answered = await at.report(
                    receipt, kind="edit", value=1, text=f"dear {user}", headers=headers
                )
                assert answered[0] == 200
            row = {"receipt": await at.receipt(user="dan"), "kind": "edit", "text": "dear dan"}
            body = json.dumps([row | {"id": "judged-1"}]).encode()
            headers = {"x-deltawire-signature": hmac.new(HOOK, body, hashlib.sha256).hexdigest()}
            answered = await at.call(
                "POST", "/v1/feedback/webhook", token="", data=body, headers=headers
            )
            assert json.loads(answered[1])["results"][0]["status"] == 200
            await at.uploaded()

    asyncio.run(whole())
    config = config_of(loss=PAIRS_ONLY, settle_s=0.001)
    records = LiveRecords(bucket)
    records.poll()
    encoder = EditEncoder(Text(byte_tokenizer), config)
    maker = GroupMaker(config, records, edits=encoder)
    now = max(capture.at for capture in records.answers.values()) + 60
    assert LiveGroups(bucket, "live", maker, first=0).store("n", now), maker.lacks
    group = stored(bucket)
    assert Bounds.of(config, 300).fault(group) == ""
    texts = {bytes(t.better.tokens_T.tolist()[:8]).decode() for t in group.trajectories}
    assert texts == {"dear ann", "dear bob", "dear cid", "dear dan"}
    for t in group.trajectories:
        assert group.prompt_of(t).tolist() == PROMPT
        assert t.tokens_T.tolist() == [100, 101, 102]
        assert t.better.weight > 0
