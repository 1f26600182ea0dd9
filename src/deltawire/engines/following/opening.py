"""Opens an engine whose server fetches a run's weights itself."""

from __future__ import annotations

from collections.abc import Callable

from deltawire.engines.base import EngineRequest, OpenEngine
from deltawire.engines.following.engine_client import RemoteWeights
from deltawire.engines.following.engine_server import EngineServer
from deltawire.engines.following.remote_sampler import RemoteSampler
from deltawire.errors import InputError
from deltawire.store.retrying import RetryingBucket
from deltawire.sync import ManifestFollower


def open_followed(
    request: EngineRequest,
    start: Callable[[], EngineServer],
    sampler_of: Callable[[str, int], RemoteSampler],
) -> OpenEngine:
    """Starts a server by ``start`` and has it serve the newest version.

    The server fetches the weights; this process reads only the manifests, and holds the server to
    their digests. ``sampler_of`` makes the sampler of a socket's path, from a version on. Raises
    `InputError` if the run has no version or the server does not come up, `ResyncError` if it does
    not reach the version, or reaches it with another digest.
    """
    steps = ManifestFollower(RetryingBucket(request.bucket), request.run)
    newest = steps.prepare()
    if newest is None:
        raise InputError("the run has no version yet", run=request.bucket.url)
    server = start()
    try:
        server.wait_until_up(stopping=request.is_stopping)
        weights = RemoteWeights(server.calls)
        weights.swap({}, newest.version, newest.digest)
        steps.commit(newest)
    except BaseException:
        server.close()
        raise
    sampler = sampler_of(server.socket, newest.version)

    async def close() -> None:
        await sampler.close()
        server.close()

    return OpenEngine(sampler=sampler, weights=weights, steps=steps, close=close, external=True)
