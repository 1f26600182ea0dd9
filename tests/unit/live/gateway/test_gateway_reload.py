"""Tokens and lists of users who agreed are read again while a gateway runs."""

import asyncio
import logging

import pytest
from live_gateway import deployment_secret, live_serving, published

from deltawire.errors import InputError
from deltawire.launch import gateway
from deltawire.launch.gateway import GatewayOptions, _TokenFiles
from deltawire.live.capture.consent import ConsentRule, read_users
from deltawire.live.gateway import recorder
from deltawire.serving.app import Tokens
from deltawire.serving.client_keys import ClientKeys
from deltawire.testing.faulty import FaultyBucket
from deltawire.testing.tiny import start_run


def test_a_user_who_withdraws_is_not_stored_from_then_on(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "CONSENT_EVERY_S", 0.01)
    bucket, listed, reads = FaultyBucket(published()), tmp_path / "users", []
    pseudonyms = deployment_secret(bucket, start_run(bucket)).oldest.pseudonyms
    listed.write_text("alice\n")

    def consent():
        reads.append(1)
        return ConsentRule(users=read_users(str(listed), pseudonyms))

    async def whole():
        async with live_serving(
            bucket, tmp_path / "state", monkeypatch, consent=consent(), reconsent=consent
        ) as at:

            async def read_again():
                del reads[:]
                async with asyncio.timeout(60):
                    while len(reads) < 3:
                        await asyncio.sleep(0.01)

            async def stored(user):
                await read_again()
                before = len((await at.uploaded())[0])
                assert (await at.ask(user=user, capture=""))[0] == 200
                return len((await at.uploaded())[0]) - before

            assert [await stored("alice"), await stored("bob")] == [1, 0]
            listed.write_text("bob\n")
            assert [await stored("alice"), await stored("bob")] == [0, 1]
            listed.unlink()
            assert [await stored("alice"), await stored("bob")] == [0, 0], (
                "nobody is known to agree"
            )
            assert at.recorder.consent_fault
            listed.write_text("bob\n")
            assert await stored("bob") == 1
            assert at.recorder.consent_fault == ""
            # A bucket that does not answer delays nothing.
            bucket.fail("list", "live/forgotten/*", times=None)
            listed.write_text("carol\n")
            at.recorder._state_at = float("-inf")
            assert not await asyncio.to_thread(at.recorder.uploader.upload)
            await read_again()
            before = at.recorder.counts["recorded"]
            assert (await at.ask(user="bob", capture=""))[0] == 200
            assert at.recorder.counts["recorded"] == before
            bucket.heal()

    asyncio.run(whole())


def test_tokens_are_replaced_and_unusable_files_change_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(gateway, "TOKENS_EVERY_S", 0.0)
    path = tmp_path / "token"
    tokens = Tokens("first", "admin")
    files = _TokenFiles(GatewayOptions(replicas=[], token_file=str(path)), tokens, ClientKeys())
    caplog.set_level(logging.INFO)
    for half in ("sec", "secon"):
        path.write_text(half)
        files.poll()
        assert tokens.sampling == "first", "it may be half written"
    path.write_text("second\n")
    files.poll()
    assert "tokens were replaced" not in caplog.text
    files.poll()
    assert (tokens.sampling, tokens.admin) == ("second", "admin")
    assert "tokens were replaced" in caplog.text
    assert "second" not in caplog.text
    for text in ("", "admin\n", "two\nlines"):
        path.write_text(text)
        files.poll()
        files.poll()
        assert (tokens.sampling, tokens.admin) == ("second", "admin")
    assert "the tokens before stay in use" in caplog.text
    assert "two" not in caplog.text.replace("two different tokens", "")
    path.unlink()
    files.poll()
    assert tokens.sampling == "second"


def test_tokens_from_the_environment_are_not_read_again(monkeypatch):
    monkeypatch.setattr(gateway, "TOKENS_EVERY_S", 0.0)
    tokens = Tokens("first", "admin")
    _TokenFiles(GatewayOptions(replicas=[]), tokens, ClientKeys()).poll()
    assert tokens.sampling == "first"


def test_the_old_token_is_refused_once_it_is_replaced(tmp_path, monkeypatch):
    async def whole():
        async with live_serving(published(), tmp_path / "state", monkeypatch) as at:
            assert (await at.call("GET", "/v1/models", "new"))[0] == 401
            at.tokens.replace("new", "admin-secret")
            assert (await at.call("GET", "/v1/models", "new"))[0] != 401
            assert (await at.call("GET", "/v1/models", "sampling-secret"))[0] == 401
            assert (await at.call("GET", "/live/state", "admin-secret"))[0] == 200

    asyncio.run(whole())


@pytest.mark.parametrize("pair", [("", "a"), ("a", ""), ("a", "a")])
def test_equal_or_empty_tokens_are_refused(pair):
    with pytest.raises(InputError, match="two different tokens"):
        Tokens(*pair)
