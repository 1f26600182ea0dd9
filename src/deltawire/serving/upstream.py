"""An upstream: another provider's model behind OpenAI's API, as a replica that holds no version.

Nothing attests its weights, and it states no tokens that the run could be trained on. It is there
so that a product can begin with the provider that it has, and compare the run's versions with it.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import aiohttp

from deltawire.errors import InputError, RetryError
from deltawire.serving.contract import CacheReset
from deltawire.serving.http_answers import read_limited
from deltawire.serving.replica import HeldVersion, Replica
from deltawire.wire.decisions import ServedVersion

ENGINE = "openai"
POLL_EVERY_S = 30.0
ANSWER_WITHIN_S = 10.0
MAX_LIST_BYTES = 4 << 20
REFUSED = frozenset({401, 402, 403})
"""Statuses by which a provider refuses the gateway's key: no client can do anything about it."""


class OpenAIUpstream(Replica):
    """The model ``model`` at an OpenAI-compatible endpoint, by the ``name`` that decisions call it.

    ``base_url`` is what OpenAI's clients are given, such as ``https://api.openai.com/v1``. ``key``
    is the gateway's own at this provider. The caller owns the session.

    Example::

        OpenAIUpstream("openai", "https://api.openai.com/v1", session, model="gpt-x", key=key)
    """

    poll_every_s = POLL_EVERY_S

    def __init__(
        self, name: str, base_url: str, session: aiohttp.ClientSession, *, model: str, key: str = ""
    ) -> None:
        self.name, self.upstream, self.model = f"upstream {name}", name, model
        self.base_url = base_url.rstrip("/")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.held_now = ServedVersion.of_upstream(name)
        self._session = session

    @property
    def host(self) -> str:
        """The provider's host, for people."""
        return urlsplit(self.base_url).netloc

    def url(self, path: str) -> str:
        """Returns the URL of a path such as ``/v1/chat/completions``."""
        return f"{self.base_url}{path.removeprefix('/v1')}"

    async def held(self) -> HeldVersion:
        """Returns the number that stands for this upstream, once the provider answers at all.

        Raises `RetryError` if it does not, and `InputError` if it refuses the key.
        """
        try:
            async with self._session.get(
                f"{self.base_url}/models",
                headers=self.headers,
                timeout=aiohttp.ClientTimeout(total=ANSWER_WITHIN_S),
                allow_redirects=False,
            ) as answer:
                await read_limited(answer.content, MAX_LIST_BYTES)
                status = answer.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RetryError(f"{self.name} does not answer: {type(error).__name__}") from error
        if status in REFUSED:
            raise InputError(
                f"{self.name} refuses the key (status {status})",
                hint="give another one with --upstream-key-file, and start the gateway again",
            )
        if status >= 500 or 300 <= status < 400:
            raise RetryError(f"{self.name} answers {status}")
        return HeldVersion(self.held_now.version, "", ENGINE)

    async def load(self, version: int, *, cache: CacheReset) -> HeldVersion:
        """Raises `InputError`: nobody can change its weights."""
        del cache
        raise InputError(f"{self.name} holds no version {version}, and cannot load one")
