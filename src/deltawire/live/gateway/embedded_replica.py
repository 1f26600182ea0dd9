"""A replica that samples from the embedded engine, for a gateway without vLLM.

::

    POST /v1/chat/completions, /v1/completions   answers, with tokens and their versions
    POST /collective_rpc                         deltawire_status, deltawire_want: as vLLM's plugin

    follower's thread   prepares the next version  ─▶  one event loop: swap, answer, decode a step

The calls are those that `deltawire.serving.vllm.VllmReplica` makes, so gateways treat it as any
replica. It follows the run until a gateway asks for a version, and holds that one from then on. It
draws no token with the versions between, which may be withdrawn ones: answers wait until it is
there, at most `MOVE_S`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from deltawire.chat.openai.endpoint import Endpoint, Policy
from deltawire.chat.requests import RequestSettings
from deltawire.config import RunConfig
from deltawire.errors import InputError
from deltawire.export.weights_only import settings_of_weights
from deltawire.rl.rollout.policy_server import ServedPolicy, follow, serve_policy
from deltawire.runtime.process import RUN_PATIENCE_S, Process, open_run
from deltawire.sync import Follower
from deltawire.wire.objects import prepared

IDLE_S = 0.005
LATEST = 1 << 62
MOVE_S = 10.0
"""The longest that answers wait for a version that was asked for, in seconds from the first step
towards it. After that a bucket that stopped answering must not stop the replica too."""


class _ReplicaCall(msgspec.Struct):
    method: str
    args: Annotated[list[str], Meta(max_length=4)] = []


@dataclass
class EmbeddedReplica:
    """One model, its engine, and what a gateway asked it to hold.

    ``wanted`` is the newest version that it may serve. ``failure`` says why it cannot hold the one
    that was asked for; empty if it can.

    Example::

        replica = EmbeddedReplica(process, served, follower, endpoint)
        await replica.serve()
    """

    process: Process
    served: ServedPolicy
    follower: Follower
    endpoint: Endpoint
    wanted: int = LATEST
    failure: str = ""
    _until: float = 0.0
    """When answers go on even if the wanted version is not reached, of the monotonic clock."""

    def app(self) -> web.Application:
        """The application: the endpoint's, and the calls of a gateway."""
        app = self.endpoint.app()
        app.router.add_post("/collective_rpc", self._rpc)
        app.router.add_get("/health", self._health)
        return app

    async def serve(self) -> None:
        """Swaps and decodes until the process is asked to stop."""
        self.follower.start()
        try:
            while not self.process.stopping:
                if self.served.live.version < self.wanted:
                    self._swap()
                if self.served.engine.active and not self._between:
                    await self.served.engine.advance()
                else:
                    await asyncio.sleep(IDLE_S)
        finally:
            self.served.engine.cancel_all()
            await self.served.close()
            self.follower.close()

    @property
    def _between(self) -> bool:
        """True between the version that was held and the one that was asked for."""
        return self.served.live.version < self.wanted < LATEST and time.monotonic() < self._until

    def _swap(self) -> None:
        """Swaps to the next version, if it is prepared; a replica stores no events in the run."""
        update = self.follower.poll()
        if update is not None:
            if not self._until:
                self._until = time.monotonic() + MOVE_S
            self.served.live.swap(update.patches, update.version, update.digest)
            self.served.engine.version = update.version
            self.follower.commit(update)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        del request
        return web.json_response({"ready": True})

    async def _rpc(self, request: web.Request) -> web.StreamResponse:
        try:
            call = msgspec.json.decode(await request.read(), type=prepared(_ReplicaCall))
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise InputError("the call cannot be parsed") from error
        if call.method == "deltawire_want":
            self._want(call.args)
        elif call.method != "deltawire_status":
            raise InputError(f"there is no call {call.method[:64]!r}")
        live = self.served.live
        status: dict[str, object] = {
            "engine": "embedded",
            "version": live.version,
            "wanted": live.version if self.wanted == LATEST else self.wanted,
            "phase": "serving" if live.version >= self.wanted or self.failure else "preparing",
            "failure": self.failure,
            "digest": live.digest.hex(),
            "ranks": [],
        }
        return web.json_response({"results": [status]})

    def _want(self, args: list[str]) -> None:
        if len(args) != 1 or not args[0].isdecimal() or len(args[0]) > 15:
            raise InputError("deltawire_want takes the number of a version")
        held, self.wanted = self.served.live.version, int(args[0])
        self.failure, self._until = "", 0.0
        if self.wanted < held:
            self.failure = f"the embedded engine holds version {held} and only goes forward"


def open_replica(process: Process, *, token: str, hold: bool = False) -> EmbeddedReplica:
    """Opens a run's newest version; with ``hold`` it stays there until a gateway asks for another.

    The run may hold only weights, as `open_publisher` and ``deltawire publish`` make it. Raises
    `InputError` if it has no version, or the engine cannot serve it.
    """
    run, config = open_run(
        process.bucket,
        role="worker",
        wait_s=RUN_PATIENCE_S,
        stopping=process.is_stopping,
        weights_only=settings_of_weights,
    )
    seed = int.from_bytes(process.nonce.encode()[:6], "little") ^ config.seed
    served, steps = serve_policy(
        process, run, config, engine="transformers", seed=seed, stepwise=True
    )
    endpoint = Endpoint(served.engine, served.text, policy_of(config), token=token)
    replica = EmbeddedReplica(process, served, follow(steps, served), endpoint)
    if hold:
        replica.wanted = served.live.version
    return replica


def policy_of(config: RunConfig) -> Policy:
    """Returns the settings of users' requests: those of training, unless a client samples
    otherwise."""
    settings = RequestSettings.of(config.rollout)
    return Policy(settings, client_samples=True, model=config.name, budget=settings.largest_budget)
