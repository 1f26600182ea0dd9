"""Serves one version of a run after another on a local URL, for ``bisect --serve``.

::

    caller's thread   bring_to: load the version by deltas, compare with the live bits ─▶ patches
                          │ waits for the swap
    server's thread   one event loop: answer, decode a step, swap between two steps

The weights are patched in place and attested, also on the way back: the patch to an earlier version
is the difference between two mirrors. A request that a command left open continues on the next
version, as in any swap; those of closed connections are cancelled.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from concurrent.futures import Future, wait
from contextlib import ExitStack
from typing import Any

from rich.console import Console

from deltawire import codec
from deltawire.chat.openai.endpoint import Endpoint
from deltawire.codec import Patch
from deltawire.engines.transformers.engine import IDLE_S, TransformersEngine
from deltawire.errors import BugError
from deltawire.launch.branches.versioned_model import open_model_of
from deltawire.launch.listening import listening
from deltawire.live.gateway.embedded_replica import policy_of
from deltawire.placement.live import LiveWeights
from deltawire.serving.app import build_runner
from deltawire.store import Bucket
from deltawire.sync import Mirror, load_mirror

CHECK_S = 0.2
"""Time between checks that the server's thread, which a swap waits for, still runs."""


class VersionServer:
    """An OpenAI endpoint on this machine, whose model moves between versions. ``base`` is the
    earliest version that will be asked for. Use it as a context.

    Example::

        with VersionServer(bucket, base=40) as server:
            url = server.bring_to(80)
    """

    def __init__(self, bucket: Bucket, *, base: int) -> None:
        self._bucket = bucket
        self._token = secrets.token_urlsafe(24)
        self._open = ExitStack()
        model = self._open.enter_context(open_model_of(bucket))
        self._run = model.run
        self._base = load_mirror(bucket, model.run, at=base)
        self._live = self._base.copy()
        module = model.serving()
        self._weights = LiveWeights(module, model.run.tensors, aliases=model.run.aliases)
        self._weights.load(self._live)
        rollout = model.config.rollout
        self._engine = TransformersEngine(
            module,
            stop_tokens=sorted(model.stops),
            slots=rollout.slots,
            capacity=rollout.context,
            seed=model.config.seed,
            version=base,
        )
        self._endpoint = Endpoint(
            self._engine, model.text, policy_of(model.config), token=self._token
        )
        self._loop = asyncio.new_event_loop()
        self._stopping = False
        self._url: Future[str] = Future()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="version-server", daemon=True)

    def __enter__(self) -> VersionServer:
        self._thread.start()
        self._url.result()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join()
        self._loop.close()
        self._open.close()

    @property
    def environment(self) -> dict[str, str]:
        """Returns what a command needs to reach the endpoint."""
        url = self._url.result()
        return {
            "DELTAWIRE_URL": url,
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": self._token,
        }

    def bring_to(self, version: int) -> str:
        """Swaps to a version, and returns the URL. Raises `CorruptError` if it cannot be read, and
        the error that ended the server's thread if one did."""
        self._require_running()
        if version != self._live.version:
            start = self._live if self._live.version < version else self._base
            target = load_mirror(self._bucket, self._run, at=version, into=start.copy())
            patches = patches_between(self._live, target)
            swap = self._swap(patches, target)
            swapped = asyncio.run_coroutine_threadsafe(swap, self._loop)
            while not wait([swapped], CHECK_S).done:
                try:
                    self._require_running()
                except BaseException:
                    swap.close()  # The loop ended before the swap began.
                    raise
            swapped.result()
            move(self._live, patches, target)
        return self._url.result()

    def _require_running(self) -> None:
        if not self._thread.is_alive():
            raise self._error or BugError("the server of versions has ended")

    async def _swap(self, patches: dict[str, Patch], target: Mirror) -> None:
        self._weights.swap(patches, target.version, target.digest)
        self._engine.version = target.version

    def _serve(self) -> None:
        try:
            self._loop.run_until_complete(self._decode())
        except BaseException as error:
            self._error = error
            if not self._url.done():
                self._url.set_exception(error)

    async def _decode(self) -> None:
        runner: Any = build_runner(self._endpoint.app())
        async with listening(
            runner,
            host="127.0.0.1",
            port=0,
            context=None,
            console=Console(stderr=True, quiet=True),
            name=self._bucket.url,
        ) as url:
            self._url.set_result(f"{url}/v1")
            while not self._stopping:
                if self._engine.active:
                    await self._engine.advance()
                else:
                    await asyncio.sleep(IDLE_S)
            self._engine.cancel_all()


def move(mirror: Mirror, patches: dict[str, Patch], target: Mirror) -> None:
    """Moves a mirror, which live weights refer to, to another version."""
    mirror.begin()
    for name, patch in patches.items():
        codec.apply(patch, mirror.tensors[name])
    mirror.finish(target.version, target.digest, target.held)


def patches_between(old: Mirror, new: Mirror) -> dict[str, Patch]:
    """Returns what turns one version's bits into another's, by tensor."""
    if old.tensors.keys() != new.tensors.keys():
        raise BugError("two versions of a run hold other tensors")
    found = {name: codec.diff(old.tensors[name], bits) for name, bits in new.tensors.items()}
    return {name: patch for name, patch in found.items() if len(patch.positions)}
