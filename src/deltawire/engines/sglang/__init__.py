"""Runs SGLang as an engine whose weights follow a run while it serves, or are only attested.

Two sides share this folder. In SGLang's processes, loaded as a plugin: `hooks`, `rank_controller`
(in each rank's scheduler), `http_calls` (in the process that serves HTTP) and their dependencies.
In a rollout worker, which starts an SGLang server and imports no SGLang module: `opening`, `server`
and `sampler`. Parts that other engines need too are in `deltawire.engines.following`.
"""

FOLLOW = "DELTAWIRE_FOLLOW"
"""The environment variable that names the run: its bucket's location, or a JSON object with the
members of `FollowSettings`."""
