"""Runs vLLM as an engine whose weights follow a run while it serves.

Two sides share this folder. In vLLM's processes, loaded as a plugin: `core_controller` (the core),
`rank_calls` (each worker) and their dependencies. In a rollout worker, which starts a vLLM server
and imports no vLLM module: `opening`, `server` and `sampler`. Parts that
other engines need too are in `deltawire.engines.following`.
"""
