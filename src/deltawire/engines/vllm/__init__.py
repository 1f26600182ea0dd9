"""vLLM as an engine: weights that follow a run while they are served.

Two sides share this folder. In vLLM's processes, loaded as a plugin: `swap_controller` (the core),
`rank_weights` (each worker) and what they need. In a rollout worker, which starts a vLLM server
and imports no vLLM module: `opening`, `server`, `guard` and `remote`.
"""
