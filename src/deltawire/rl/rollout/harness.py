"""Runs an episode of an agent harness, which calls the model by HTTP and is recorded.

Concurrency::

    harness ─▶ endpoint (in this process, with a port and a token per episode) ─▶ engine
       └─ reward                └─ recording ─▶ segments ─▶ trajectories
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import numpy as np

from deltawire.chat.openai.endpoint import Endpoint, Policy, listening
from deltawire.chat.openai.recording import RecordedSegment, Recording
from deltawire.chat.text import Text
from deltawire.engines.base import Sampler
from deltawire.envs.base import AgentHarness, ModelEndpoint
from deltawire.rl.rollout.episode_types import (
    Episode,
    EpisodeFailure,
    EpisodeLimits,
    ask_probes,
    checked_reward,
    one_line,
    within,
)
from deltawire.runtime.orphans import track_orphans
from deltawire.wire.rollouts import Thinking, Trajectory


async def run_harness(
    engine: Sampler, harness: AgentHarness, text: Text, *, temperature: float, limits: EpisodeLimits
) -> Episode:
    """Plays one episode; see `deltawire.rl.rollout.episode.run_episode`.

    A harness that raises after a request was refused for lack of context or turns has not failed:
    the model wrote too much, and gets reward 0.
    """
    recording = Recording(text)
    policy = Policy(
        limits.requests(temperature),
        turns=limits.max_turns,
        budget=limits.budget,
        verifier=harness.verify,
    )
    token = secrets.token_urlsafe(24)
    endpoint = Endpoint(engine, text, policy, token=token, recording=recording)
    cause, reward, solved = "", 0.0, False
    probes: Mapping[str, float] = {}
    with track_orphans() as processes:
        try:
            async with listening(endpoint) as url:
                access = ModelEndpoint(url, token, policy.model)
                reward = await _drive(harness, access, endpoint, limits)
            if not recording.turns:
                raise EpisodeFailure("the harness never called the model")
            probes = await ask_probes(harness.probes, limits.step_s)
            solved = bool(harness.solved(reward))
        except EpisodeFailure as failure:
            cause = str(failure)
        except (Exception, SystemExit) as error:  # `solved` is the environment's code
            cause = f"solved raised {type(error).__name__}: {error}"
        finally:
            try:
                await within("close", harness.close, limits.step_s)
            except EpisodeFailure as failure:
                cause = cause or str(failure)
            if left := processes.end():
                cause = cause or f"it left {left} processes running"
    cause = one_line(cause)
    return _episode(
        recording, endpoint, 0.0 if cause else reward, cause, probes, limits, solved=solved
    )


async def _drive(
    harness: AgentHarness, access: ModelEndpoint, endpoint: Endpoint, limits: EpisodeLimits
) -> float:
    try:
        found = await within("the harness", lambda: harness.drive(access), limits.episode_s)
    except EpisodeFailure as failure:
        if endpoint.refused and isinstance(failure.__cause__, Exception):
            return 0.0
        raise
    try:
        return checked_reward("the harness", found)
    except (TypeError, ValueError) as error:
        raise EpisodeFailure(f"the harness returned no reward: {error}") from error


def _episode(
    recording: Recording,
    endpoint: Endpoint,
    reward: float,
    cause: str,
    probes: Mapping[str, float],
    limits: EpisodeLimits,
    *,
    solved: bool,
) -> Episode:
    segments = recording.segments() or [RecordedSegment([])]
    prompt = segments[0].prompt
    trajectories = [
        Trajectory(
            np.array(segment.tokens, np.int32),
            np.minimum(np.array(segment.logprobs, np.float32), 0),
            np.array(segment.versions, np.int32),
            np.array(segment.mask, np.uint8),
            reward,
            endpoint.refused or segment.finish or "stop",
            prompt=None if segment.prompt == prompt else np.array(segment.prompt, np.int32),
            turns=max(1, segment.turns),
            cause=cause,
            probes=probes,
            thinking=None
            if limits.thinking is None
            else Thinking(limits.budget, tuple(segment.thoughts), tuple(segment.forced)),
        )
        for segment in segments
    ]
    return Episode(prompt, trajectories, solved and not cause, cause)
