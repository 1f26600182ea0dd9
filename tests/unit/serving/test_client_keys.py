"""API keys of clients: rates, quotas and requests at once, and a list that changes."""

import asyncio
import hashlib
import json

import openai
import pytest
from live_gateway import ADMIN, TOKEN, live_serving, published

from deltawire.chat.requests import RequestDefaults
from deltawire.errors import InputError
from deltawire.launch import gateway as launched
from deltawire.launch.gateway import GatewayOptions, _TokenFiles
from deltawire.live.gateway.requests import read_asked
from deltawire.serving.app import Tokens
from deltawire.serving.client_keys import ClientKeys, ClientLimits, read_clients
from deltawire.serving.errors import RequestError


def hash_of(key):
    return hashlib.sha256(key.encode()).hexdigest()


def keys_of(now=lambda: 0.0, **limits):
    return ClientKeys({"web": ClientLimits(hash_of("web-key"), **limits)}, clock=now)


def take(keys, drawn=0):
    with keys.request("web") as counted:
        counted.drawn = drawn


def test_a_rate_allows_a_burst_and_then_its_share_of_a_minute():
    now = [0.0]
    keys = keys_of(lambda: now[0], requests_per_minute=6)
    for _ in range(6):
        take(keys)
    with pytest.raises(RequestError, match="more than 6 requests a minute") as refused:
        take(keys)
    assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    assert refused.value.after_s == pytest.approx(10.0)
    now[0] = 10.0
    take(keys)
    with pytest.raises(RequestError):
        take(keys)
    assert keys.used()["web"] == {
        "requests": 7, "refused": 2, "under_way": 0, "tokens_today": 0
    }  # fmt: skip


def test_a_client_without_a_rate_that_gets_one_is_not_locked_out():
    keys = keys_of()
    for _ in range(500):
        take(keys)
    keys.replace({"web": ClientLimits(hash_of("web-key"), requests_per_minute=3)})
    for _ in range(3):
        take(keys)
    with pytest.raises(RequestError, match="more than 3 requests a minute"):
        take(keys)


def test_requests_under_way_keep_tokens_of_the_quota():
    keys = keys_of(tokens_per_day=100)
    with keys.request("web") as first:
        first.reserve(60)
        with keys.request("web") as second:
            second.reserve(1 << 40)
            assert (first.reserved, second.reserved) == (60, 40)
            with (
                pytest.raises(RequestError, match="under way") as refused,
                keys.request("web") as third,
            ):
                third.reserve(1)
            assert refused.value.status == 429
            second.drawn = 5
        with keys.request("web") as fourth:
            fourth.reserve(10)
            assert fourth.reserved == 10
        first.drawn = 60
    assert keys.used()["web"]["tokens_today"] == 65


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ({"max_tokens": 0}, 0), ({"max_tokens": 7}, 14), ({}, 2000), ({"max_tokens": None}, 2000),
        ({"max_completion_tokens": None, "max_tokens": 0}, 0),
    ],
)  # fmt: skip
def test_a_request_keeps_as_many_tokens_as_it_says(said, kept):
    """None for one that scores its prompts."""
    body = {"model": "m", "prompt": ["a", "b"], "echo": True} | said
    asked = read_asked(body, chat=False, defaults=RequestDefaults())
    keys = keys_of(tokens_per_day=5000)
    with keys.request("web") as counted:
        counted.reserve(asked.tokens)
        assert counted.reserved == kept


def test_a_quota_of_tokens_is_that_of_a_day():
    now = [0.0]
    keys = keys_of(lambda: now[0], tokens_per_day=100)
    take(keys, 99)
    take(keys, 50)  # An answer's tokens are known at its end.
    with pytest.raises(RequestError, match="100 tokens of the day") as refused:
        take(keys)
    assert refused.value.code == "insufficient_quota"
    now[0] = 86_400.0
    take(keys)


def test_requests_at_once_are_given_back_however_they_end():
    keys = keys_of(at_once=1)
    with keys.request("web"), pytest.raises(RequestError, match="under way"):
        take(keys)
    with pytest.raises(KeyError), keys.request("web"):
        raise KeyError
    take(keys)


@pytest.mark.parametrize(
    "text",
    [
        "[web]", "[web]\nkey_sha256 = 'abc'", "[web]\nkey = 'plain'", "[Web]\nkey_sha256='{h}'",
        "[a]\nkey_sha256='{h}'\n[b]\nkey_sha256='{h}'", "[web]\nkey_sha256='{h}'\nat_once=-1",
        "x = 1", "\xff", "[" * 5000, "['../x']\nkey_sha256='{h}'",
    ],
)  # fmt: skip
def test_a_list_that_cannot_be_used_is_refused_without_its_content(tmp_path, text):
    path = tmp_path / "clients.toml"
    path.write_bytes(text.replace("{h}", hash_of("k")).encode("latin-1"))
    with pytest.raises(InputError, match=r"clients\.toml"):
        read_clients(str(path))
    with pytest.raises(InputError, match="cannot read"):
        read_clients(str(tmp_path / "none"))


def test_a_client_samples_by_its_own_key_and_is_told_its_limit(tmp_path, monkeypatch):
    clients = ClientKeys(
        {
            "web": ClientLimits(hash_of("web-key"), requests_per_minute=2),
            "batch": ClientLimits(hash_of("batch-key"), tokens_per_day=3),
        }
    )

    async def scenario():
        async with live_serving(
            published(), tmp_path / "state", monkeypatch, clients=clients
        ) as at:

            async def ask(key):
                async with openai.AsyncOpenAI(
                    base_url=at.url("/v1"), api_key=key, max_retries=0
                ) as client:
                    messages = [{"role": "user", "content": "Hi"}]
                    return await client.chat.completions.create(model="m", messages=messages)

            for _ in range(2):
                await ask("web-key")
            with pytest.raises(openai.RateLimitError) as refused:
                await ask("web-key")
            assert refused.value.code == "rate_limit_exceeded"
            assert int(refused.value.response.headers["Retry-After"]) >= 1
            assert (await at.call("GET", "/v1/models", "web-key"))[0] == 200
            await ask("batch-key")
            with pytest.raises(openai.RateLimitError) as refused:
                await ask("batch-key")
            assert refused.value.code == "insufficient_quota"
            for wrong in ("other-key", hash_of("web-key"), "", "web"):
                assert (await at.call("GET", "/v1/models", wrong))[0] == 401
            for path in ("/live/state", "/live/clients"):
                assert (await at.call("GET", path, "web-key"))[0] == 403
            _, data, _ = await at.call("GET", "/live/clients", ADMIN)
            used = json.loads(data)["clients"]
            assert (used["web"]["requests"], used["web"]["refused"]) == (2, 1)
            assert used["batch"]["tokens_today"] >= 3
            assert (await ask(TOKEN)).choices, "the gateway's own token has no limit"

    asyncio.run(scenario())


def test_the_list_is_read_again_and_a_half_written_one_changes_nothing(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(launched, "TOKENS_EVERY_S", 0.0)
    path = tmp_path / "clients.toml"
    path.write_text(f"[a]\nkey_sha256 = '{hash_of('one')}'\n")
    clients = ClientKeys(read_clients(str(path)))
    files = _TokenFiles(GatewayOptions(replicas=[], clients=str(path)), Tokens("t", "a"), clients)
    path.write_text("[a")
    for _ in range(3):
        files.poll()
    assert len([one for one in caplog.records if "clients before" in one.message]) == 1
    assert clients.name_of("Bearer one") == "a"
    replacement = tmp_path / "new"
    replacement.write_text(f"[b]\nkey_sha256 = '{hash_of('two')}'\n")
    replacement.replace(path)
    files.poll()
    assert clients.name_of("bearer two") == "", "a second read must find the same"
    files.poll()
    assert (clients.name_of("bearer two"), clients.name_of("Bearer one")) == ("b", "")
